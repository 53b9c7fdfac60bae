"""The health checks of a live, a stuck and a stopped agent."""

from __future__ import annotations

import http.client
import select
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from holdfast.core.supervision import StopReason
from holdfast.observe.health.health_server import (
    HealthCheckServer,
    Readiness,
    server_from_environment,
)
from holdfast.observe.health.loop_probe import FRESH_S, LoopProbe
from holdfast.observe.lifecycle import GenerationStopped, GenerationStopping
from recorded_runs import ended, exited, started

if TYPE_CHECKING:
    from collections.abc import Iterator

PORT, TIMEOUT = "TORCHELASTIC_HEALTH_CHECK_PORT", "HOLDFAST_HEALTH_TIMEOUT"


@contextmanager
def serving(server: HealthCheckServer) -> Iterator[HealthCheckServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


def get(port: int, path: str = "/healthz", host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.getheader("Content-Type") == "text/plain; charset=utf-8"
        text = response.read().decode()
        assert text.count("\n") == 1
        return response.status, text
    finally:
        connection.close()


@pytest.mark.parametrize(
    "alive", [lambda: time.time() - 100, lambda: float("nan"), lambda: "soon", lambda: 1 / 0]
)
def test_unresponsive_agent_is_dead_and_not_ready(alive: object) -> None:
    with serving(HealthCheckServer(alive, 0, 60)) as server:  # type: ignore[arg-type]
        assert get(server.port)[0] == get(server.port, "/readyz")[0] == 503


def test_readiness_has_its_own_reason() -> None:
    reasons = ["worker 3\nhas failed", ""]
    with serving(HealthCheckServer(time.time, 0, 60, ready_callback=lambda: reasons[0])) as server:
        assert get(server.port, "/readyz") == (503, "worker 3 has failed\n")
        assert get(server.port, "/livez")[0] == 200
        reasons.pop(0)
        assert get(server.port, "/readyz")[0] == 200
        reasons.clear()
        assert get(server.port, "/readyz")[0] == 503  # The callback raises.


def test_agent_is_ready_only_while_all_workers_run() -> None:
    readiness = Readiness()
    assert readiness.why_not()
    for event, is_ready in (
        (started(0.0, 0.1, 0), True),
        (exited(0.0, 1, failed=True), False),
        (GenerationStopping(0.0, 0, StopReason.WORKER_FAILED), False),
        (GenerationStopped(0.0, 0), False),
        (started(0.0, 0.1, 2), True),
        (exited(0.0, 0, failed=True, generation=1), True),  # A worker of an earlier generation.
        (GenerationStopping(0.0, 1, StopReason.REGROUP), True),
        (GenerationStopped(0.0, 1), True),
        (exited(0.0, 0, failed=False, generation=2), True),
        (exited(0.0, 1, failed=False, generation=2), False),
        (ended(0.0, "succeeded", 1), False),
    ):
        readiness(event)
        assert (readiness.why_not() == "") is is_ready, event


def test_environment_configures_the_health_server(caplog: pytest.LogCaptureFixture) -> None:
    assert server_from_environment({}, time.time) is None
    server = server_from_environment({PORT: "80", TIMEOUT: "2.5"}, time.time)
    assert server is not None
    assert (server.port, server._timeout) == (80, 2.5)
    assert caplog.messages == []
    for wrong in ("http", "-1", "65536", "\u0663", "9" * 5000):
        assert server_from_environment({PORT: wrong}, time.time) is None
        assert f"{PORT}='{wrong[:50]}" in caplog.messages[-1]
        assert len(caplog.messages[-1]) < 200
    for wrong in ("0", "nan", "inf", "soon"):
        server = server_from_environment({PORT: "80", TIMEOUT: wrong}, time.time)
        assert server is not None
        assert server._timeout == 60
        assert f"{TIMEOUT}={wrong!r}" in caplog.messages[-1]


@pytest.fixture
def probe() -> Iterator[LoopProbe]:
    one = LoopProbe()
    yield one
    one.close()


def test_loop_is_silent_since_the_first_unanswered_probe(probe: LoopProbe) -> None:
    probe.respond()
    before = time.monotonic()
    assert not probe.probe(0.01)
    after = time.monotonic()
    assert not probe.probe(0.01)
    assert time.monotonic() - after <= probe.silent_s() <= time.monotonic() - before
    probe.respond()
    assert probe.silent_s() == 0.0


def test_alive_time_includes_the_wait_of_an_earlier_probe(
    probe: LoopProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(probe, "_responded_at", now - 2 * FRESH_S)
    monkeypatch.setattr(probe, "_probed_at", now - 100)
    limits: list[float] = []
    monkeypatch.setattr(probe, "probe", limits.append)
    assert time.time() - probe.alive_time() >= 100
    assert limits == [0.0]


def test_busy_loop_need_not_respond(probe: LoopProbe) -> None:
    assert not probe.probe(0.01)
    with probe.suspended("rendezvous"):
        assert probe.probe(60)
        assert probe.silent_s() == 0.0
    assert probe.silent_s() == 0.0
    assert not probe.probe(0.01)


@pytest.mark.parametrize("closes", [True, False])
def test_probe_ends_when_the_loop_becomes_busy_or_is_closed(closes: bool) -> None:
    probe = LoopProbe()
    answered: list[bool] = []
    thread = threading.Thread(target=lambda: answered.append(probe.probe(60)))
    thread.start()
    poll = select.poll()
    poll.register(probe.fileno(), select.POLLIN)
    assert poll.poll(30_000)
    if closes:
        probe.close()
        thread.join()
    else:
        with probe.suspended("rendezvous"):
            thread.join()
    assert answered == [not closes]
    probe.close()
    probe.respond()
    assert not probe.probe(60)
    assert probe.fileno() == -1
