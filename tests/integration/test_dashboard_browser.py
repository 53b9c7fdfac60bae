"""The dashboard in a real browser: every view and every action, for a job that loses a worker and a node."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect, sync_playwright

import large_dashboard
from dashboards import Dashboard, await_agents
from holdfast.views.report.html import render
from holdfast.views.report.model import describe
from real_jobs import PATIENCE_S
from real_teams import Cluster
from timelines import one_restart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Locator, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), "")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--no-first-run",
]  # fmt: skip
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")

SETTLED = "settle=4"  # All nodes are in generation 0, and node-c rejoins after this time.
HOSTILE = "<img src=x onerror=alert(1)>"
SCRIPT = """
    from holdfast import worker
    print("begun", E["SAYS"], flush=True)
    for step in range(10 ** 9):
        worker.progress(step, total=50_000, loss=4 / (1 + step) ** 0.3)
        if step % 20 == 0:
            print("step", step, "loss", round(4 / (1 + step) ** 0.3, 4), flush=True)
        order = signal.sigtimedwait(ORDERS, 0.08 if RANK == "5" else 0.05)
        # If py-spy interrupts the call just before its timeout, Python returns a result without a signal.
        if order is not None and order.si_signo == signal.SIGUSR2:
            raise RuntimeError(E["SAYS"])
"""


@pytest.fixture
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=1000 * PATIENCE_S)
    with sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield one
        one.close()


@contextmanager
def opened(browser: Browser, dashboard: Dashboard) -> Iterator[Page]:
    """Open the page and log in; fail if the page has an error, a blocked resource or injected code."""
    # A time zone that is not whole hours from UTC, where the marks of the time axis must be round too.
    context = browser.new_context(
        viewport={"width": 1240, "height": 860}, timezone_id="Asia/Kolkata"
    )
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE_S)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    page.on(
        "request",
        lambda one: None if one.url.startswith(dashboard.address) else problems.append(one.url),
    )
    page.goto(dashboard.address)
    page.fill("#token", "wrong")
    page.click("text=Log in")
    expect(page.locator("#problem")).not_to_be_empty()
    problems.clear()  # Chromium logs the 401.
    page.fill("#token", dashboard.token)
    page.keyboard.press("Enter")
    expect(page.locator("#live")).to_have_class("live on")
    yield page
    assert not problems
    assert dashboard.token not in page.content() + page.url
    context.close()


class Shots:
    """Screenshots for the documentation, if requested."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def take(self, page: Page, name: str) -> None:
        if self.folder:
            page.screenshot(path=Path(self.folder, f"{name}.png"))


def test_dashboard_views_and_actions_work(
    tmp_path: Path, browser: Browser, request: pytest.FixtureRequest
) -> None:
    shots = Shots(str(request.config.getoption("--screenshots")))
    says = "CUDA error: out of memory" if shots.folder else HOSTILE
    logs = tmp_path / "logs"
    flags = (
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        "--log-dir",
        str(logs),
    )
    with Cluster(tmp_path, SCRIPT, *flags, nnodes="2:3", run_id="nightly", conf=SETTLED) as cluster:
        for name in ("node-a", "node-b", "node-c"):
            agent = cluster.start(
                name, conf=f"node_id={name}", env={"SAYS": says, "PATH": fake_gpus(tmp_path)}
            )
            cluster.await_coordinator(agent)  # The first agent runs it.
        workers = cluster.ranks(6)
        await_agents(*(agent.pid for agent in cluster.agents.values()))
        with (
            Dashboard(tmp_path, "nightly", "--log-dir", str(logs)) as dashboard,
            opened(browser, dashboard) as page,
        ):
            see_overview(page)
            os.kill(workers[1].pid, signal.SIGKILL)  # A worker is lost.
            expect(figure(page, "generation")).to_have_text("1")
            expect(figure(page, "restarts charged")).to_have_text("1 of 3")
            workers = cluster.ranks(6)
            expect(figure(page, "workers running")).to_have_text("6 of 6")
            expect(page.locator(".figure", has_text="step")).to_contain_text("steps/s")
            workers[4].fail()
            expect(figure(page, "generation")).to_have_text("2")
            workers = cluster.ranks(6)
            expect(page.locator(".figure", has_text="step")).to_contain_text("steps/s")
            expect(page.locator(".mark.slow").first).to_be_visible()
            shots.take(page, "dashboard")
            look_at_timeline(page, says, shots)
            look_at_ranks(page)
            search_logs(page, says)
            take_stacks(page)
            read_failures(page, says)

            act(page, page.locator("#restart"), "new data")
            cluster.ranks(6)
            page.keyboard.press("1")
            expect(page.locator("#view-overview .events")).to_contain_text("new data")
            act(page, row(page, "node-c").get_by_role("button"), "its disk fails")
            expect(row(page, "node-c")).to_contain_text("drained")
            cluster.ranks(4)
            act(page, row(page, "node-c").get_by_role("button"), "a new disk")
            cluster.ranks(6)
            expect(row(page, "node-c")).to_contain_text("running")
            cluster.agents["node-b"].kill()  # A node is lost.
            cluster.ranks(4)
            expect(row(page, "node-b")).to_have_count(0)
            expect(page.locator("#why")).to_contain_text("node-b")
            page.keyboard.press("6")
            failures = page.locator("#failure-list > details")
            expect(failures).to_have_count(3)  # Not the requested restart, nor the drains.
            expect(failures.first).to_contain_text("node-b")
            page.keyboard.press("1")
            act(page, page.locator("#stop"), "seen enough")
            see_end(page, logs)
            agents = (cluster.agents[name] for name in ("node-a", "node-c"))
            assert {agent.end()[0] for agent in agents} == {143}
            page.click("#logout")
            expect(page.locator("#token")).to_be_visible()


def fake_gpus(folder: Path) -> str:
    """Return a PATH with an nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'GPU-1, 93\\nGPU-2, 71\\n'\n")
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def see_overview(page: Page) -> None:
    expect(page.locator("#job")).to_have_text("nightly")
    expect(page.locator("#state")).to_have_text("running")
    expect(figure(page, "workers running")).to_have_text("6 of 6")
    for name, ranks in (("node-a", "0-1"), ("node-b", "2-3"), ("node-c", "4-5")):
        expect(row(page, name)).to_contain_text("running")
        if name == "node-a":  # The others join in any order.
            expect(row(page, name)).to_contain_text(ranks)
    # The first generation has a warm-up only if all ranks have made a step.
    expect(page.locator(".figure", has_text="step")).to_contain_text("steps/s")
    expect(page.locator(".figure", has_text="step")).to_contain_text("of 50,000")
    expect(figure(page, "ETA")).to_be_visible()
    for kind, value in (
        ("rates", r"\d"),
        ("losses", r"\d"),
        ("rss", r"\d.* MiB"),
        ("gpu", "82.0 %"),
    ):
        plot = page.locator(f"#history [data-kind={kind}] [role=img]")
        expect(plot).to_have_attribute("aria-label", re.compile(f"; now {value}"))
        expect(plot.locator(".line")).to_have_attribute("d", re.compile("^M"))
    page.click("#history button >> text=10 minutes")
    expect(page.locator("#history [aria-pressed=true]")).to_have_text("10 minutes")


def see_end(page: Page, logs: Path) -> None:
    expect(page.locator("#live")).to_have_text("ended")
    expect(page.locator("#state")).to_have_text("stopped")
    expect(page.locator("#why")).to_have_text(re.compile(r"seen enough · at \d\d:\d\d:\d\d$"))
    expect(page.locator("#report")).to_have_text(f"Report: holdfast report {logs}")
    expect(page.locator("#live")).to_have_text("ended")  # It stays, without the agents.
    expect(page.locator(".pill.running")).to_have_count(0)
    for name in ("Restart", "Stop", "Drain", "Undrain", "Take stacks"):
        expect(page.locator("button:visible", has_text=name)).to_have_count(0)


def look_at_timeline(page: Page, says: str, shots: Shots) -> None:
    page.keyboard.press("2")
    chart = page.locator("#chart")
    expect(chart.locator(".piece.warmup")).to_have_count(3)
    # Each generation begins with the same step.
    expect(chart.locator(".piece.repeated")).to_have_count(2)
    expect(chart.locator(".piece").last).to_have_class("piece useful")
    whole = span(chart)
    page.click("text=Last failure")
    zoomed = span(chart)
    assert zoomed < whole
    detail = page.locator("#view-timeline .chosen", has_text="Generation 1 ended")
    expect(detail).to_contain_text(says)
    expect(detail).to_contain_text("regroup")
    shots.take(page, "dashboard-timeline")
    page.keyboard.press("+")  # The chart has the focus.
    assert span(chart) < zoomed
    page.keyboard.press("0")
    assert span(chart) >= whole
    expect(page.locator("#view-timeline tbody tr")).to_have_count(3)


def look_at_ranks(page: Page) -> None:
    page.keyboard.press("3")
    for metric in ("Step", "Lag", "Memory", "Rate"):
        page.click(f".choice >> text={metric}")
        expect(page.locator(".choice [aria-pressed=true]")).to_have_text(metric)
    page.focus("canvas")
    page.keyboard.press("End")
    expect(page.locator("#rank-detail h3")).to_contain_text("Rank 5")
    box = page.locator("canvas").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 20, box["y"] + 40)
    expect(page.locator("#rank-detail h3")).to_contain_text("Rank 0")
    page.keyboard.press("Enter")
    expect(page.locator("#logs-ranks")).to_have_value("0")


def search_logs(page: Page, says: str) -> None:
    lines = page.locator("#log-lines > div")
    expect(lines.first).to_contain_text(f"begun {says}")
    expect(lines.filter(has_text="step 40 loss")).to_have_count(1)  # The view follows the log.
    page.fill("#logs-ranks", "")
    page.keyboard.press("Escape")
    page.uncheck("#logs-follow")
    page.fill("#logs-grep", "begun")
    page.keyboard.press("Enter")
    expect(lines).to_have_count(6)
    assert sorted(str(one).split()[0] for one in lines.all_text_contents()) == [*"012345"]
    assert page.locator("#log-lines img").count() == 0


def take_stacks(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#stacks")
    page.click("text=Take stacks")
    groups = page.locator("#stack-groups details")
    expect(groups.first).to_contain_text("train.py")
    expect(page.locator("#view-stacks [role=status]")).to_contain_text("6 ranks")


def read_failures(page: Page, says: str) -> None:
    page.goto(page.url.partition("#")[0] + "#failures")
    failures = page.locator("#failure-list > details")
    expect(failures).to_have_count(2)
    expect(failures.first.locator("pre").first).to_contain_text("Traceback")
    expect(failures.first).to_contain_text(f"RuntimeError: {says}")
    expect(failures.last).to_contain_text("SIGKILL")
    failures.first.locator("text=Show it in the timeline").click()
    expect(page.locator("#view-timeline")).to_contain_text("Generation 1 ended")


def act(page: Page, button: Locator, reason: str) -> None:
    """Click an action, and confirm it."""
    button.click()
    page.fill("#reason", reason)
    page.locator("dialog button.primary").click()
    expect(page.locator(".toast").last).to_contain_text("accepted")
    expect(page.locator("dialog")).to_be_hidden()


def row(page: Page, node: str) -> Locator:
    return page.locator("#view-overview tbody tr", has_text=node).filter(has=page.locator("button"))


def figure(page: Page, name: str) -> Locator:
    return page.locator(".figure", has_text=name).locator("b")


def span(chart: Locator) -> float:
    begin, end = (chart.get_attribute(f"data-{name}") for name in ("from", "to"))
    return float(end or 0) - float(begin or 0)


def test_rank_map_shows_every_rank(
    tmp_path: Path, browser: Browser, request: pytest.FixtureRequest
) -> None:
    count = 10_000
    command = (sys.executable, large_dashboard.__file__, str(count))
    with Dashboard(tmp_path, command=command) as dashboard, opened(browser, dashboard) as page:
        expect(figure(page, "workers running")).to_have_text(f"{count} of {count}")
        page.keyboard.press("3")
        expect(page.locator("canvas")).to_have_attribute("data-cells", str(count))
        page.focus("canvas")
        page.keyboard.press("End")
        expect(page.locator("#rank-detail h3")).to_contain_text(f"Rank {count - 1}")
        slow = page.locator("#view-ranks tbody tr")
        expect(slow).to_have_count(1)
        expect(slow).to_contain_text("node0041")
        expect(slow).to_contain_text("slow")
        page.evaluate("scrollTo(0, 0)")
        Shots(str(request.config.getoption("--screenshots"))).take(page, "dashboard-ranks")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1240


def test_session_belongs_to_one_tab_and_one_port(tmp_path: Path, browser: Browser) -> None:
    command = (sys.executable, large_dashboard.__file__, "8")
    with (
        Dashboard(tmp_path, command=command) as dashboard,
        opened(browser, dashboard) as page,
        served_page() as (other, requests),
    ):
        page.keyboard.press("2")
        page.reload()
        expect(page.locator("#live")).to_have_class("live on")
        second = page.context.new_page()
        second.goto(f"{dashboard.address}#timeline")
        expect(second.locator("#token")).to_be_visible()
        second.goto(other)
        assert second.evaluate("JSON.stringify(sessionStorage)") == "{}"
        second.reload()
        assert len(requests) > 1
        assert not any("cookie" in names for names in requests), (
            "a browser sends cookies to all ports"
        )
        second.goto(f"{dashboard.address}#timeline")
        second.fill("#token", dashboard.token)
        second.keyboard.press("Enter")
        expect(second.locator("#view-timeline")).to_be_visible()
        second.click("#logout")
        expect(second.locator("#token")).to_be_visible()
        expect(page.locator("#live")).to_have_class("live on")
        page.reload()
        expect(page.locator("#live")).to_have_class("live on")


@contextmanager
def served_page() -> Iterator[tuple[str, list[set[str]]]]:
    """Serve an empty page on another port; record the names of the headers it receives."""
    requests: list[set[str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append({name.lower() for name in self.headers})
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", requests
        server.shutdown()
        thread.join()


def test_zoomed_timeline_of_a_report_labels_every_mark_differently(browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1240, "height": 860})
    text = render(describe(one_restart().runs()))
    page.set_content(re.sub(r'data-seconds="[^"]+"', 'data-seconds="7300"', text))
    for _ in range(5):
        page.click("text=Zoom in")
    labels = page.locator(".ticks text").all_text_contents()
    assert "1 h 1 min 30 s" in labels
    assert len({*labels}) == len(labels)
    page.close()


TICKS = """async () => {
    const { ticks, tickLabel } = await import("/timeline.js");
    const at = (...parts) => new Date(2026, 10, ...parts).getTime() / 1000;
    return [[at(19, 10, 59, 59, 850), 0.3, 0.1], [at(19, 21), 18001, 7200], [at(18, 13), 160000, 86400]]
        .map(([from, span, step]) => ticks(from, from + span, step).map((one) => tickLabel(one, step)));
}"""


HISTORY = """async () => {
    const { history } = await import("/history.js");
    const none = [null, null, null, null, null];
    const { element, render } = history();
    render({ job: { loss: "nan", rate: null, rss_bytes: 0, gpu: null, end: null },
        series: { edges: [0, 60, 120, 180, 240, 300], losses: [1, null, 3, "nan", 2], rates: none, rss: none, gpu: none } });
    const [plot, ...others] = element.querySelectorAll("figure:not([hidden])");
    const path = (name) => plot.querySelector(name).getAttribute("d");
    return [others.length, plot.querySelector("[role=img]").getAttribute("aria-label"),
        path("path.line").match(/M/g).length, path("path.bad"), plot.querySelector("b").className];
}"""


def test_read_only_page_has_no_buttons_on_a_phone(tmp_path: Path, browser: Browser) -> None:
    command = (sys.executable, large_dashboard.__file__, "64", "--read-only")
    with Dashboard(tmp_path, command=command) as dashboard, opened(browser, dashboard) as page:
        page.set_viewport_size({"width": 360, "height": 740})
        expect(page.locator("#over")).to_contain_text("read-only")
        for at, view in enumerate(("overview", "timeline", "ranks", "logs", "stacks", "failures")):
            page.keyboard.press(str(at + 1))
            expect(page.locator(f"#view-{view}")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
        assert page.locator(".acting:visible").count() == 0
        assert page.locator("text=Drain").count() == 0
        assert page.evaluate(HISTORY) == [
            0, "Loss over 5 min, between 1 and 3; now nan", 3, "M210.0 0V72", "bad",
        ]  # fmt: skip
        assert page.evaluate(TICKS) == [
            ["10:59:59.90", "11:00:00.00", "11:00:00.10"],
            ["22:00:00", "Nov 20", "02:00:00"],
            ["Nov 19", "Nov 20"],
        ]
