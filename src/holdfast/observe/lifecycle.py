"""Lifecycle events, which an agent reports about a run, and their fan-out to observers.

Events, metrics and health checks derive only from lifecycle events. An observer is a callable that receives every
lifecycle event as it happens, in the agent's thread, and must not block. It cannot affect the run: its exceptions
are caught (`safe_handler`).

`at` is this host's monotonic clock; `wall` is the time of day, for display.
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
"""How many failures of one node and generation are described; the rest are consequences."""
TEXT_CHARS_MAX = 16_000
"""The limit for each traceback, message and end of stderr of the first failure; for the others, a quarter of it."""


class WorkerInfo(Value):
    """A worker's ranks and its process."""

    local_rank: int
    global_rank: int
    role_rank: int
    role_world_size: int
    pid: int


class LifecycleEvent(Value):
    """The base of the lifecycle events."""


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
    """A rendezvous has ended: this node has a rank among the nodes, or `error` is the reason."""

    at: float
    wall: float
    took_s: float
    group_rank: int | None
    group_world_size: int | None
    error: str = ""
    """A traceback."""
    restart_count: int = 0


class StandbyChanged(LifecycleEvent):
    """The node has become a standby, or stopped being one."""

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
    """The fence of the generation, the same on all its nodes; 0 if the nodes have no common fence."""
    why: str = ""
    """Why the coordinator started it; empty without a coordinator."""
    log_dir: str = ""
    """The folder of its workers' logs and error files, if any."""
    members: tuple[str, ...] = ()
    """The nodes of its round by rank, if this node knows them."""


class WorkersObserved(LifecycleEvent):
    """The state of the workers, reported on every change and periodically."""

    at: float
    state: str
    """A `WorkerState` in lower case."""
    remaining_restarts: int


class WorkerEnded(LifecycleEvent):
    """A worker has exited, by itself or because the workers are being stopped."""

    at: float
    wall: float
    generation: int
    worker: WorkerInfo
    failed: bool
    stopped: bool = False
    """Whether it exited after its stop was requested."""


class FirstHeartbeat(LifecycleEvent):
    """A worker has made its first call of `holdfast.worker`: it runs the user's own code."""

    at: float
    generation: int
    worker: WorkerInfo


class ProgressSampled(LifecycleEvent):
    """The progress of workers that report it and advanced since the last sample."""

    at: float
    generation: int
    steps: tuple[tuple[int, int, float], ...]
    """Each worker's global rank, the step it reported last, and when, by the monotonic clock."""


class GenerationStopping(LifecycleEvent):
    """The remaining workers of a generation are being stopped."""

    at: float
    generation: int
    reason: StopReason
    detail: str = ""
    """The problem with the workers, unless a worker exited."""


class WorkerFailure(Value):
    """A failed worker and the known reasons; texts are shortened, and may be empty."""

    global_rank: int
    local_rank: int
    pid: int
    exit_code: int
    wall: float
    """The latest time at which it can have happened."""
    consequence: bool
    """Whether it happened after the stop of the other workers began."""
    ending: str
    detail: str
    message: str
    traceback: str
    stderr_tail: str


class GenerationStopped(LifecycleEvent):
    """All workers of a generation have exited."""

    at: float
    generation: int


class WorkersFailed(LifecycleEvent):
    """The known reasons why workers of an ended generation failed.

    The agent collects them when that delays nothing: once the next generation has started, the run has ended, or
    some time has passed.
    """

    at: float
    generation: int
    failures: tuple[WorkerFailure, ...]
    """The failures on this node, the most likely cause first; at most `FAILURES_MAX`."""


class WorkerOutcome(Value):
    """The outcome of a worker of the last generation: `succeeded`, `failed` or `terminated`."""

    worker: WorkerInfo
    state: str
    exit_code: int | None = None
    error: str = ""
    """The contents of its error file as JSON, or nothing."""


class RunEnded(LifecycleEvent):
    """A run has ended; `error` is a traceback if the agent itself failed."""

    at: float
    wall: float
    took_s: float
    state: str
    """The outcome of the workers, `succeeded` or `failed`; empty if the agent raised."""
    restart_count: int
    remaining_restarts: int
    max_restarts: int
    group_rank: int | None
    group_world_size: int | None
    outcomes: tuple[WorkerOutcome, ...] = ()
    error: str = ""
    workers_recorded: bool = False
    """Whether a hook of the agent has recorded the outcome of the workers."""
    cut_short: str = ""
    """Why the agent raised: `left` (a signal), `stopped` (an operator), `standby` (never needed) or `error`."""


class WatchdogEvent(LifecycleEvent):
    """A step of the timer server: `watchdog started`, `timer expired`, `kill worker process`, …"""

    at: float
    wall: float
    what: str
    pid: int = 0
    scope: str = ""
    expires: float = 0.0
    signum: int = 0


class RequestCarriedOut(LifecycleEvent):
    """An operator's request was carried out: `what` contains the request, the operator and the reason."""

    at: float
    wall: float
    request: str
    what: str


class ProtectionChanged(LifecycleEvent):
    """With `--ha`: the job does not survive the loss of a machine any more, or does so again."""

    at: float
    wall: float
    missing: str
    """The listed machines that are not members of the cluster; empty if the job survives a loss."""


def protection_text(missing: str) -> str:
    """Return whether a job survives the loss of a machine, and if not, which machines are missing."""
    if not missing:
        return "the job is protected: it survives the loss of any machine"
    verb = "are not members" if ", " in missing else "is not a member"
    return (
        f"the job is not protected: {missing} {verb} of the cluster, so the loss of another listed machine may "
        "end the job"
    )


class CustomEvent(LifecycleEvent):
    """An `Event` that a subclass of an agent records in addition to those derived from lifecycle events."""

    event: object


class Observers:
    """Sends lifecycle events to observers, and catches their exceptions."""

    recorded = False
    """Whether a launcher records events and metrics; otherwise the agent does."""
    sampled = False
    """Whether an observer needs `ProgressSampled` while workers run, not only after they stopped."""

    def __init__(self) -> None:
        self._each: list[Observer] = []
        self._faults: dict[int, Faults] = {}  # By the observer's id, if it has failed.

    def __bool__(self) -> bool:
        return bool(self._each)

    def add(self, observer: Observer) -> None:
        """Add an observer; `observer.name`, if any, is its name in messages."""
        self._each.append(observer)

    def remove(self, observer: Observer) -> None:
        """Remove an observer, if it was added."""
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
    """Return the monotonic time and the time of day."""
    return time.monotonic(), time.time()
