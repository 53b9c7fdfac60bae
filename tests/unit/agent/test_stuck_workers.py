from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
from rendezvous_fakes import ToldRendezvous

from holdfast.agent.local_agent import UNINTERRUPTIBLE_ENV, LocalElasticAgent
from holdfast.agent.spec import WorkerSpec
from holdfast.agent.stuck_workers import StuckWorkers
from holdfast.processes import procfs
from holdfast.processes.failures.failure import ProcessFailure
from holdfast.processes.logs.specs import DefaultLogsSpecs, Std

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 2.0
# A tenth of the limit: how often there is a look.
EVERY_S = 0.2


class Workers:
    """Workers of pids 100 and 101, in states that the test sets."""

    def __init__(self) -> None:
        self.states = {100: "S", 101: "S"}
        self.ended: set[int] = set()
        self.looks = 0

    def pids(self) -> dict[int, int]:
        return {0: 100, 1: 101}

    def running(self) -> set[int]:
        self.looks += 1
        return {0, 1} - self.ended


class Watch:
    """A watch on such workers, whose time is moved on by the test."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.workers = Workers()
        self.stuck = StuckWorkers(limit_s)
        self.now = 1000.0

    def look_after(self, seconds: float) -> str:
        """Look as often as the watch wants to; return what the last look said."""
        said = ""
        end = self.now + seconds
        while self.now < end and not said:
            due = self.stuck.next_look(self.now)
            assert due is not None
            self.now = due
            said = self.stuck.look(self.now, self.workers)  # type: ignore[arg-type]
        return said


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    monkeypatch.setattr(procfs, "state_of", lambda pid: made.workers.states[pid])
    return made


def failed(rank: int, detail: str = "") -> ProcessFailure:
    return ProcessFailure(
        local_rank=rank, pid=100 + rank, exitcode=-9, error_file="", detail=detail, consequence=True
    )


def test_without_a_limit_nobody_looks(watch: Watch) -> None:
    never = StuckWorkers(0)
    assert never.next_look(1000.0) is None
    watch.workers.states[100] = "D"
    assert never.look(9999.0, watch.workers) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit_s", "every_s"), [(0.5, 0.05), (2.0, 0.2), (10.0, 1.0), (60, 1.0)])
def test_there_are_ten_looks_within_the_limit_or_one_a_second(
    limit_s: float, every_s: float, watch: Watch
) -> None:
    stuck = StuckWorkers(limit_s)
    assert stuck.next_look(1000.0) == 1000.0 + every_s
    assert stuck.next_look(1000.0 + every_s / 2) == 1000.0 + every_s
    assert stuck.look(1000.0 + every_s, watch.workers) == ""  # type: ignore[arg-type]
    assert stuck.next_look(1000.0 + every_s) == pytest.approx(1000.0 + 2 * every_s)


def test_a_look_before_its_time_sees_nothing(watch: Watch) -> None:
    due = watch.stuck.next_look(watch.now)
    assert due is not None
    watch.stuck.look(due - 0.01, watch.workers)  # type: ignore[arg-type]
    assert watch.workers.looks == 0
    watch.stuck.look(due, watch.workers)  # type: ignore[arg-type]
    assert watch.workers.looks == 1


def test_workers_that_are_awake_now_and_then_are_not_stuck(watch: Watch) -> None:
    for _ in range(5):
        watch.workers.states[100] = "D"
        assert watch.look_after(LIMIT_S * 0.7) == ""
        watch.workers.states[100] = "R"
        assert watch.look_after(EVERY_S) == ""
    assert watch.stuck.ranks() == set()


def test_a_worker_in_that_state_for_the_whole_limit_is_stuck(watch: Watch) -> None:
    watch.workers.states[101] = "D"
    said = watch.look_after(LIMIT_S * 2)
    assert said.startswith(
        "worker 1 (pid 101) was stuck in uninterruptible sleep for 2.0 s (limit 2 s): "
    )
    assert watch.stuck.ranks() == {1}


def test_the_first_sight_is_told_once(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "holdfast")
    watch.workers.states[101] = "D"
    watch.look_after(LIMIT_S / 2)
    assert caplog.messages == ["worker 1 (pid 101) is in uninterruptible sleep"]


def test_a_worker_that_ended_is_not_looked_at(watch: Watch) -> None:
    watch.workers.ended = {0}
    watch.workers.states[100] = "D"
    assert watch.look_after(LIMIT_S * 2) == ""


def test_new_workers_begin_anew(watch: Watch) -> None:
    watch.workers.states[100] = "D"
    assert watch.look_after(LIMIT_S * 2)
    watch.stuck.forget()
    assert watch.stuck.ranks() == set()
    assert watch.stuck.next_look(5000.0) == 5000.0 + EVERY_S
    watch.now = 5000.0
    assert watch.look_after(LIMIT_S * 0.7) == ""


def test_the_failure_of_a_stuck_worker_is_the_cause(watch: Watch) -> None:
    watch.workers.states[101] = "D"
    watch.look_after(LIMIT_S * 2)
    explained = watch.stuck.explain(failed(1))
    assert explained.detail.startswith("was stuck in uninterruptible sleep for 2.0 s (limit 2 s): ")
    assert not explained.consequence
    assert watch.stuck.explain(failed(1, "given up")).detail.endswith("; given up")


def test_other_failures_stay_as_they_are(watch: Watch) -> None:
    watch.workers.states[101] = "D"
    watch.look_after(LIMIT_S * 2)
    other = watch.stuck.explain(failed(0, "something"))
    assert (other.detail, other.consequence) == ("something", True)


# In an agent, with real workers whose state is made up.


def agent_of(folder: Path, script: str, **how: Any) -> LocalElasticAgent:
    spec = WorkerSpec(
        "trainer",
        2,
        ToldRendezvous(),
        entrypoint="/bin/sh",
        args=("-c", script),
        max_restarts=3,
        monitor_interval=3600,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(str(folder), redirects=Std.ALL), **how)


def test_a_stuck_worker_fails_the_job_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stuck_pid = tmp_path / "stuck"
    monkeypatch.setattr(
        procfs,
        "state_of",
        lambda pid: "D" if stuck_pid.exists() and stuck_pid.read_text() == f"{pid}\n" else "S",
    )
    script = "[ $RANK = 0 ] || { echo $$ > part; mv part stuck; }; exec sleep 1000"
    agent = agent_of(tmp_path, script, uninterruptible_state_timeout=0.05)
    result = agent.run()
    assert result.is_failed()
    assert agent.restart_count == 0
    stuck, other = result.failures[1], result.failures[0]
    # Asking it to end would be in vain.
    assert (stuck.exitcode, stuck.consequence) == (-signal.SIGKILL, False)
    assert stuck.detail.startswith("was stuck in uninterruptible sleep")
    assert (other.exitcode, other.consequence) == (-signal.SIGTERM, True)


@pytest.mark.parametrize(
    ("given", "variable", "limit_s"),
    [
        (None, None, 0),
        (None, "2.5", 2.5),
        (None, "nonsense", 0),
        (4.0, "2.5", 4.0),
        (0.0, "2.5", 0),
        (-1.0, None, 0),
    ],
)
def test_where_the_limit_comes_from(
    given: float | None,
    variable: str | None,
    limit_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(UNINTERRUPTIBLE_ENV, raising=False)
    if variable is not None:
        monkeypatch.setenv(UNINTERRUPTIBLE_ENV, variable)
    agent = agent_of(tmp_path, "exit 0", uninterruptible_state_timeout=given)
    monkeypatch.delenv(UNINTERRUPTIBLE_ENV, raising=False)  # It was read when the agent was made.
    due = agent._stuck.next_look(0.0)
    assert due == (pytest.approx(limit_s / 10) if limit_s else None)
