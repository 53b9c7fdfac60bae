from __future__ import annotations

import errno
import os
import select
import signal
import threading
import time
from _socket import MSG_PEEK
from typing import TYPE_CHECKING

import pytest

from holdfast.core import blame
from holdfast.core.supervision import WorkerExited, WorkersStopped
from holdfast.errors import EnvironmentProblem, PluginError
from holdfast.processes import poll
from holdfast.processes.keeper import keeper_client
from holdfast.processes.keeper.deadline import WorkersDeadline
from holdfast.processes.keeper.keeper_client import Keeper
from holdfast.processes.keeper.keeper_program import descendants_of
from holdfast.processes.logs.specs import DefaultLogsSpecs, LogsDest, LogsSpecs
from holdfast.processes.procfs import is_stopped
from holdfast.processes.workers.group import (
    KILLED_AT_DEADLINE,
    CommandGroup,
    GroupSpec,
    WorkerExit,
    is_retryable,
)
from real_jobs import Watched, WorkerMessages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from holdfast.processes.workers.group import RunningGroup, RunProcsResult

PATIENCE_S = 60
# Reports that it runs, then waits to be stopped; `exec` so that it has no child.
WAITS = "echo ready $$ > $MESSAGES; exec sleep 1000"
# Ignores SIGTERM; `sleep` inherits the trap.
IGNORES = f"trap '' TERM; {WAITS}"
# Exits with code 0 on SIGTERM.
OBEYS = "trap 'exit 0' TERM; echo ready $$ > $MESSAGES; sleep 1000 & wait"


class Group:
    """Makes contexts of shell scripts, and closes them with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.messages = WorkerMessages(folder)
        self.made: list[RunningGroup] = []

    def make(
        self,
        *scripts: str,
        kind: type[CommandGroup] = CommandGroup,
        logs: LogsSpecs | None = None,
        keeper: Keeper | None = None,
        defers_threads: bool = False,
        deadline: WorkersDeadline | None = None,
    ) -> CommandGroup:
        args = {rank: ("-c", script) for rank, script in enumerate(scripts)}
        envs = {rank: {"MESSAGES": str(self.messages.path), "RANK": str(rank)} for rank in args}
        logs = logs or DefaultLogsSpecs(log_dir=str(self.folder / "logs"))
        spec = GroupSpec("trainer", "sh", args, envs, logs, defers_threads=defers_threads)
        context = kind(spec, keeper=keeper, deadline=deadline)
        self.made.append(context)
        return context

    def start(self, *scripts: str, ready: int = 0, **how: object) -> CommandGroup:
        context = self.make(*scripts, **how)  # type: ignore[arg-type]
        context.start()
        for _ in range(ready):
            assert self.messages.next()[0] == "ready"
        return context

    def close(self) -> None:
        for context in self.made:
            context.close(signal.SIGKILL)
        self.messages.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path)
    yield made
    made.close()


def finished(context: RunningGroup) -> RunProcsResult:
    result = context.wait(PATIENCE_S)
    assert result is not None, "the workers did not end"
    return result


def until(
    context: RunningGroup, done: Callable[[], bool], seen: list[WorkerExit] | None = None
) -> list[WorkerExit]:
    """Wait like the agent for the descriptor or the deadline, then take the events."""
    seen = [] if seen is None else seen
    give_up_at = time.monotonic() + PATIENCE_S
    while not done():
        deadline = poll.min_of(context.next_deadline(), give_up_at)
        assert deadline is not None
        wait_s = max(0.0, deadline - time.monotonic())
        select.select([context.fileno()], [], [], wait_s + 0.001)
        assert time.monotonic() < give_up_at, "no event arrived"
        events = context.poll_events(time.monotonic())
        seen += [
            context._exits[event.local_rank] for event in events if isinstance(event, WorkerExited)
        ]
    return seen


def all_ended(context: RunningGroup) -> list[WorkerExit]:
    seen: list[WorkerExit] = []
    return until(context, lambda: len(seen) == context.nprocs, seen)


def await_events(keeper: Keeper, word: bytes, times: int = 1) -> None:
    """Wait until the keeper has sent this many events, and leave them for the client."""
    while keeper._control.recv(1 << 16, MSG_PEEK).count(word) < times:
        select.select([], [], [], 0.001)


class BadPaths(LogsSpecs):
    """Names a log file for each rank; the last one cannot be opened."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        paths = {rank: f"{self.root_log_dir}/{rank}.log" for rank in envs}
        paths[len(envs) - 1] = f"{self.root_log_dir}/no/such/folder/x.log"
        return LogsDest(
            stdouts=dict(paths), stderrs=dict(paths), error_files=dict.fromkeys(envs, os.devnull)
        )

    @property
    def root_log_dir(self) -> str:
        assert self._root_log_dir is not None
        return self._root_log_dir


@pytest.mark.parametrize("dest", [None, LogsDest(stdouts={0: ""}, stderrs={0: ""})])
def test_logs_specs_that_choose_no_destination_are_named(group: Group, dest: LogsDest) -> None:
    class Forgetful(BadPaths):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            return dest

    with pytest.raises(PluginError, match=r"Forgetful: reify(: error_files: | returned None, )"):
        group.make(WAITS, logs=Forgetful("logs"))


def test_kill_at_the_deadline_is_not_taken_for_another_kill(group: Group) -> None:
    deadline = WorkersDeadline()
    deadline.begin()
    try:
        context = group.start(WAITS, ready=1, deadline=deadline)
        deadline.renew(time.monotonic(), 0.0)
        [failure] = finished(context).failures.values()
    finally:
        deadline.close()
    assert failure.only_stopped()
    assert failure.summary() == f"killed by SIGKILL: {KILLED_AT_DEADLINE}"


def test_workers_are_of_one_session_and_lead_their_process_groups(group: Group) -> None:
    """The kernel may share out the CPUs by session; then many workers must not starve the agent."""
    context = group.start(WAITS, WAITS, ready=2)
    pids = [*context.pids().values()]
    assert [os.getpgid(pid) for pid in pids] == pids
    assert len({os.getsid(pid) for pid in pids}) == 1
    assert os.getsid(pids[0]) != os.getsid(0)


def test_start_that_fails_halfway_leaves_nothing(group: Group, tmp_path: Path) -> None:
    context = group.make(WAITS, WAITS, WAITS, logs=BadPaths(str(tmp_path)))
    with pytest.raises(EnvironmentProblem, match=r"cannot write .*no/such/folder/x\.log"):
        context.start()
    assert context.running() == set()
    assert set(context.result().failures) == {0, 1}


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGKILL])
def test_signal_that_the_stop_did_not_send_is_not_a_consequence(
    group: Group, signum: signal.Signals
) -> None:
    context = group.start(IGNORES, WAITS, ready=2)
    context.begin_stop(signal.SIGTERM, 1000)
    until(context, lambda: context.running() == {0})
    os.kill(context.pids()[0], signum)
    failures = finished(context).failures
    assert {rank: (f.exitcode, f.consequence) for rank, f in failures.items()} == {
        0: (-signum, False),
        1: (-signal.SIGTERM, True),
    }


def test_first_failure_is_the_earliest(group: Group) -> None:
    context = group.start(WAITS, "exit 3", ready=1)
    until(context, lambda: context.running() == {0})
    os.kill(context.pids()[0], signal.SIGKILL)
    until(context, context.all_ended)
    first = context.first_failure()
    assert first is not None
    assert first.rank == 1


# Exits with code 1 after a traceback on standard error that ends with the given line.
SAYS = """printf 'Traceback (most recent call last):\\n  File "t.py", line 1\\n{}\\n' >&2; exit 1"""
COMPLAINS = SAYS.format("ConnectionResetError: reset by peer")


@pytest.mark.parametrize("follows", [COMPLAINS, "exit 1", "kill -PIPE $$"])
def test_exit_caused_by_a_peer_is_delayed_until_the_peers(
    group: Group, monkeypatch: pytest.MonkeyPatch, follows: str
) -> None:
    """A stop would kill the peer before it exits by itself."""
    monkeypatch.setattr(blame, "EXIT_NS_MAX", PATIENCE_S * 10**9)
    context = group.start(WAITS, follows, ready=1)
    assert until(context, lambda: context.running() == {0}) == []
    os.kill(context.pids()[0], signal.SIGKILL)
    seen = all_ended(context)
    assert [(one.rank, one.after_stop) for one in seen] == [(1, False), (0, False)]


def test_delayed_exit_is_reported_if_no_peer_exits(group: Group) -> None:
    context = group.start(WAITS, COMPLAINS, ready=1)
    failures = finished(context).failures
    assert (failures[0].stopped, failures[1].consequence) == (True, False)


@pytest.mark.parametrize("reason", [SAYS.format("ValueError: shape"), "kill -KILL $$"])
def test_exit_with_its_own_reason_is_reported_at_once(
    group: Group, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(blame, "EXIT_NS_MAX", 2 * PATIENCE_S * 10**9)
    context = group.start(WAITS, reason, ready=1)
    seen: list[WorkerExit] = []
    until(context, lambda: bool(seen), seen)


def test_exit_is_not_delayed_without_running_peers(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blame, "EXIT_NS_MAX", 2 * PATIENCE_S * 10**9)
    assert len(all_ended(group.start(COMPLAINS, COMPLAINS))) == 2
    assert len(all_ended(group.start(COMPLAINS))) == 1


class SlowStart(CommandGroup):
    """Receives the events of its start so late that all workers have exited by then."""

    def _await_spawned(self) -> None:
        assert self._keeper is not None
        await_events(self._keeper, b"exited", self.nprocs)
        super()._await_spawned()


def test_exit_during_the_start_is_not_waited_for(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing makes the descriptor readable after that."""
    monkeypatch.setattr(blame, "EXIT_NS_MAX", 2 * PATIENCE_S * 10**9)
    context = group.start("exit 7", "exit 8", kind=SlowStart)
    assert {one.exitcode for one in all_ended(context)} == {7, 8}


class Unkillable(CommandGroup):
    """Behaves as if its first worker were in uninterruptible sleep; the others die at once."""

    def _kill_tree(self, rank: int) -> None:
        if rank != 0:
            super()._kill_tree(rank)
            assert self._keeper is not None
            await_events(self._keeper, b"exited")


def test_unkillable_worker_is_reported(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    context = group.start(IGNORES, IGNORES, "exit 1", ready=2, kind=Unkillable)
    context.grace_s = context.reap_s = 0.05
    pid = context.pids()[0]
    assert context._keeper is not None
    keeper = context._keeper.pid
    everyone = Watched(pid, keeper)
    result = finished(context)
    assert context.given_up == {0: pid}
    assert context.stop_ended
    failure = result.failures[0]
    assert (failure.pid, failure.exitcode, failure.consequence) == (pid, -9, True)
    assert failure.detail.startswith("survived SIGKILL for 0.05 s: in state S")
    assert failure.order > result.failures[1].order
    assert result.failures[1].detail == ""
    assert result.failures[2].exitcode == 1
    assert context.left_behind == [pid]
    assert f"worker 0 (pid {pid}) is left behind" in caplog.text
    everyone.wait_until_exited()  # The keeper continues to try by itself.
    os.waitpid(keeper, 0)


def test_new_start_ignores_an_unkillable_worker_of_the_last(group: Group) -> None:
    """Both have the same rank, and so the same key at their common keeper."""
    keeper = Keeper.start()
    first = group.start(IGNORES, ready=1, kind=Unkillable, keeper=keeper)
    first.reap_s = 0.02
    first.begin_stop(signal.SIGKILL, 0)
    until(first, lambda: first.stop_ended)
    stuck = first.pids()[0]
    first.close()
    second = group.start(OBEYS, ready=1, keeper=keeper)
    os.kill(stuck, signal.SIGKILL)
    Watched(stuck).wait_until_exited()
    os.kill(second.pids()[0], signal.SIGTERM)
    (ended,) = all_ended(second)
    assert (ended.pid, ended.exitcode) == (second.pids()[0], 0)
    assert not finished(second).is_failed()
    second.close()
    keeper.close()


@pytest.mark.parametrize("script", [IGNORES, f"{OBEYS}; exit 0"])
def test_stopped_keeper_leaves_no_process_behind(
    group: Group, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(keeper_client, "RESPONSE_MS_MAX", 20)
    context = group.start(script, ready=1)
    context.reap_s = 0.05
    assert context._keeper is not None
    keeper = context._keeper.pid
    everyone = Watched(*descendants_of(keeper), keeper)
    os.kill(keeper, signal.SIGSTOP)
    context.close(timeout=0.01)
    everyone.assert_exited()
    assert context.left_behind == []
    assert "left behind" not in caplog.text
    detail = (
        f"the keeper of the workers (pid {keeper}) was killed, so the kernel killed the workers"
    )
    assert context.result().failures[0].detail == detail


def test_stubborn_workers_of_a_stopped_keeper_are_killed(group: Group) -> None:
    context = group.start(IGNORES, ready=1)
    context.reap_s = 600  # The limit for a response must not be the reason of the kill.
    assert context._keeper is not None
    keeper = context._keeper.pid
    everyone = Watched(*descendants_of(keeper), keeper)
    os.kill(keeper, signal.SIGSTOP)
    while not is_stopped(keeper):  # The signal takes effect later on a busy machine.
        time.sleep(0.001)
    context.close(timeout=0.01)
    everyone.assert_exited()
    assert context.left_behind == []


def test_keeper_lost_before_the_start_is_a_start_error(group: Group) -> None:
    keeper = Keeper.start()
    os.kill(keeper.pid, signal.SIGKILL)
    Watched(keeper.pid).wait_until_exited()
    context = group.start(WAITS, WAITS, keeper=keeper)
    assert [one.failed for one in all_ended(context)] == [True, True]
    assert context.pids() == {}
    failures = finished(context).failures
    detail = f"could not be started: the keeper of the workers (pid {keeper.pid}) has exited"
    assert {rank: (f.pid, f.exitcode, f.detail) for rank, f in failures.items()} == {
        0: (0, 127, detail),
        1: (0, 127, detail),
    }
    context.close()
    keeper.close()


def test_end_of_a_stop_is_reported_once(group: Group) -> None:
    context = group.start(WAITS, ready=1)
    context.begin_stop(signal.SIGTERM, 1000)
    events: list[object] = []
    while not any(isinstance(event, WorkersStopped) for event in events):
        poll.wait_for(context.next_deadline(), context.fileno())
        events += context.poll_events(time.monotonic())
    assert [type(event) for event in events] == [WorkerExited, WorkersStopped]
    assert events[-1] == WorkersStopped(0)
    assert context.poll_events(time.monotonic()) == []
    assert context.next_deadline() is None


def test_stop_without_workers_is_due_at_once(group: Group) -> None:
    context = group.start(WAITS, ready=1)
    assert context._keeper is not None
    os.kill(context._keeper.pid, signal.SIGKILL)
    until(context, context.all_ended)
    context.begin_stop(signal.SIGTERM, 1000)
    assert context.next_deadline() == 0.0
    assert context.poll_events(time.monotonic()) == [WorkersStopped(0, failed=True)]


# If the caller handles events, the group follows output from the first byte.


def is_followed() -> bool:
    return any(thread.name == "holdfast-logs" for thread in threading.enumerate())


def test_silent_workers_are_not_followed_while_threads_are_deferred(group: Group) -> None:
    context = group.start("exit 0", "exit 0", defers_threads=True)
    all_ended(context)
    assert not is_followed()
    assert not finished(context).failures


def test_the_first_output_is_shown_while_its_worker_runs(
    group: Group, capfd: pytest.CaptureFixture[str]
) -> None:
    context = group.start(WAITS, f"echo first >&2; {WAITS}", ready=2, defers_threads=True)
    until(context, is_followed)
    shown = ""
    give_up_at = time.monotonic() + PATIENCE_S
    while "first" not in shown:  # A thread shows it, without an event.
        assert time.monotonic() < give_up_at
        select.select([], [], [], 0.001)
        shown += capfd.readouterr().err
    context.close(signal.SIGKILL)
    assert not is_followed()


def test_follow_output_follows_silent_workers(group: Group) -> None:
    context = group.start(WAITS, ready=1, defers_threads=True)
    assert not is_followed()
    context.follow_output()
    assert is_followed()
    context.follow_output()


def test_unfollowed_output_is_in_the_failure(
    group: Group, capfd: pytest.CaptureFixture[str]
) -> None:
    context = group.make("echo why >&2; exit 3", defers_threads=True)
    context.start()
    until(context, lambda: context.first_failure() is not None)
    assert context.failures_so_far()[0].stderr_tail == "why\n"
    assert finished(context).failures[0].stderr_tail == "why\n"
    assert capfd.readouterr().err == "why\n"


def test_only_a_lack_of_resources_is_retryable() -> None:
    assert is_retryable(None)
    assert all(is_retryable((number, "x")) for number in (errno.EAGAIN, errno.ETXTBSY))
    assert not any(is_retryable((number, "x")) for number in (0, errno.ENOENT, errno.EACCES))
