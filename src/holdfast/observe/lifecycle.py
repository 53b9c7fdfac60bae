"""Lifecycle events: what an agent reports about a run, and the fan-out to observers.

Events, metrics and health checks are made of these and of nothing else. An observer is a callable
that receives every lifecycle event as it happens, in the agent's thread, and must not block. It has
no say in the run: a failure of it is contained (`safe_handler`).

`at` is this host's monotonic clock; `wall` is the time of day, for people.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast.core.values import Value
from holdfast.observe.safe_handler import Faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.supervision import StopReason

    Observer = Callable[["LifecycleEvent"], object]


FAILURES_MAX = 64
"""How many failures of one node and generation are described; the others follow from them."""
TEXT_CHARS_MAX = 16_000
"""How much of a traceback, a message or the end of stderr is kept of each; of all but the first
failure a quarter of it."""


class WorkerInfo(Value):
    """A worker's ranks and its process."""

    local_rank: int
    global_rank: int
    role_rank: int
    role_world_size: int
    pid: int


class LifecycleEvent(Value):
    """Base of the lifecycle events; a subclass says what happened."""


class RunStarted(LifecycleEvent):
    """A run has started; nothing else has happened yet."""

    at: float
    wall: float
    run_id: str
    role: str
    backend: str
    entry_point: str
    local_world_size: int
    max_restarts: int
    program: str = ""
    """The script's name rather than its interpreter's."""
    node: str = ""
    """The name of this node in the job's stories and messages."""


class RendezvousEnded(LifecycleEvent):
    """A rendezvous has ended: this node has a rank among the nodes, or `error` says why not."""

    at: float
    wall: float
    took_s: float
    group_rank: int | None
    group_world_size: int | None
    error: str = ""
    """A traceback."""
    restart_count: int = 0


class StandbyChanged(LifecycleEvent):
    """The node has become a standby, or is none any more."""

    at: float
    is_standby: bool


class RanksAssigned(LifecycleEvent):
    """The workers have their ranks."""

    at: float
    wall: float
    took_s: float
    group_rank: int | None
    group_world_size: int | None
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
    world_size: int = 0
    fence: int = 0
    """The same on all nodes of a generation; 0 where nobody counts it."""
    why: str = ""
    """Why it was started, as whoever decides for all nodes put it; else nothing."""
    log_dir: str = ""
    """Where the logs and error files of its workers are, if anywhere."""


class WorkersObserved(LifecycleEvent):
    """The state of the workers is known: whenever it changed, and now and then besides."""

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
    stopped: bool = False
    """Whether it ended after it was asked to."""


class FirstHeartbeat(LifecycleEvent):
    """A worker has made its first call of `holdfast.worker`: it runs the user's own code."""

    at: float
    generation: int
    worker: WorkerInfo


class ProgressSampled(LifecycleEvent):
    """How far workers are that report their progress: those that went on since the last sample."""

    at: float
    generation: int
    steps: tuple[tuple[int, int, float], ...]
    """Each worker's global rank, the step it reported last, and when, by the monotonic clock."""


class GenerationStopping(LifecycleEvent):
    """What is left of a generation is being stopped."""

    at: float
    generation: int
    reason: StopReason
    detail: str = ""
    """What was found wrong with the workers, if it was not that one of them ended."""


class WorkerFailure(Value):
    """A worker that failed, and what is known of why; texts are cut, and may be empty."""

    global_rank: int
    local_rank: int
    pid: int
    exit_code: int
    wall: float
    """When it had happened at the latest."""
    consequence: bool
    """Whether it came only after the stop of the others began."""
    ending: str
    detail: str
    message: str
    traceback: str
    stderr_tail: str


class GenerationStopped(LifecycleEvent):
    """No worker of a generation is left."""

    at: float
    generation: int


class WorkersFailed(LifecycleEvent):
    """Workers of a generation that is over had failed: what is known of why.

    It comes when nothing is held up by finding that out: once the next generation is started, or the
    run is over, or some time has passed.
    """

    at: float
    generation: int
    failures: tuple[WorkerFailure, ...]
    """On this node, in the order in which they are to blame; no more than `FAILURES_MAX`."""


class WorkerOutcome(Value):
    """How a worker of the last generation ended: `succeeded`, `failed` or `terminated`."""

    worker: WorkerInfo
    state: str
    exit_code: int | None = None
    error: str = ""
    """The contents of its error file as JSON, or nothing."""


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
    outcomes: tuple[WorkerOutcome, ...] = ()
    error: str = ""
    workers_recorded: bool = False
    """Whether a hook of the agent has recorded how the workers ended."""
    cut_short: str = ""
    """If the agent raised: `stopped` by a signal or by somebody, a `standby` that nobody needed, or an `error`."""


class WatchdogEvent(LifecycleEvent):
    """A step of the timer server: `watchdog started`, `timer expired`, `kill worker process`, …"""

    at: float
    wall: float
    what: str
    pid: int = 0
    scope: str = ""
    expires: float = 0.0
    signum: int = 0


class Requested(LifecycleEvent):
    """Somebody asked for something, and it is done: `what` tells what, who and why."""

    at: float
    wall: float
    request: str
    what: str


class CustomEvent(LifecycleEvent):
    """An `Event` that a subclass of an agent records besides those made of lifecycle events."""

    event: object


class Observers:
    """Fans lifecycle events out to observers; an observer's failure is contained."""

    recorded = False
    """Whether a launcher keeps the records of events and metrics, so that the agent need not."""
    sampled = False
    """Whether an observer wants `ProgressSampled` while workers run, not only when they have stopped."""

    def __init__(self) -> None:
        self._each: list[Observer] = []
        self._faults: dict[int, Faults] = {}  # By id, of those that have failed.

    def __bool__(self) -> bool:
        return bool(self._each)

    def add(self, observer: Observer) -> None:
        """Send lifecycle events to one more; `observer.name`, if any, is its name in messages."""
        self._each.append(observer)

    def remove(self, observer: Observer) -> None:
        """Send it no more, if it was sent any."""
        self._each = [one for one in self._each if one is not observer]

    def notify(self, event: LifecycleEvent) -> None:
        """Send an event to all observers, in the order in which they were added."""
        for observer in [*self._each]:
            try:
                observer(event)
            except Exception as problem:  # noqa: BLE001 (an observer may raise anything)
                self._failed(observer, problem)
            else:
                if self._faults and id(observer) in self._faults:
                    self._faults[id(observer)].reset()

    def _failed(self, observer: Observer, problem: Exception) -> None:
        faults = self._faults.get(id(observer))
        if faults is None:
            name = getattr(observer, "name", None) or type(observer).__name__
            faults = self._faults[id(observer)] = Faults(name, "lifecycle event")
        faults.add(problem)
        if faults.is_dropped:
            self._each.remove(observer)


def now() -> tuple[float, float]:
    """Return the time by both clocks: monotonic, and of day."""
    return time.monotonic(), time.time()
