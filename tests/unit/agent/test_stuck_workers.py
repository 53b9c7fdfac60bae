from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
from rendezvous_fakes import ScriptedRendezvous

from holdfast.agent.local_agent import UNINTERRUPTIBLE_ENV, LocalElasticAgent
from holdfast.agent.spec import WorkerSpec
from holdfast.agent.stuck_workers import StuckWorkers
from holdfast.processes import procfs
from holdfast.processes.failures.failure import ProcessFailure
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.logs.std import Std

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 2.0


class Watch:
    """Workers of pids 100 and 101, in states that the test sets, and their watch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states = {100: "S", 101: "S"}
        self.left = {0, 1}
        self.stuck = StuckWorkers(LIMIT_S)
        self.now = 1000.0
        monkeypatch.setattr(procfs, "state_of", self.states.get)

    def pids(self) -> dict[int, int]:
        return {0: 100, 1: 101}

    def running(self) -> set[int]:
        return self.left

    def check_for(self, seconds: float) -> str:
        """Check as often as the watch wants to; return what the last check found."""
        found, end = "", self.now + seconds
        while self.now < end and not found:
            self.now = self.stuck.next_check(self.now)
            found = self.stuck.check(self.now, self)  # type: ignore[arg-type]
        return found


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def failed(rank: int, detail: str = "") -> ProcessFailure:
    return ProcessFailure(rank, 100 + rank, -9, "", detail=detail, consequence=True)


def test_workers_that_are_awake_now_and_then_are_not_stuck(watch: Watch) -> None:
    for _ in range(5):
        watch.states[100] = "D"
        assert watch.check_for(LIMIT_S * 0.7) == ""
        watch.states[100] = "R"
        assert watch.check_for(0.2) == ""
    watch.states[100], watch.left = "D", {1}
    assert watch.check_for(LIMIT_S * 2) == ""  # It has exited.


def test_a_worker_in_that_state_for_the_whole_limit_is_stuck(watch: Watch) -> None:
    watch.states[101] = "D"
    assert "pid 101" in watch.check_for(LIMIT_S * 2)
    assert watch.stuck.ranks() == {1}
    cause, other = failed(1, "given up"), failed(0, "something")
    for one in (cause, other):
        watch.stuck.explain(one)
    assert "uninterruptible" in cause.detail
    assert cause.detail.endswith("; given up")
    assert (cause.consequence, other.consequence, other.detail) == (False, True, "something")
    watch.stuck.forget()  # New workers begin anew.
    assert watch.check_for(LIMIT_S * 0.7) == ""
    assert watch.stuck.ranks() == set()


def agent_of(folder: Path, script: str, **how: Any) -> LocalElasticAgent:
    spec = WorkerSpec(
        "trainer", 2, ScriptedRendezvous(), entrypoint="/bin/sh", args=("-c", script), max_restarts=3,
        monitor_interval=3600,
    )  # fmt: skip
    return LocalElasticAgent(spec, DefaultLogsSpecs(str(folder), redirects=Std.ALL), **how)


def test_a_stuck_worker_fails_the_job_without_a_restart(
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
    agent = agent_of(tmp_path, script, uninterruptible_state_timeout=0.05)
    result = agent.run()
    assert result.is_failed()
    assert agent.restart_count == 0
    stuck, other = result.failures[1], result.failures[0]
    assert (stuck.exitcode, stuck.consequence) == (-signal.SIGKILL, False)
    assert (other.exitcode, other.consequence) == (-signal.SIGTERM, True)


@pytest.mark.parametrize(
    ("given", "variable", "checks"),
    [(None, None, False), (None, "2.5", True), (None, "nonsense", False), (0.0, "2.5", False)],
)
def test_where_the_limit_comes_from(
    given: float | None, variable: str | None, checks: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv(UNINTERRUPTIBLE_ENV, raising=False)
    if variable is not None:
        monkeypatch.setenv(UNINTERRUPTIBLE_ENV, variable)
    agent = agent_of(tmp_path, "exit 0", uninterruptible_state_timeout=given)
    assert (agent._stuck is not None) is checks
