"""Lifecycle events: what an agent reports about a run, and the fan-out to observers.

Events, metrics and health checks are made of these and of nothing else. An observer is a callable
that gets every lifecycle event as it comes. It has no say in the run, and one that raises is
reported once and dropped when it keeps raising.

Times are by this host's monotonic clock; `wall` is the time of day.
"""

from __future__ import annotations

import os
import sys
import time

from holdfast import console
from holdfast.core.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.agent.agent import SimpleElasticAgent
    from holdfast.agent.spec import RunResult, Worker, WorkerSpec
    from holdfast.observe.standalone import StandaloneRecords

    Observer = Callable[["LifecycleEvent"], object]


FAULTS_MAX = 3
"""An observer that raised so often is told nothing more."""


class WorkerInfo(Value):
    """A worker, as it is known from outside."""

    local_rank: int
    global_rank: int
    role_rank: int
    role_world_size: int
    pid: int


class LifecycleEvent(Value):
    """What all moments have; a subclass says what happened."""


class RunStarted(LifecycleEvent):
    """A run begins."""

    at: float
    wall: float
    run_id: str
    role: str
    backend: str
    entry_point: str
    local_world_size: int
    max_restarts: int
    program: str = ""
    """What a person calls the workers: the script rather than its interpreter."""


class RendezvousEnded(LifecycleEvent):
    """A rendezvous has ended, well or not: this node has a place among the others, or none."""

    at: float
    wall: float
    took_s: float
    group_rank: int | None
    group_world_size: int | None
    error: str = ""
    """A traceback, if it did not end well."""
    restart_count: int = 0


class RanksAssigned(LifecycleEvent):
    """The workers have their ranks, or could not be given any."""

    at: float
    wall: float
    took_s: float
    group_rank: int | None
    group_world_size: int | None
    error: str = ""
    restart_count: int = 0


class GenerationStarted(LifecycleEvent):
    """All workers of a generation are started."""

    at: float
    wall: float
    took_s: float
    generation: int
    restart_count: int
    group_rank: int | None
    group_world_size: int | None
    workers: tuple[WorkerInfo, ...]


class WorkersObserved(LifecycleEvent):
    """The agent knows how its workers are: when they changed, and now and then besides."""

    at: float
    state: str
    """A `WorkerState` in lower case."""
    remaining_restarts: int


class WorkerEnded(LifecycleEvent):
    """A worker has ended, by itself or because the others are being stopped."""

    at: float
    wall: float
    generation: int
    worker: WorkerInfo
    failed: bool


class FirstHeartbeat(LifecycleEvent):
    """A worker that tells its progress has made its first call: it runs the person's own code."""

    at: float
    generation: int
    worker: WorkerInfo


class GenerationStopping(LifecycleEvent):
    """What is left of a generation is being stopped."""

    at: float
    generation: int
    reason: str
    """A `core.supervision.Reason` in words."""


class GenerationStopped(LifecycleEvent):
    """Nothing of a generation is left."""

    at: float
    generation: int


class WorkerOutcome(Value):
    """How a worker of the last generation ended: `succeeded`, `failed` or `terminated`."""

    worker: WorkerInfo
    state: str
    exit_code: int | None = None
    error: str = ""
    """What it left in its error file, as JSON, or nothing."""


class RunEnded(LifecycleEvent):
    """A run has ended; `error` is a traceback if the agent itself could not go on."""

    at: float
    wall: float
    took_s: float
    state: str
    """`succeeded` or `failed`, of the workers; nothing if the agent raised."""
    restart_count: int
    remaining_restarts: int
    max_restarts: int
    group_rank: int | None
    group_world_size: int | None
    ends: tuple[WorkerOutcome, ...] = ()
    error: str = ""


class WatchdogEvent(LifecycleEvent):
    """Something about timers: `watchdog started`, `timer expired`, `kill worker process`, ..."""

    at: float
    wall: float
    what: str
    pid: int = 0
    scope: str = ""
    expires: float = 0.0
    signum: int = 0


class CustomEvent(LifecycleEvent):
    """An agent of somebody's own has an event to record, besides those that are made of moments."""

    event: object


class Observers:
    """All who look on; tells each, and minds none."""

    recorded = False
    """Whether a launcher keeps the records of events and metrics, so that the agent need not."""

    def __init__(self) -> None:
        self._each: list[Observer] = []
        self._faults: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._each)

    def add(self, observer: Observer) -> None:
        """Tell one more from now on."""
        self._each.append(observer)

    def tell(self, moment: LifecycleEvent) -> None:
        """Tell everybody."""
        for observer in [*self._each]:
            try:
                observer(moment)
            except Exception as problem:  # noqa: BLE001 (whoever looks on may be anybody)
                self._blame(observer, problem)

    def _blame(self, observer: Observer, problem: Exception) -> None:
        number = id(observer)
        faults = self._faults[number] = self._faults.get(number, 0) + 1
        name = getattr(observer, "name", None) or type(observer).__name__
        if faults == 1:
            console.warning(f"{name} failed: {console.describe(problem)}")
        if faults >= FAULTS_MAX:
            console.warning(f"{name} failed {faults} times, and is told nothing more")
            self._each.remove(observer)


def now() -> tuple[float, float]:
    """Return the time, by both clocks."""
    return time.monotonic(), time.time()


class LifecycleReporter:
    """Tells the observers of one agent."""

    def __init__(self, agent: SimpleElasticAgent) -> None:
        self.observers = Observers()
        self._agent = agent
        self._own: StandaloneRecords | None = None
        self._began_at = 0.0
        self._since = 0.0  # When the node began to look for its place among the others.
        self._has_met = False  # Whether that has come to an end, good or bad.
        self._entered = 0

    # A context around all that is told of one run; around another one it adds nothing.

    def __enter__(self) -> None:
        """Let an agent that no launcher looks on at keep records; `UsageError` if it cannot."""
        if not self._entered and not self.observers.recorded:
            self._begin_own_records()
        self._entered += 1

    def __exit__(self, *problem: object) -> None:
        """Wait until whoever wants the records has them."""
        self._entered -= 1
        if not self._entered and self._own is not None:
            self._own.end()

    def _begin_own_records(self) -> None:
        from holdfast.observe.standalone import StandaloneRecords, records_wanted

        destination = self._agent.get_worker_group().spec.event_log_handler
        if self._own is None:
            if not records_wanted(destination):
                return
            logs_specs = getattr(self._agent, "_logs_specs", None)
            self._own = StandaloneRecords(destination, lambda: getattr(logs_specs, "run_dir", None))
            self.observers.add(self._own)
        self._own.begin()

    # What is told.

    def tell(self, moment: LifecycleEvent) -> None:
        """Tell everybody."""
        self.observers.tell(moment)

    def began(self) -> None:
        """A run begins."""
        at, wall = now()
        self._began_at = self._since = at
        self._has_met = False
        if self.observers:
            self.tell(self.beginning(at, wall))

    def beginning(self, at: float = 0.0, wall: float = 0.0) -> RunStarted:
        """Return what this run is, as a moment."""
        spec = self._agent.get_worker_group().spec
        handler = spec.rdzv_handler
        return RunStarted(
            at,
            wall,
            handler.get_run_id(),
            spec.role,
            handler.get_backend(),
            spec.get_entrypoint_name(),
            spec.local_world_size,
            spec.max_restarts,
            _program_name(spec),
        )

    def place(self, error: BaseException | None = None) -> RendezvousEnded:
        """Return the place of this node among the others, as a moment."""
        at, wall = now()
        rank, size = self._place()
        restarts = self._agent.machine.restart_count
        took_s = at - self._since
        return RendezvousEnded(at, wall, took_s, rank, size, _traceback(error), restarts)

    def met(self, error: BaseException | None = None) -> None:
        """The node has its place among the others, or could not get one."""
        self._has_met = True
        if self.observers:
            self.tell(self.place(error))

    def ranked(self, took_s: float = 0.0, error: BaseException | None = None) -> None:
        """The workers have their ranks."""
        if self.observers:
            at, wall = now()
            rank, size = self._place()
            restarts = self._agent.machine.restart_count
            self.tell(RanksAssigned(at, wall, took_s, rank, size, _traceback(error), restarts))

    def started(self, since: float) -> None:
        """All workers of a generation are started."""
        if not self.observers:
            return
        at, wall = now()
        rank, size = self._place()
        machine = self._agent.machine
        workers = tuple(_worker_info(one) for one in self._agent.get_worker_group().workers)
        self.tell(
            GenerationStarted(
                at, wall, at - since, machine.generation, machine.restart_count, rank, size, workers
            )
        )
        self.looked("healthy")

    def looked(self, state: str) -> None:
        """It is known how the workers are."""
        if self.observers:
            left = self._agent.machine.budget.left
            self.tell(WorkersObserved(now()[0], state, left))

    def exited(self, local_rank: int, *, failed: bool) -> None:
        """A worker has ended by itself."""
        if self.observers:
            at, wall = now()
            worker = _worker_info(self._agent.get_worker_group().workers[local_rank])
            self.tell(WorkerEnded(at, wall, self._agent.machine.generation, worker, failed))

    def spoke(self, local_rank: int) -> None:
        """A worker has made its first call of `holdfast.worker`."""
        if self.observers:
            worker = _worker_info(self._agent.get_worker_group().workers[local_rank])
            generation = self._agent.machine.generation
            self.tell(FirstHeartbeat(now()[0], generation, worker))

    def stopping(self, generation: int, reason: str) -> None:
        """What is left of a generation is being stopped."""
        if self.observers:
            self.tell(GenerationStopping(now()[0], generation, reason))

    def stopped(self, generation: int) -> None:
        """Nothing of a generation is left."""
        self._since = now()[0]
        self._has_met = False
        if self.observers:
            self.tell(GenerationStopped(self._since, generation))

    def ended(self, result: RunResult) -> RunResult:
        """The run has ended with this result."""
        if self.observers:
            self._tell_end(result, None)
        return result

    def failed(self, error: BaseException) -> None:
        """The run has ended with an error of the agent's."""
        if not self.observers:
            return
        from holdfast.rendezvous.errors import RendezvousError

        if isinstance(error, RendezvousError) and not self._has_met:
            self.met(error)
        self._tell_end(None, error)

    def _tell_end(self, result: RunResult | None, error: BaseException | None) -> None:
        at, wall = now()
        rank, size = self._place()
        machine = self._agent.machine
        spec = self._agent.get_worker_group().spec
        self.tell(
            RunEnded(
                at,
                wall,
                at - self._began_at,
                result.state.name.lower() if result is not None else "",
                machine.restart_count,
                machine.budget.left,
                spec.max_restarts,
                rank,
                size,
                self._ends(result) if result is not None else (),
                _traceback(error),
            )
        )

    def _place(self) -> tuple[int | None, int | None]:
        group = self._agent.get_worker_group()
        return group.group_rank, group.group_world_size

    def _ends(self, result: RunResult) -> tuple[WorkerOutcome, ...]:
        ends = []
        for worker in self._agent.get_worker_group().workers:
            failure = result.failures.get(worker.global_rank)
            if failure is not None and not failure.consequence:
                error = _json(failure.error_file_data)
                ends.append(WorkerOutcome(_worker_info(worker), "failed", failure.exitcode, error))
            elif result.is_failed():
                code = failure.exitcode if failure is not None else None
                ends.append(WorkerOutcome(_worker_info(worker), "terminated", code))
            else:
                ends.append(WorkerOutcome(_worker_info(worker), "succeeded", 0))
        return tuple(ends)


def _program_name(spec: WorkerSpec) -> str:
    """Return the name of the script or module that an interpreter runs, or else the entry point's.

    Of a program that is given as text there is no name, and nobody wants it as one.
    """
    name = spec.get_entrypoint_name()
    if spec.entrypoint != sys.executable and name != "run_script_path":  # What --run-path calls.
        return name
    for word in map(str, spec.args):
        if word == "-c":
            break
        if word and not word.startswith("-"):
            return os.path.basename(word)
    return name


def _worker_info(worker: Worker) -> WorkerInfo:
    pid = worker.id if isinstance(worker.id, int) else 0
    return WorkerInfo(
        worker.local_rank, worker.global_rank, worker.role_rank, worker.role_world_size, pid
    )


def _json(data: object) -> str:
    import json

    return json.dumps(data, default=str)


def _traceback(error: BaseException | None) -> str:
    if error is None:
        return ""
    import traceback

    return "".join(traceback.format_exception(error))
