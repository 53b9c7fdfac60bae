from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.agent.spec import RunResult, WorkerGroup, WorkerState
from holdfast.agent.worker_processes import StopOrder
from holdfast.core.supervision import StopReason
from holdfast.elastic._impl.agents import LocalElasticAgent
from holdfast.membership.loop_heartbeat import LoopHeartbeat
from holdfast.observe.lifecycle import GenerationStopping
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.logs.std import Std
from holdfast.processes.signals import SignalException
from rendezvous_fakes import shell_spec


def local(
    script: str | None = None,
    *,
    kind: type[LocalElasticAgent] = LocalElasticAgent,
    how: dict[str, Any] | None = None,
    logs: DefaultLogsSpecs | None = None,
    **settings: Any,
) -> Any:
    """Return an agent whose workers run a shell script in the current folder."""
    spec = shell_spec(script, **settings)
    return kind(spec, logs or DefaultLogsSpecs("logs", redirects=Std.ALL), **(how or {}))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder of the test, and so of its workers."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_ELASTIC_WORKER_IDENTICAL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def kill_and_wait(pid: int) -> None:
    """Kill a process and wait until it is dead; its parent is left to reap it."""
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([pidfd], [], [])
    os.close(pidfd)


def test_a_keeper_killed_between_two_starts_is_replaced() -> None:
    class Unlucky(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
            if self._processes._keeper is not None and self.restart_count == 1:
                kill_and_wait(self._processes._keeper.pid)
            return super()._start_workers(worker_group)

    agent = local("[ $TORCHELASTIC_RESTART_COUNT -ge 1 ]", kind=Unlucky, max_restarts=2)
    assert agent.run().state is WorkerState.SUCCEEDED


class Hooked(LocalElasticAgent):
    """Has hooks around the start and stop, like some users' agents."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        self.calls.append("start")
        return super()._start_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("stop")
        super()._stop_workers(worker_group)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("shutdown")
        super()._shutdown(*args, **kwargs)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [LocalElasticAgent, Hooked])
def test_second_interrupt_kills_while_a_hook_waits(
    kind: type[LocalElasticAgent], caplog: pytest.LogCaptureFixture
) -> None:
    """With the grace period of 30 s this test would time out."""
    for name in ("ready", "stopping"):
        os.mkfifo(name)
    script = (
        "if [ $RANK = 1 ]; then read go < ready; exit 7; fi;"
        "trap 'echo > stopping' TERM; trap '' INT; echo go > ready; while :; do sleep 0.1; done"
    )

    def interrupt() -> None:
        Path("stopping").read_text()
        os.kill(os.getpid(), signal.SIGINT)
        while not any("SIGINT" in text for text in caplog.messages):  # Two at once count as one.
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    agent = local(script, local_world_size=2, kind=kind)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        result = agent.run()  # The failure was first, so it remains the reason.
    assert result.failures[0].exitcode == -signal.SIGKILL
    assert result.failures[1].exitcode == 7


def test_signal_at_the_end_of_a_hooks_stop_prevents_the_next_round() -> None:
    class Signalled(Hooked):
        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            super()._stop_workers(worker_group)
            os.kill(os.getpid(), signal.SIGTERM)

    agent = local("exit 1", kind=Signalled, max_restarts=1)
    with pytest.raises(SignalException):
        agent.run()
    assert agent._worker_group.spec.rdzv_handler.rounds == 1


class Watching(LocalElasticAgent):
    """Reports workers as unhealthy if they create the file `sick`, and notes each result."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found: list[WorkerState] = []

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if Path("sick").exists():
            Path("sick").unlink()
            result = RunResult(WorkerState.UNHEALTHY)
        self.found.append(result.state)
        return result


def test_hook_can_report_running_workers_as_unhealthy(caplog: pytest.LogCaptureFixture) -> None:
    script = "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then touch sick; sleep 1000; fi"
    agent = local(script, kind=Watching, monitor_interval=0.01, max_restarts=1)
    assert agent.run().state is WorkerState.SUCCEEDED
    assert agent.restart_count == 1
    assert WorkerState.UNHEALTHY in agent.found
    assert agent.found[-1] is WorkerState.SUCCEEDED
    assert len(caplog.messages) == 1  # The restart; a stopped worker has not failed.


def test_hook_decides_whether_an_exit_is_a_failure() -> None:
    class Forgiving(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            return RunResult(WorkerState.SUCCEEDED) if result.is_failed() else result

    assert local("exit 3", kind=Forgiving, max_restarts=3).run().state is WorkerState.SUCCEEDED
    assert len(list(Path("logs").glob("*/attempt_*"))) == 1


def test_failures_that_a_hook_returns_describe_the_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Monitoring(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            return super()._monitor_workers(worker_group)

    script = "[ $RANK-$TORCHELASTIC_RESTART_COUNT = 1-0 ] && exit 3; exec true"
    agent = local(
        script, kind=Monitoring, local_world_size=2, max_restarts=1, monitor_interval=0.01
    )
    stops: list[object] = []
    agent.observers.add(stops.append)
    assert agent.run().state is WorkerState.SUCCEEDED
    assert [one.reason for one in stops if isinstance(one, GenerationStopping)] == [
        StopReason.WORKER_FAILED,
        StopReason.SUCCEEDED,
    ]
    [restart] = caplog.messages
    assert restart.startswith("rank 1 (pid ")


def test_known_failures_are_those_of_the_current_generation() -> None:
    known: list[list[int]] = []

    class Knowing(Hooked):
        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            failures = self._loop.workers.failures_so_far()
            known.append([one.exitcode for one in failures.values()])
            super()._stop_workers(worker_group)

    agent = local("exit $((3 + $TORCHELASTIC_RESTART_COUNT))", kind=Knowing, max_restarts=1)
    assert agent.run().is_failed()
    assert known == [[3], [4]]


def test_status_shows_the_workers_of_an_agent_with_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as runtime_folder:  # A socket's path must be short.
        monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", runtime_folder)
        agent = local(f"{sys.executable} -m holdfast status --json > seen", kind=Hooked)
        assert agent.run().state is WorkerState.SUCCEEDED
    [node] = json.loads(Path("seen").read_text())["nodes"]
    assert [one["state"] for one in node["report"]["workers"]] == ["running"]


def test_start_and_stop_hooks_are_called() -> None:
    agent = local("exit 1", kind=Hooked, max_restarts=1)
    assert agent.run().is_failed()
    again = ["start", "stop", "shutdown"]  # Our `_stop_workers` calls `_shutdown`.
    assert agent.calls == [*again, *again, "shutdown"]


def test_shutdown_hook_stops_the_workers_before_a_restart() -> None:
    class Noting(LocalElasticAgent):
        calls: tuple[dict[str, Any], ...] = ()

        def _shutdown(self, *args: Any, **kwargs: Any) -> None:
            assert not args  # Only a signal to the agent chooses the signal.
            self.calls += (kwargs,)
            super()._shutdown(**kwargs)

    agent = local("exit 1", kind=Noting, max_restarts=1, how={"shutdown_timeout": 20})
    assert agent.run().is_failed()
    after_failure = {"timeout": 10}
    assert agent.calls == (after_failure, after_failure, {"timeout": 20})


class Finding(LocalElasticAgent):
    """Notes the exit codes of the failures that it sees, and how many workers run at that time."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            codes = {rank: one.exitcode for rank, one in sorted(result.failures.items())}
            self.found = codes, len(self._pcontext.running())
        return result


def fails_beside_a_sleeper() -> None:
    if os.environ["RANK"] == "0":
        os._exit(7)
    time.sleep(1000)


def test_monitor_hook_sees_failures_after_the_stop_of_the_peers() -> None:
    script = "[ $RANK = 0 ] && exit 7; exec sleep 1000"
    agent = local(script, kind=Finding, local_world_size=2, monitor_interval=0.01)
    assert agent.run().failures.keys() == {0, 1}
    assert agent.found == ({0: 7, 1: -signal.SIGTERM}, 0)


def test_monitor_hook_does_not_see_functions_that_were_stopped() -> None:
    how = {"start_method": "fork"}
    settings: dict[str, Any] = {"entrypoint": fails_beside_a_sleeper, "args": ()}
    agent = local(kind=Finding, how=how, monitor_interval=0.01, local_world_size=2, **settings)
    assert agent.run().failures.keys() == {0}
    assert agent.found == ({0: 7}, 0)


@pytest.mark.parametrize("stops_before", [False, True])
def test_hook_can_close_the_context(stops_before: bool) -> None:
    class Closing(LocalElasticAgent):
        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            if stops_before:
                super()._stop_workers(worker_group)
            assert self._pcontext is not None
            self._pcontext.close(signal.SIGKILL)

    agent = local(
        "[ $RANK = 0 ] && exit 3; sleep 1000", kind=Closing, local_world_size=2, max_restarts=1
    )
    result = agent.run()
    assert (agent.restart_count, result.failures[0].exitcode) == (1, 3)
    assert len(list(Path("logs").glob("*/attempt_*"))) == 2


def test_loop_needs_no_heartbeat_during_a_hook() -> None:
    heartbeat = LoopHeartbeat()
    needed: list[bool] = []

    class Noting(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
            needed.append(heartbeat.is_started)
            return {}

        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            needed.append(heartbeat.is_started)

        def _shutdown(self, *args: Any, **kwargs: Any) -> None:
            needed.append(heartbeat.is_started)

    agent = local("true", kind=Noting)
    agent._job.membership = SimpleNamespace(heartbeat=heartbeat)
    workers = agent._loop.workers
    heartbeat.start()
    workers.start(None, None)
    for reason in (StopReason.REGROUP, StopReason.SIGNAL):
        workers.begin_stop(StopOrder(reason, signal.SIGTERM, 1.0))
    assert (needed, heartbeat.is_started) == ([False] * 3, True)
