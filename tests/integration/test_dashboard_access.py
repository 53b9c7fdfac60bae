"""Access to a dashboard, and requests that a malicious page makes a browser send.

The job and the server are real. The requests are sent byte by byte, which no browser does.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import pytest

from dashboards import Dashboard, await_agents
from holdfast.views.dashboard.access import LOGIN_FAILURES_MAX
from holdfast.views.dashboard.web_server import BODY_BYTES_MAX, HEAD_BYTES_MAX
from real_jobs import HOLDFAST, PATIENCE_S, Job
from real_teams import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RESTART = {"id": "1", "action": "restart"}
PAGES = ("/", "/main.js", "/feed", "/logs", "/session", "/failures")


class Served(NamedTuple):
    """A running job with one node."""

    folder: Path
    run_id: str

    def dashboard(self, *flags: str) -> Dashboard:
        return Dashboard(self.folder, self.run_id, *flags)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("job")
    with Job(folder, "send('begun'); forever()") as one:
        one.messages.next()
        yield Served(folder, await_agents(one.agent.pid))


@pytest.fixture(scope="module")
def dashboard(job: Served) -> Iterator[Dashboard]:
    """A dashboard of the job, with a session."""
    with job.dashboard() as one:
        one.log_in()
        yield one


def test_token_file_is_private_and_temporary(job: Served) -> None:
    with job.dashboard() as one:
        assert stat.S_IMODE(os.stat(one.token_file).st_mode) == 0o600
        assert one.token not in one.output, "standard output is not a terminal"
        assert one.send("GET", "/").headers["location"] == "/login"
        assert one.stop() == 130


def test_job_is_shown_only_to_a_session(dashboard: Dashboard, job: Served) -> None:
    for path in PAGES:
        for cookie in ("", f"holdfast-{dashboard.port}=x", dashboard.cookie.replace("-", "_")):
            answer = dashboard.send("GET", path, {"Cookie": cookie})
            assert answer.status == (303 if path == "/" else 401), path
            assert job.run_id.encode() not in answer.body
    for path in ("/action", "/stacks", "/logout"):
        assert dashboard.post(path, RESTART, {"Cookie": ""}).status == 401
    assert dashboard.get("/session").status == 200


def test_cookie_is_restricted_to_this_server(dashboard: Dashboard) -> None:
    name, *attributes = dashboard.log_in().split("; ")
    assert name.startswith(f"holdfast-{dashboard.port}=")
    assert {one.lower() for one in attributes} == {"httponly", "samesite=strict", "path=/"}
    # Another program may have set one of two cookies, so neither is accepted.
    twice = f"{dashboard.cookie}; {dashboard.cookie}"
    assert dashboard.send("GET", "/session", {"Cookie": twice}).status == 401


def test_every_response_has_the_content_security_policy(dashboard: Dashboard) -> None:
    answers = [
        dashboard.get("/"),
        dashboard.get("/dashboard.css"),
        dashboard.get("/nothing"),
        dashboard.send("PUT", "/login", {"Origin": dashboard.origin}),
        dashboard.send("GET", "/feed"),
        dashboard.send("GET", "/", {"Host": "evil.example"}),
    ]
    assert [one.status for one in answers] == [200, 200, 404, 405, 401, 421]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["access-control-allow-origin"] is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Host": ""},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},  # Another port of this host.
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    ],
)
def test_dashboard_rejects_reads_from_another_site(
    dashboard: Dashboard, headers: dict[str, str]
) -> None:
    assert dashboard.get("/session", headers).status == 421


def test_link_from_another_site_opens_the_page(dashboard: Dashboard) -> None:
    link = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }
    assert dashboard.send("GET", "/", link).status == 303
    # With ssh -L the page has another port, and perhaps another loopback name.
    assert dashboard.get("/session", {"Host": "localhost:9"}).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-Holdfast-CSRF": ""}, 403),
        ({"X-Holdfast-CSRF": "x"}, 403),
        ({"Origin": ""}, 421),
        ({"Origin": "null"}, 421),
        ({"Origin": "http://evil.example"}, 421),
        ({"Origin": "http://127.0.0.1:1"}, 421),
        ({"Sec-Fetch-Site": "same-site"}, 421),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 421),
    ],
)
def test_dashboard_rejects_changes_from_another_site(
    dashboard: Dashboard, headers: dict[str, str], status: int
) -> None:
    for path in ("/action", "/stacks", "/logout"):
        assert dashboard.post(path, RESTART, headers).status == status
    if status == 421:
        token = f"token={dashboard.token}".encode()
        sent = {"Origin": dashboard.origin, **headers}
        answer = dashboard.send("POST", "/login", {k: v for k, v in sent.items() if v}, token)
        assert answer.status == 421
        assert "set-cookie" not in answer.headers


def test_invalid_requests_are_rejected(dashboard: Dashboard) -> None:
    for body in (
        b"",
        b"{",
        b"\xff",
        {**RESTART, "action": "format"},
        {**RESTART, "grace_s": 1e300},
        {**RESTART, "reason": "x" * 10_000},
        {**RESTART, "who": "root"},
        {"action": "stop"},
    ):
        assert dashboard.post("/action", body).status == 400, body
    assert dashboard.post("/action", b"[" * (BODY_BYTES_MAX + 1)).status == 413
    for query in ("ranks=x", "ranks=0-99999999", "tail=-1", "tail=%F0%9F%98%80"):
        assert dashboard.get(f"/logs?{query}").status == 400, query
    for path in (
        "/../server.py",
        "/%2e%2e/server.py",
        "/pages/main.js",
        "//main.js",
        "/index.html",
    ):
        assert dashboard.get(path).status == 404, path
    answer = dashboard.post("/action", {**RESTART, "action": "drain", "node": "nobody"})
    assert answer.status == 409, "the job itself refused it"
    assert answer.json()["problem"]


def test_wrong_tokens_are_limited(job: Served) -> None:
    with job.dashboard() as one:
        origin = {"Origin": one.origin}
        tokens = [b"", b"token=", b"token=x", *[b"token=" + one.token.encode()[:-1]] * 20]
        statuses = [one.send("POST", "/login", origin, token).status for token in tokens]
        assert statuses == [401] * LOGIN_FAILURES_MAX + [429] * (len(tokens) - LOGIN_FAILURES_MAX)
        right = one.send("POST", "/login", origin, b"token=" + one.token.encode())
        assert right.status == 429


def test_logout_ends_the_session_and_its_streams(job: Served) -> None:
    with job.dashboard() as one:
        one.log_in()
        connection = one.open()
        connection.request("GET", "/feed", headers={"Cookie": one.cookie})
        response = connection.getresponse()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.readline() == b"event: snapshot\n"
        assert one.post("/logout", {}).status == 204
        assert response.read()[-2:] == b"\n\n"  # The stream ends.
        connection.close()
        assert one.get("/session").status == 401


def test_read_only_dashboard_rejects_changes(job: Served) -> None:
    with job.dashboard("--read-only") as one:
        one.log_in()
        assert one.get("/session").json()["readOnly"] is True
        assert one.post("/action", RESTART).status == 403


def test_read_only_token_makes_the_dashboard_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "f" * 32)
    with Cluster(tmp_path, nnodes="1:2", run_id="guarded", conf="auth=token,settle=0.2") as cluster:
        cluster.start_host("a")
        cluster.generation(1)
        words = [*HOLDFAST, "token", "--read-only", "--job", "guarded"]
        monkeypatch.setenv("HOLDFAST_TOKEN", subprocess.check_output(words, text=True).strip())
        place = ("--rdzv-endpoint", cluster.endpoint, "--rdzv-conf", "auth=token")
        with Dashboard(tmp_path, "guarded", *place) as one:
            one.log_in()
            assert one.get("/session").json()["readOnly"] is True
            assert one.post("/action", {**RESTART, "action": "stop"}).status == 403


def test_silent_and_excessive_clients_are_disconnected(dashboard: Dashboard) -> None:
    place = (dashboard.host, dashboard.port)
    with (
        socket.create_connection(place, PATIENCE_S) as silent,
        socket.create_connection(place, PATIENCE_S) as slow,
        socket.create_connection(place, PATIENCE_S) as large,
    ):
        slow.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
        large.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 2 * HEAD_BYTES_MAX)
        assert large.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert silent.recv(4096) == b""
        assert slow.recv(4096) == b""
