from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from holdfast.agent.companions import HEALTH_PORT_ENV, Companions
from holdfast.agent.telling import RunTeller
from holdfast.health.pulse import FRESH_S
from watched_jobs import fetch

if TYPE_CHECKING:
    import pytest

    from holdfast.agent.simple import SimpleElasticAgent


def test_a_pulse_that_fails_is_named_once_and_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(HEALTH_PORT_ENV, "0")
    agent: SimpleElasticAgent = None  # type: ignore[assignment] # Nothing is told here.
    companions = Companions("job", RunTeller(agent), None)
    companions.begin()
    try:
        [descriptor] = companions.descriptors()
        companions.look(time.monotonic())
        nothing = os.open("/dev", os.O_RDONLY)  # To read it or write to it is an error.
        os.dup2(nothing, descriptor)
        os.close(nothing)
        time.sleep(FRESH_S)
        assert fetch(companions._health.port, "/livez")[0] == 503
        caplog.clear()
        for _ in range(2):
            companions.look(time.monotonic())
        [line] = caplog.messages
        assert line.startswith("health checks do not ask this agent any more: [Errno ")
        assert companions.descriptors() == []
        assert fetch(companions._health.port, "/livez") == (200, "ok\n")
    finally:
        companions.end()
