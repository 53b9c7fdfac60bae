"""Access to a dashboard, and requests that a malicious page makes a browser send.

The job and the server are real. The requests are sent byte by byte, which no browser does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
from http.client import HTTPResponse
from typing import TYPE_CHECKING, NamedTuple

import pytest

from dashboards import Dashboard, await_agents
from holdfast.views.dashboard.access import SESSION_HEADER
from holdfast.views.dashboard.web_server import BODY_BYTES_MAX, HEAD_BYTES_MAX, STRANGERS_MAX
from other_users import STRANGER, as_user
from real_jobs import HOLDFAST, PATIENCE_S, Job
from real_teams import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RESTART = {"id": "1", "action": "restart"}
READS = ("/feed", "/logs?follow=1", "/session", "/failures")
CHANGES = ("/action", "/stacks", "/logout")


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
        assert one.stop() == 130


def test_dashboard_listens_on_one_loopback_address_only(dashboard: Dashboard) -> None:
    """A server on all addresses would accept this connection."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", dashboard.port), PATIENCE_S)


def test_job_is_shown_only_to_the_tab_that_logged_in(dashboard: Dashboard, job: Served) -> None:
    answer = dashboard.log_in()
    assert "set-cookie" not in answer.headers, "a browser would send it to every port of the host"
    secret = dashboard.session[SESSION_HEADER]
    # The secret counts only in the header, which no other page can send.
    stolen = {"Cookie": f"holdfast-{dashboard.port}={secret}", "Origin": dashboard.origin}
    for headers in ({"Origin": dashboard.origin}, stolen, {**stolen, SESSION_HEADER: "x"}):
        for method, paths in (("GET", READS), ("POST", CHANGES)):
            for path in paths:
                answer = dashboard.send(method, path, headers)
                assert answer.status == 401, path
                assert job.run_id.encode() not in answer.body
                assert secret.encode() not in answer.body
    for path in ("/", "/main.js", "/login"):
        page = dashboard.send("GET", path)
        assert page.status == 200
        assert job.run_id.encode() not in page.body
    session = dashboard.get("/session")
    assert session.status == 200
    assert secret.encode() not in session.body, "only the login hands it out"


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
    assert dashboard.send("GET", "/", link).status == 200
    # With ssh -L the page has another port, and perhaps another loopback name.
    assert dashboard.get("/session", {"Host": "localhost:9"}).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({SESSION_HEADER: ""}, 401),
        ({SESSION_HEADER: "x"}, 401),
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
    for path in CHANGES:
        assert dashboard.post(path, RESTART, headers).status == status
    if status == 421:
        token = f"token={dashboard.token}".encode()
        sent = {"Origin": dashboard.origin, **headers}
        answer = dashboard.send("POST", "/login", {k: v for k, v in sent.items() if v}, token)
        assert answer.status == 421
        assert b"secret" not in answer.body


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


def test_wrong_tokens_lock_nobody_out(job: Served) -> None:
    with job.dashboard() as one:
        origin = {"Origin": one.origin}
        tokens = [b"", b"token=", b"token=x", *[b"token=" + one.token.encode()[:-1]] * 20]
        statuses = [one.send("POST", "/login", origin, token).status for token in tokens]
        assert set(statuses) == {401}
        assert one.send("POST", "/login", origin, b"a&b&c&d&e&f=1").status == 400
        one.log_in()


def test_logout_ends_all_streams_of_the_session(dashboard: Dashboard) -> None:
    dashboard.log_in()
    ending = dashboard.session
    feed, logs = (dashboard.stream(path) for path in ("/feed", "/logs?follow=1"))
    dashboard.log_in()
    other = dashboard.stream("/feed")
    assert b'"kind":"snapshot"' in feed.readline()
    assert b'"kind":"snapshot"' in other.readline()
    assert dashboard.post("/logout", {}, ending).status == 204
    assert feed.read() is not None  # The streams end; until then, this blocks.
    assert logs.read() is not None
    assert dashboard.get("/session", ending).status == 401
    assert dashboard.get("/session").status == 200, "the other session continues"
    assert not other.isclosed()
    other.close()


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
    with (
        stranger(dashboard) as silent,
        stranger(dashboard) as slow,
        stranger(dashboard) as second,
        stranger(dashboard) as large,
    ):
        slow.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
        second.sendall(b"GET /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        with HTTPResponse(second) as answer:
            answer.begin()
            assert answer.status == 401
            answer.read()
        second.sendall(b"GET /nothing HTTP/1.1\r\nX: ")
        large.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 2 * HEAD_BYTES_MAX)
        assert large.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert silent.recv(4096) == b""
        assert slow.recv(4096) == b""
        assert second.recv(4096) == b"", "each head of a connection has a deadline"


def test_flood_of_connections_closes_only_its_own(dashboard: Dashboard) -> None:
    feed = dashboard.stream("/feed")
    assert feed.readline()
    with contextlib.ExitStack() as flood:
        for _ in range(2 * STRANGERS_MAX):
            flood.enter_context(stranger(dashboard))
        assert dashboard.log_in().status == 200
        assert dashboard.get("/session").status == 200
        assert not feed.isclosed()
    feed.close()


@pytest.mark.parametrize(
    ("request_", "garbage"),
    [
        (b"", b"\x00\xff\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"\x00\xff\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", b"\x00\r\n\r\n"),
        # The response to the request is complete before its body.
        (b"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"x\r\n"),
    ],
)
def test_malformed_request_prints_nothing(
    dashboard: Dashboard, request_: bytes, garbage: bytes
) -> None:
    before = dashboard.errors.read_text()
    with stranger(dashboard) as one:
        one.sendall(request_)
        if request_:
            assert one.recv(4096).startswith(b"HTTP/1.1 ")
        with contextlib.suppress(ConnectionError):
            one.sendall(garbage)
            while one.recv(4096):
                pass
    assert dashboard.get("/session").status == 200
    assert dashboard.errors.read_text() == before


def test_local_user_displaces_only_his_own_connections(dashboard: Dashboard) -> None:
    def flood() -> str:
        with contextlib.ExitStack() as many:
            for _ in range(2 * STRANGERS_MAX):
                many.enter_context(stranger(dashboard))
            return "done"

    with stranger(dashboard) as honest:
        honest.sendall(b"GET / HTTP/1.1\r\n")
        assert as_user(STRANGER, flood) == "done"
        honest.sendall(b"Host: 127.0.0.1\r\n\r\n")
        assert honest.recv(4096).startswith(b"HTTP/1.1 200 ")


def stranger(dashboard: Dashboard) -> socket.socket:
    return socket.create_connection((dashboard.host, dashboard.port), PATIENCE_S)
