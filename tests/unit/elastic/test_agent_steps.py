"""Agents that override TorchElastic's steps, or call them from their own loop.

The classes are modelled on real ones: DeepSpeed's and NVIDIA's loops, DLRover's steps, HyperPod's way
of starting workers.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.agent.spec import Worker, WorkerGroup, WorkerSpec
from holdfast.agent.watchdogs import ENABLE_ENV, FILE_ENV
from holdfast.elastic.agent.server import RunResult, WorkerState
from holdfast.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from holdfast.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from holdfast.net.listening import ReservedPort
from holdfast.processes import procfs
from holdfast.processes.signals import SignalException
from holdfast.rendezvous.handler_registry import get_rendezvous_handler
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.rendezvous.worker_store import SingleNodeHandler
from rendezvous_fakes import shell_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.rendezvous.handler import RendezvousHandler

FAIL_ONCE = "echo $TORCHELASTIC_RESTART_COUNT >> starts; [ -e failed ] || { touch failed; exit 7; }"


alone = SingleNodeHandler("job")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    alone.shutdown()


def spec_of(script: str, handler: RendezvousHandler = alone, **settings: Any) -> WorkerSpec:
    own = {"handler": handler, "max_restarts": 2, "monitor_interval": 0.01}
    return shell_spec(script, **(own | settings))


def make(kind: Callable[..., Any], script: str, **settings: Any) -> Any:
    return kind(spec_of(script, **settings), DefaultLogsSpecs("logs", redirects=Std.ALL))


class Steps(LocalElasticAgent):
    """Notes each step and then performs it, like an agent that only extends the steps."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.steps: list[str] = []

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self.steps.append("initialize")
        super()._initialize_workers(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.steps.append("rendezvous")
        super()._rendezvous(worker_group)
        assert self._store is worker_group.store

    def _assign_worker_ranks(self, *args: Any) -> list[Worker]:
        self.steps.append("ranks")
        return super()._assign_worker_ranks(*args)

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        self.steps.append("watchdog")
        super()._setup_local_watchdog(envs)
        envs[0]["ADDED"] = "by the hook"

    def _setup_healthcheck(self) -> None:
        self.steps.append("health")

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.steps.append(f"restart with {self._remaining_restarts} left")
        super()._restart_workers(worker_group)

    def _exit_barrier(self) -> None:
        self.steps.append("barrier")
        super()._exit_barrier()

    def _record_metrics(self, group_results: RunResult) -> None:
        self.steps.append(f"metrics {group_results.state.name}")

    def _record_worker_events(self, result: RunResult) -> None:
        self.steps.append("events")
        super()._record_worker_events(result)

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        return "MY_" + super()._get_worker_state(worker, result)


def test_overridden_steps_are_called() -> None:
    agent = make(Steps, f'[ "$ADDED" ] || exit 9; {FAIL_ONCE}', event_log_handler="jsonl")
    result = agent.run()
    assert result.state is WorkerState.SUCCEEDED
    start = ["initialize", "rendezvous", "ranks", "watchdog", "health"]
    end = ["barrier", "metrics SUCCEEDED", "events"]
    assert agent.steps == [*start, "restart with 1 left", *start, *end]
    assert (agent.restart_count, agent._remaining_restarts) == (1, 1)
    assert Path("starts").read_text().split() == ["0", "1"]
    (written,) = Path("logs").glob("*/events-*.jsonl")
    ends = [json.loads(line) for line in written.read_text().splitlines()]
    states = [one["metadata"]["state"] for one in ends if one["source"] == "WORKER"]
    assert states == ["START", "START", "MY_SUCCEEDED"]


def test_final_failure_stops_the_other_workers() -> None:
    agent = make(Steps, "[ $RANK = 1 ] && exit 7; sleep 1000", local_world_size=2, max_restarts=0)
    result = agent.run()
    assert result.state is WorkerState.FAILED
    assert {rank: one.exitcode for rank, one in result.failures.items()} == {1: 7, 0: -15}
    assert "barrier" not in agent.steps


class OwnLoop(LocalElasticAgent):
    """Has its own loop, like DeepSpeed's and NVIDIA's agents."""

    seen: list[RunResult]

    def _invoke_run(self, role: str = "default") -> RunResult:
        self.seen = []
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            time.sleep(group.spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state is WorkerState.SUCCEEDED:
                self._exit_barrier()
                return result
            if result.state is WorkerState.FAILED:
                self.seen.append(result)
                if self._remaining_restarts <= 0:
                    self._stop_workers(group)
                    return self._monitor_workers(group)
                self._remaining_restarts -= 1
                self._restart_workers(group)


def test_custom_loop_can_call_the_steps() -> None:
    agent = make(OwnLoop, FAIL_ONCE)
    assert agent.run().state is WorkerState.SUCCEEDED
    assert [one.failures[0].exitcode for one in agent.seen] == [7]
    assert agent._remaining_restarts == 1
    assert Path("starts").read_text().split() == ["0", "1"]


def test_custom_loop_gets_the_failure_after_the_stop() -> None:
    agent = make(OwnLoop, "exit 3", max_restarts=0)
    assert agent.run().failures[0].exitcode == 3


def test_expired_timer_kills_a_worker_of_a_custom_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLE_ENV, "1")
    timer = '{"version": 1, "pid": %d, "scope_id": "step", "expiration_time": 1, "signal": 9}'
    script = f"printf '{timer}\\n' $$ > ${FILE_ENV}; sleep 1000"
    agent = make(OwnLoop, script, max_restarts=0)
    failure = agent.run().failures[0]
    assert (failure.exitcode, failure.detail) == (-9, "timer 'step' expired: killed the worker")


def test_stuck_worker_ends_the_steps_without_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "state_of", lambda _pid: "D")
    logs = DefaultLogsSpecs("logs")
    agent = Steps(spec_of("sleep 1000"), logs, uninterruptible_state_timeout=0.2)
    assert agent.run().state is WorkerState.FAILED
    assert "was stuck in uninterruptible sleep" in agent._machine.stuck[0]
    assert agent.restart_count == 2  # As set in `_remaining_restarts`: none is left.


def test_signal_raises_in_a_custom_loop() -> None:
    agent = make(OwnLoop, "echo $$ > begun; mv begun ready; sleep 1000")

    def interrupt() -> None:
        while not Path("ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException) as raised:
        agent.run()
    thread.join()
    assert raised.value.sigval == signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("ready").read_text()), 0)


def test_wrapped_invoke_run_still_uses_the_agent_loop() -> None:
    class Wrapped(LocalElasticAgent):
        def _invoke_run(self, role: str = "default") -> RunResult:
            Path("begun").touch()
            return super()._invoke_run(role)

    # With this interval a polling loop would not end in time.
    assert make(Wrapped, "true", monitor_interval=3600.0).run().state is WorkerState.SUCCEEDED
    assert Path("begun").exists()


class StartsItself(LocalElasticAgent):
    """Starts and closes the context of its workers itself, as HyperPod does, in two stages."""

    def _invoke_run(self, role: str = "default") -> RunResult:
        results = []
        for script in ("echo first >> stages", "echo second >> stages"):
            self._worker_group = WorkerGroup(spec_of(script, self._rdzv_handler))
            super()._initialize_workers(self._worker_group)
            while (result := self._monitor_workers(self._worker_group)).state is HEALTHY:
                time.sleep(0.01)
            results.append(result)
        return results[-1]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        envs: dict[int, dict[str, str]] = {0: {"RANK": "0"}}
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        spec = worker_group.spec
        assert spec.entrypoint is not None
        self._pcontext = start_processes(
            spec.role, spec.entrypoint, {0: spec.args}, envs, self._logs_specs
        )
        return dict(self._pcontext.pids())

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 5) -> None:
        if self._worker_watchdog is not None:
            self._worker_watchdog.stop()
        if self._health_check_server is not None:
            self._health_check_server.stop()
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout)
            self._pcontext = None


HEALTHY = WorkerState.HEALTHY


def test_custom_process_context_runs_the_workers() -> None:
    assert make(StartsItself, "").run().state is WorkerState.SUCCEEDED
    assert Path("stages").read_text().split() == ["first", "second"]


# Hooks of the agent's event loop.


class Reading(LocalElasticAgent):
    """Reads the result of `_monitor_workers`, and may forbid a restart."""

    forbids = False
    found: RunResult

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.found = super()._monitor_workers(worker_group)
        if self.found.is_failed() and self.forbids:
            self._remaining_restarts = 0
        return self.found


def value() -> int:
    return 42


def test_a_hook_reads_values_and_failures() -> None:
    spec = WorkerSpec("trainer", 1, alone, entrypoint=value)
    succeeding = Reading(spec, DefaultLogsSpecs("logs"), start_method="fork")
    succeeding.run()
    assert succeeding.found.return_values == {0: 42}
    failing = make(Reading, "exit 5", max_restarts=0)
    failing.run()
    assert failing.found.failures[0].exitcode == 5


def test_hook_can_forbid_restarts() -> None:
    agent = make(Reading, "echo x >> starts; exit 5", max_restarts=3)
    agent.forbids = True
    assert agent.run().is_failed()
    assert Path("starts").read_text().split() == ["x"]


# Several nodes, which use the handler's `next_rendezvous` and `num_nodes_waiting`.


@pytest.fixture
def two_handlers() -> Iterator[list[RendezvousHandler]]:
    with ReservedPort() as reserved:
        endpoint = f"127.0.0.1:{reserved.number}"
    handlers = [
        get_rendezvous_handler(RendezvousParameters("c10d", endpoint, "job", 2, 2))
        for _ in range(2)
    ]
    yield handlers
    for handler in handlers:
        handler.shutdown()


def test_nodes_with_overridden_steps_restart_together(
    two_handlers: list[RendezvousHandler],
) -> None:
    script = (
        "echo $RANK of $WORLD_SIZE >> starts;"
        "[ $HOLDFAST_GENERATION = 1 ] && exit; [ $RANK = 1 ] && exec sleep 1000;"
        "while [ $(wc -l < starts) -lt 2 ]; do sleep 0.01; done; exit 7"
    )
    agents = [make(Steps, script, handler=one) for one in two_handlers]
    results: list[RunResult] = []
    threads = [threading.Thread(target=lambda one=one: results.append(one.run())) for one in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.state for one in results] == [WorkerState.SUCCEEDED] * 2
    assert sorted(Path("starts").read_text().splitlines()) == ["0 of 2"] * 2 + ["1 of 2"] * 2
    assert sorted(one.restart_count for one in agents) == [0, 1]
