"""`holdfast top` on synthetic jobs: small and large, on small and large screens."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from holdfast.control.history import RESTART_STAGES, Generation, NodeHistory
from holdfast.control.job_client import RequestRefused
from holdfast.core.requests import Action
from holdfast.views import tables
from holdfast.views.top import app as app_module
from holdfast.views.top import columns
from holdfast.views.top.app import Top
from holdfast.views.top.screens import ConfirmScreen, shown
from holdfast.views.top.sparklines import ASCII, BLOCKS, glyphs_of, history_line, sparkline
from holdfast.views.top.table import Table, TextView
from holdfast.wire.messages import EventKind, EventRecord, LogLines
from in_loop import in_loop
from live_jobs import steady, summary
from real_jobs import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from textual.pilot import Pilot

    from holdfast.control.live_job import LiveJob
    from holdfast.wire.messages import JobSummary, LogsQuery

SMALL, LARGE = (80, 24), (200, 60)
KEYS = ("logs", "stacks", "restart", "drain", "stop", "sort", "marked", "find", "help", "quit")


class FakeClient:
    """A fake connection that records requests, and refuses them if `refusal` is set."""

    def __init__(self) -> None:
        self.requests: list[tuple[Action, str, str]] = []
        self.refusal = ""

    async def request(self, action: Action, *, node: str = "", why: str = "") -> None:
        if self.refusal:
            raise RequestRefused(self.refusal, "not-now")
        self.requests.append((action, node, why))


class FakeFeed:
    """A fake feed: the test sets the state of the job."""

    def __init__(self, job: LiveJob, changed: Callable[[], None]) -> None:
        self.job, self.changed = job, changed
        self.client: Any = FakeClient()

    async def run(self) -> None:
        """Do nothing: tests show the job themselves."""

    def show(self, at: float, one: JobSummary) -> None:
        self.job.connected()
        self.job.add_summary(at, one)


def step_of(rank: int, at_s: float) -> int:
    """Rank 5 is slow."""
    return steady(rank, at_s / 2 if rank == 5 else at_s)


def made(nodes: int, size: int = 8, **fields: Any) -> Top:
    """Return an app for a job that runs for five seconds."""
    app = Top(FakeFeed)
    for at in range(1, 6):
        feed_of(app).show(at, summary(float(at), nodes, size, step_of=step_of, **fields))
    return app


def feed_of(app: Top) -> FakeFeed:
    assert isinstance(app.driver, FakeFeed)
    return app.driver


def text_of(app: Top) -> list[str]:
    """Return the lines of the screen."""
    return [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]


async def settled(pilot: Pilot[None]) -> list[str]:
    app = pilot.app
    assert isinstance(app, Top)
    if app.screen is app.page:
        app.page.show()
    await pilot.pause()
    return text_of(app)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "200x60"])
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (125, 8)], ids=["1", "1000"])
@in_loop
async def test_every_view_fits_the_terminal(size: tuple[int, int], nodes: int, ranks: int) -> None:
    app = made(nodes, ranks, max_restarts=12, restarts=11)
    async with app.run_test(size=size) as pilot:
        lines = await settled(pilot)
        assert all(len(line) <= size[0] for line in lines)
        assert len(lines) == size[1]
        world = nodes * ranks
        for word in ("nightly", "active", "11/12", "90.0 %", "up", f"{world}/{world}", "mem"):
            assert any(word in line for line in lines[:3]), (word, lines[:3])
        for key in KEYS:
            assert key in lines[-1]
        columns_of = {"ranks": columns.RANKS, "nodes": columns.NODES, "timeline": columns.TIMELINE}
        for number, (name, every) in enumerate(columns_of.items(), 1):
            await pilot.press(str(number))
            lines = await settled(pilot)
            width = app.page.table.scrollable_content_region.width
            titles = [one.title for one in every if width >= one.from_width]
            assert lines[5].split() == " ".join(titles).split(), name
            used = sum(size for _, size in app.page.table._layout_of(width)) + len(titles)
            assert used <= width, name


@in_loop
async def test_update_draws_only_visible_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made_lines: list[int] = []
    drawn: list[int] = []

    class Counting(Table):
        def line(self, at: int, width: int) -> Any:
            made_lines.append(at)
            return super().line(at, width)

        def render_line(self, y: int) -> Any:
            drawn.append(y)
            return super().render_line(y)

    monkeypatch.setattr(app_module, "Table", Counting)
    app = made(125)
    async with app.run_test(size=SMALL) as pilot:
        await settled(pilot)
        made_lines.clear()
        drawn.clear()
        same = summary(5.0, 125, 8, step_of=step_of)
        feed_of(app).show(6, same)
        await settled(pilot)
        assert 0 < len(made_lines) <= 2 * SMALL[1]
        assert not drawn, "nothing had changed"
        report = same.nodes[0].report
        assert report is not None
        workers = [*report.workers]
        workers[3] = replace(workers[3], rss_bytes=77_000_000)
        report = replace(report, elapsed_s=5.0001, workers=workers)
        same.nodes[0] = replace(same.nodes[0], report=report)
        feed_of(app).show(7, same)
        lines = await settled(pilot)
        assert "77M" in lines[9]
        assert 0 < len(drawn) <= 8, "only the ranks of one node had changed"


@in_loop
async def test_keys_select_the_view() -> None:
    app = made(16)
    async with app.run_test(size=SMALL) as pilot:

        async def ranks_after(*keys: str) -> list[int]:
            await pilot.press(*keys)
            await settled(pilot)
            assert app.page.view == "ranks"
            return [row.rank for row in app.page.table.rows]

        assert await ranks_after() == [*range(128)]
        assert (await ranks_after("s"))[0] == 5
        assert app.page.table.cursor == 0
        assert await ranks_after("m") == [5]
        assert len(await ranks_after("escape")) == 128
        assert sorted(await ranks_after("slash", *"8-15", "enter")) == [*range(8, 16)]
        assert sorted(await ranks_after("escape", "2", "down", "enter")) == [*range(8, 16)]
        # The cursor stays on its rank when the order changes.
        await ranks_after("escape", "s", "s", "s", "s", "end")
        assert app.page.table.selected.rank == 127
        assert "127" in (await settled(pilot))[20]


@in_loop
async def test_request_needs_a_confirmation() -> None:
    app = made(3, 2)
    client: FakeClient = feed_of(app).client

    def asking() -> bool:
        return isinstance(app.screen, ConfirmScreen)

    async with app.run_test(size=SMALL) as pilot:
        await settled(pilot)
        for key in "rdx":
            await pilot.press(key)
            assert asking()
            await pilot.press("enter", "escape")  # Enter in the reason does not confirm.
            assert not asking()
        await pilot.press("r", "enter", "shift+tab", "enter")
        assert not asking()
        assert not client.requests
        await pilot.press("r", "y", "enter", "enter", "d", "enter", "enter", "x", "enter", "enter")
        await pilot.pause()
        assert client.requests == [
            (Action.RESTART, "", "y"),
            (Action.DRAIN, "node000", ""),
            (Action.STOP, "", ""),
        ]
        drained = summary(6.0, 3, 2)
        drained.nodes[0] = replace(drained.nodes[0], drained=True, rank=-1, first_rank=-1)
        feed_of(app).show(7, drained)
        await pilot.press("2", "end", "d", "enter", "enter")
        await pilot.pause()
        assert client.requests[-1] == (Action.UNDRAIN, "node000", "")
        client.refusal = "[b]not[/b] now"
        await pilot.press("r", "enter", "enter")
        await pilot.pause()
        assert [client.refusal in one.message for one in app._notifications][-1]
        assert len(client.requests) == 4


@in_loop
async def test_logs_follow_a_rank_to_another_node() -> None:
    app = made(3, 2)
    lines = [b"\x1b[31mred\x1b[0m\n", b"half", b" and half\n"]

    class Logs:
        async def logs(self, node: str, wanted: LogsQuery) -> AsyncIterator[LogLines]:
            for line in [f"{node} {wanted.ranks}\n".encode(), *lines]:
                yield LogLines(rank=wanted.ranks[0], text=line)
            await asyncio.Event().wait()

    feed_of(app).client = Logs()
    async with app.run_test(size=SMALL) as pilot:
        await settled(pilot)

        async def until(count: int) -> list[str]:
            async with asyncio.timeout(PATIENCE_S):
                while (
                    len(found := [text for text, _ in app.screen.query_one(TextView)._lines])
                    < count
                ):
                    await pilot.pause(0.02)
            return found

        await pilot.press("down", "enter")
        assert await until(3) == ["node000 [1]", "red", "half and half"]
        moved = summary(6.0, 3, 2)
        moved.nodes[0], moved.nodes[2] = (
            replace(moved.nodes[0], rank=2, first_rank=4),
            replace(moved.nodes[2], rank=0, first_rank=0),
        )
        feed_of(app).show(7, moved)
        assert (await until(6))[3] == "node002 [1]"
        await pilot.press("slash", *"red", "enter")
        assert app.screen.query_one(TextView)._at == 4


@in_loop
async def test_generation_is_shown_in_full() -> None:
    app = made(3, 2, generation=1)
    reason = "rank 3 failed: " + "a long story " * 20
    first = Generation(number=0, started_at=0.0, failed_at=58.0, stopping_at=60.0, stopped_at=63.0)
    later = Generation(
        number=1, left_at=63.0, met_at=67.0, started_at=72.0, warm_at=78.0, restarts=1, why=reason
    )
    app.job.add_history(5.0, "node000", [NodeHistory(now=80.0, generations=[first, later])])
    async with app.run_test(size=SMALL) as pilot:
        await pilot.press("3")
        lines = await settled(pilot)
        assert lines[6].split()[2:] == ["2.0s", "3.0s", "4.0s", "5.0s", "6.0s", "running"]
        assert all(stage in " ".join(lines[19:23]) for stage in RESTART_STAGES)
        await pilot.press("down", "enter")
        await pilot.pause()
        assert " ".join(text_of(app)).split().count("story") == 20
        await pilot.press("escape", "question_mark")
        await pilot.pause()
        assert "BEAT" in " ".join(text_of(app)), "the whole help is on the smallest screen"


@pytest.mark.parametrize(
    ("environ", "glyphs"),
    [
        ({"LANG": "en_GB.UTF-8"}, BLOCKS),
        ({"LC_ALL": "C.utf8", "LANG": "C"}, BLOCKS),
        ({"LC_ALL": "C", "LANG": "en_GB.UTF-8"}, ASCII),
        ({"LC_CTYPE": "de_DE.ISO-8859-1"}, ASCII),
        ({}, ASCII),
    ],
)
def test_sparklines_use_the_characters_of_the_locale(environ: dict[str, str], glyphs: str) -> None:
    assert glyphs_of(environ) == glyphs
    values = [0.0, 1.0, 2.0, 3.0, None, math.nan, 3.9, 4.0, 5.0]
    steps = [glyphs[at] for at in (0, 2, 4, 6)]
    assert sparkline(values, 0.0, 4.0, glyphs) == "".join([*steps, " !", *(3 * glyphs[-1])])
    assert sparkline([7.0, 7.0], 7.0, 7.0, glyphs) == 2 * glyphs[0]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_history_line_fits_and_shows_current_values(width: int) -> None:
    more = {"total": 1000, "eta_s": 65.0, "loss": 2.3456}
    job = feed_of(made(3, 2, more=more, gpus=4)).job
    line = "".join(text for text, _ in history_line(job, width, "all", BLOCKS))
    assert len(line) <= width
    shown = [word for word in ("steps/s", "loss", "mem", "gpu") if word in line]
    assert shown == ["steps/s", "loss", "mem", "gpu"][: {20: 0, 40: 1, 80: 4, 200: 4}[width]]
    for word, text in (("steps/s", "10.0"), ("loss", "2.346"), ("mem", "600M"), ("gpu", "75%")):
        assert (text in line) == (word in shown)
    if shown:
        assert BLOCKS[-1] in line


@in_loop
async def test_progress_is_in_the_head_and_h_changes_the_span() -> None:
    app = made(3, 2, more={"total": 1000, "eta_s": 65.0, "loss": "nan"})
    async with app.run_test(size=SMALL) as pilot:
        lines = await settled(pilot)
        for word in ("of 1,000", "ETA 1m05s"):
            assert word in lines[1]
        assert "nan" in lines[3]
        for span in ("2h", "10m", "all"):
            await pilot.press("h")
            assert (await settled(pilot))[3].endswith(span)


@in_loop
async def test_unreachable_job_stays_on_the_screen() -> None:
    app = made(3, 2)
    async with app.run_test(size=SMALL) as pilot:
        app.job.lost("no response from head:29400")
        lines = await settled(pilot)
        assert "no response from head:29400" in lines[2]
        app.job.add_event(
            EventRecord(
                wall=1.0, kind=EventKind.JOB_ENDED, outcome="stopped", text="stopped by somebody"
            )
        )
        lines = await settled(pilot)
        assert "stopped" in lines[0]
        assert "stopped by somebody" in lines[2]
        feed_of(app).show(8, summary(8.0, 3, 2, outcome="failed", why="rank 3 failed"))
        app.job.lost("the agent has exited")
        lines = await settled(pilot)
        assert "failed" in lines[0]
        assert "rank 3 failed" in lines[2]
        assert len(app.page.table.rows) == 6
        assert not [line for line in lines if "running" in line]
        await pilot.press("r")
        assert not isinstance(app.screen, ConfirmScreen), "nothing can be restarted"
        await pilot.press("q")
    assert app.return_code == 0
    app._show()  # A change at the last moment.
    app._tick()


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07end", "red end"),
        (" 10%|#\r 20%|##\r", " 20%|##"),
        ("a\tb", "a       b"),
        ("\x1b", "\\x1b"),
        ("\u202eabc", "\\u202eabc"),
    ],
)
def test_escape_sequences_of_workers_have_no_effect(line: str, seen: str) -> None:
    assert shown(line) == seen


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0ms"), (0.9996, "1.0s"), (59.96, "1m00s"), (3599.6, "1h00m"),
     (86_399.9, "1d00h"), (1e6, "11d13h")],
)  # fmt: skip
def test_durations_are_formatted_briefly(seconds: float | None, text: str) -> None:
    assert tables.duration(seconds) == text
