from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.agent.assembly import UNINTERRUPTIBLE_ENV, agent_of, stuck_limit
from holdfast.agent.blocked_workers import BlockedWorkers
from holdfast.agent.spec import WorkerSpec
from holdfast.agent.worker_processes import ProcessSettings
from holdfast.core import supervision
from holdfast.core.machine import TICK
from holdfast.core.supervision import (
    Begun,
    RoundJoined,
    StopReason,
    StopWorkers,
    Supervision,
    WorkersStarted,
)
from holdfast.processes import procfs
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.logs.std import Std
from rendezvous_fakes import ScriptedRendezvous

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.core.machine import Effect

LIMIT_S = 2.0


class Watch:
    """A supervision and its workers, pids 100 and 101, whose states the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states = {100: "S", 101: "S"}
        self.now = 1000.0
        self.blocked = BlockedWorkers(LIMIT_S)
        self.machine = Supervision(local_world_size=2, max_restarts=3, stuck_limit_s=LIMIT_S)
        for event in (Begun(), RoundJoined(0, 0, 1), WorkersStarted(0)):
            self.machine.handle(self.now, event)
        self.blocked.started(0, {0: 100, 1: 101}, self.now)
        monkeypatch.setattr(procfs, "state_of", self.states.get)

    def check_for(self, seconds: float) -> list[Effect]:
        """Check as often as it is due; return the first decision."""
        end = self.now + seconds
        while self.now < end:
            due = self.blocked.next_deadline()
            assert due is not None
            self.now = due
            for event in self.blocked.poll(self.now):
                self.machine.handle(self.now, event)
            if effects := self.machine.handle(self.now, TICK):
                return effects
        return []


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def test_briefly_blocked_worker_is_not_stuck(watch: Watch) -> None:
    for _ in range(5):
        watch.states[100] = "D"
        assert watch.check_for(LIMIT_S * 0.7) == []
        watch.states[100] = "R"
        assert watch.check_for(0.2) == []
    watch.states[100] = "D"
    watch.check_for(LIMIT_S * 0.5)
    watch.blocked.ended(0)
    watch.machine.handle(watch.now, supervision.WorkerExited(0, 0, failed=False))
    assert watch.check_for(LIMIT_S * 2) == []


def test_worker_blocked_for_the_whole_limit_is_stuck(watch: Watch) -> None:
    watch.states[101] = "D"
    assert watch.check_for(LIMIT_S * 2) == [StopWorkers(0, StopReason.UNHEALTHY)]
    assert watch.now - 1000.0 == pytest.approx(LIMIT_S, abs=LIMIT_S / 5)
    assert "worker 1 (pid 101) was stuck in uninterruptible sleep" in watch.machine.unhealthy
    assert not watch.machine.retryable
    assert set(watch.machine.stuck) == {1}


def test_stuck_worker_fails_the_job_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pid_file = tmp_path / "stuck"
    monkeypatch.setattr(
        procfs,
        "state_of",
        lambda pid: "D" if pid_file.exists() and pid_file.read_text() == f"{pid}\n" else "S",
    )
    script = "[ $RANK = 0 ] || { echo $$ > part; mv part stuck; }; exec sleep 1000"
    spec = WorkerSpec(
        "trainer", 2, ScriptedRendezvous(), entrypoint="/bin/sh", args=("-c", script), max_restarts=3,
        monitor_interval=3600,
    )  # fmt: skip
    settings = ProcessSettings(DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL))
    agent = agent_of(spec, settings, stuck_limit_s=0.05)
    result = agent.run()
    agent.close()
    assert result.is_failed()
    assert agent.machine.restart_count == 0
    stuck, other = result.failures[1], result.failures[0]
    assert (stuck.exitcode, stuck.consequence) == (-signal.SIGKILL, False)
    assert "uninterruptible" in stuck.detail
    assert (other.exitcode, other.consequence) == (-signal.SIGTERM, True)


@pytest.mark.parametrize(
    ("given", "variable", "limit"),
    [(None, None, None), (None, "2.5", 2.5), (None, "nonsense", None), (0.0, "2.5", None)],
)
def test_stuck_limit_prefers_the_argument_to_the_environment(
    given: float | None, variable: str | None, limit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(UNINTERRUPTIBLE_ENV, raising=False)
    if variable is not None:
        monkeypatch.setenv(UNINTERRUPTIBLE_ENV, variable)
    assert stuck_limit(given) == limit
