"""The health checks: what a probe is told, of a live, a wedged and a stopped agent."""

from __future__ import annotations

import http.client
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from holdfast import console
from holdfast.elastic.agent.server.health_check_server import create_healthcheck_server
from holdfast.errors import EnvironmentProblem
from holdfast.observe.health.loop_probe import LoopProbe
from holdfast.observe.health.server import HealthCheckServer, server_from_environment

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def started(server: HealthCheckServer) -> Iterator[HealthCheckServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


def probe(port: int, path: str = "/healthz", host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.getheader("Content-Type") == "text/plain; charset=utf-8"
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/", "/healthz", "/livez", "/readyz", "/healthz?verbose=1"])
def test_a_live_agent_passes_every_probe(path: str) -> None:
    with started(create_healthcheck_server(lambda: int(time.time()), 0, 60)) as server:
        assert probe(server.port, path) == (200, "ok\n")


def test_other_paths_are_not_found() -> None:
    with started(HealthCheckServer(time.time, 0, 60)) as server:
        status, text = probe(server.port, "/metrics")
    assert status == 404
    assert "/readyz" in text


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_an_agent_without_a_sign_of_life_is_dead(path: str) -> None:
    with started(HealthCheckServer(lambda: int(time.time()) - 100, 0, 60)) as server:
        status, text = probe(server.port, path)
    assert status == 503
    assert text.startswith("the agent has given no sign of life for 10")
    assert text.count("\n") == 1


@pytest.mark.parametrize("alive", [lambda: float("nan"), lambda: "soon", lambda: 1 / 0])
def test_a_callback_that_gives_no_time_is_no_sign_of_life(alive: object) -> None:
    with started(HealthCheckServer(alive, 0, 60)) as server:  # type: ignore[arg-type]
        status, text = probe(server.port)
    assert status == 503
    assert text.count("\n") == 1


def test_readiness_has_its_own_reason() -> None:
    reasons = ["worker 3\nhas failed", ""]
    server = HealthCheckServer(time.time, 0, 60, ready_callback=lambda: reasons[0])
    with started(server):
        assert probe(server.port, "/readyz") == (503, "worker 3 has failed\n")
        assert probe(server.port, "/livez") == (200, "ok\n")
        reasons.pop(0)
        assert probe(server.port, "/readyz") == (200, "ok\n")
        reasons.clear()
        status, text = probe(server.port, "/readyz")
        assert status == 503
        assert "IndexError" in text


def test_it_listens_on_every_address() -> None:
    with started(HealthCheckServer(time.time, 0, 60)) as server:
        for host in ("127.0.0.1", "127.0.0.2"):
            assert probe(server.port, host=host)[0] == 200


def test_a_port_of_zero_is_chosen_and_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(console.NOTICE)
    server = HealthCheckServer(time.time, 0, 60)
    assert server.port == 0
    with started(server):
        assert server.port > 0
        assert caplog.messages == [f"health checks at port {server.port}"]


def test_a_taken_port_is_one_line() -> None:
    with started(HealthCheckServer(time.time, 0, 60)) as first:
        second = HealthCheckServer(time.time, first.port, 60)
        with pytest.raises(EnvironmentProblem, match=rf"health checks: .*{first.port}.*in use"):
            second.start()
        second.stop()


def test_starting_and_stopping_twice_is_once() -> None:
    server = HealthCheckServer(time.time, 0, 60)
    server.stop()
    server.start()
    port = server.port
    server.start()
    assert server.port == port
    server.stop()
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    server.start()
    assert probe(server.port)[0] == 200
    server.stop()


def test_the_environment_asks_for_it(caplog: pytest.LogCaptureFixture) -> None:
    name, limit = "TORCHELASTIC_HEALTH_CHECK_PORT", "HOLDFAST_HEALTH_TIMEOUT"
    assert server_from_environment({}, time.time) is None
    server = server_from_environment({name: "0"}, time.time)
    assert server is not None
    assert (server.port, server._timeout) == (0, 60)
    server = server_from_environment({name: "80", limit: "2.5"}, time.time)
    assert server is not None
    assert (server.port, server._timeout) == (80, 2.5)
    assert caplog.messages == []
    for wrong in ("http", "-1", "65536", "\u0663"):
        assert server_from_environment({name: wrong}, time.time) is None
        assert f"{name}={wrong!r} is not a port" in caplog.messages[-1]
    assert server_from_environment({name: "9" * 5000}, time.time) is None
    assert f"{name}='999" in caplog.messages[-1]
    assert len(caplog.messages[-1]) < 200
    for wrong in ("0", "nan", "inf", "soon"):
        server = server_from_environment({name: "80", limit: wrong}, time.time)
        assert server is not None
        assert server._timeout == 60
        assert f"{limit}={wrong!r}" in caplog.messages[-1]


def test_a_taken_port_of_the_environments_is_named_by_its_variable() -> None:
    with started(HealthCheckServer(time.time, 0, 60)) as first:
        name = "TORCHELASTIC_HEALTH_CHECK_PORT"
        second = server_from_environment({name: str(first.port)}, time.time)
        assert second is not None
        with pytest.raises(EnvironmentProblem, match=rf"^{name}: .*{first.port}.*in use"):
            second.start()


class Loop:
    """What an agent's loop is to a pulse: it waits for all that may happen, and answers."""

    def __init__(self) -> None:
        self.pulse = LoopProbe()
        self.turns = 0
        self.may_turn = threading.Event()
        self.may_turn.set()
        self.is_over, self.end = os.pipe()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.pulse.fileno(), select.POLLIN)
        poll.register(self.is_over, select.POLLIN)
        while self.is_over not in dict(poll.poll()):
            self.may_turn.wait()
            self.pulse.answer()
            self.turns += 1

    def close(self) -> None:
        self.may_turn.set()
        os.close(self.end)
        self.thread.join()
        os.close(self.is_over)
        self.pulse.close()


def test_a_wedged_loop_fails_the_probe_and_passes_when_it_turns_again() -> None:
    loop = Loop()
    try:
        with started(HealthCheckServer(loop.pulse.alive_time, 0, 0.2)) as server:
            assert probe(server.port) == (200, "ok\n")
            loop.may_turn.clear()
            deadline = time.monotonic() + 30
            while (found := probe(server.port))[0] == 200:
                assert time.monotonic() < deadline
            assert found[0] == 503
            assert re.fullmatch(r"the agent has given no sign of life for \d+ s\n", found[1])
            loop.may_turn.set()
            while probe(server.port)[0] != 200:
                assert time.monotonic() < deadline
    finally:
        loop.close()


def test_an_idle_loop_is_asked_once_for_each_probe() -> None:
    loop = Loop()
    try:
        with started(HealthCheckServer(loop.pulse.alive_time, 0, 60)) as server:
            for number in range(3):
                loop.pulse._answered_at = 0.0
                assert probe(server.port)[0] == 200
                assert loop.turns == number + 1
    finally:
        loop.close()


STOPPED = """
import time
from holdfast.observe.health.server import HealthCheckServer
server = HealthCheckServer(time.time, 0, 60)
server.start()
print(server.port, flush=True)
input()
server.stop()
"""


def test_a_stopped_agent_answers_nobody() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        port = int(agent.stdout.readline())
        assert probe(port)[0] == 200
        agent.send_signal(signal.SIGSTOP)
        os.waitpid(agent.pid, os.WUNTRACED)
        with socket.create_connection(("127.0.0.1", port), timeout=0.3) as asking:
            asking.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            with pytest.raises(TimeoutError):
                asking.recv(1)
        agent.send_signal(signal.SIGCONT)
        assert probe(port)[0] == 200
        agent.communicate("\n")
    assert agent.returncode == 0
