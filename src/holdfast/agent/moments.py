"""What an agent tells those who look on: the moments of a run, as small values.

Events, metrics and health checks are made of these, and of nothing else: whoever wants to know how
a run goes is an `Onlooker`, a callable that gets every moment as it comes. It looks on and has no
say. One that raises is named once and from then on left alone, so that looking on never hurts.

Times are by this host's monotonic clock; `wall` is the time of day, for people.
"""

from __future__ import annotations

import time

from holdfast import messages
from holdfast.core.facts import Fact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS_MAX = 3
"""An onlooker that raised so often is told nothing more."""


class WorkerFact(Fact):
    """A worker, as it is known from outside."""

    local_rank: int
    global_rank: int
    role_rank: int
    role_world_size: int
    pid: int


class Moment(Fact):
    """What all moments have; a subclass says what happened."""


class Began(Moment):
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


class Met(Moment):
    """A rendezvous has ended, well or not: this node has a place among the others, or none."""

    at: float
    wall: float
    took_s: float
    group_rank: int | None
    group_world_size: int | None
    error: str = ""
    """A traceback, if it did not end well."""
    restart_count: int = 0


class Ranked(Moment):
    """The workers have their ranks, or could not be given any."""

    at: float
    wall: float
    took_s: float
    group_rank: int | None
    group_world_size: int | None
    error: str = ""
    restart_count: int = 0


class Started(Moment):
    """All workers of a generation are started."""

    at: float
    wall: float
    took_s: float
    generation: int
    restart_count: int
    group_rank: int | None
    group_world_size: int | None
    workers: tuple[WorkerFact, ...]


class Looked(Moment):
    """The agent knows how its workers are: when they changed, and now and then besides."""

    at: float
    state: str
    """A `WorkerState` in lower case."""
    remaining_restarts: int


class Exited(Moment):
    """A worker has ended, by itself or because the others are being stopped."""

    at: float
    wall: float
    generation: int
    worker: WorkerFact
    failed: bool


class Spoke(Moment):
    """A worker that tells its progress has made its first call: it runs the person's own code."""

    at: float
    generation: int
    worker: WorkerFact


class Stopping(Moment):
    """What is left of a generation is being stopped."""

    at: float
    generation: int
    reason: str
    """A `core.supervision.Reason` in words."""


class Stopped(Moment):
    """Nothing of a generation is left."""

    at: float
    generation: int


class WorkerEnd(Fact):
    """How a worker of the last generation ended: `succeeded`, `failed` or `terminated`."""

    worker: WorkerFact
    state: str
    exit_code: int | None = None
    error: str = ""
    """What it left in its error file, as JSON, or nothing."""


class Ended(Moment):
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
    ends: tuple[WorkerEnd, ...] = ()
    error: str = ""


class Watchdog(Moment):
    """Something about timers: `watchdog started`, `timer expired`, `kill worker process`, ..."""

    at: float
    wall: float
    what: str
    pid: int = 0
    scope: str = ""
    expires: float = 0.0
    signum: int = 0


class Recorded(Moment):
    """An agent of somebody's own has an event to record, besides those that are made of moments."""

    event: object


if TYPE_CHECKING:
    Onlooker = Callable[["Moment"], object]


class Onlookers:
    """All who look on; tells each, and minds none."""

    recorded = False
    """Whether a launcher keeps the records of events and metrics, so that the agent need not."""

    def __init__(self) -> None:
        self._each: list[Onlooker] = []
        self._faults: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._each)

    def add(self, onlooker: Onlooker) -> None:
        """Tell one more from now on."""
        self._each.append(onlooker)

    def tell(self, moment: Moment) -> None:
        """Tell everybody."""
        for onlooker in [*self._each]:
            try:
                onlooker(moment)
            except Exception as problem:  # noqa: BLE001 (whoever looks on may be anybody)
                self._blame(onlooker, problem)

    def _blame(self, onlooker: Onlooker, problem: Exception) -> None:
        number = id(onlooker)
        faults = self._faults[number] = self._faults.get(number, 0) + 1
        name = getattr(onlooker, "name", None) or type(onlooker).__name__
        if faults == 1:
            messages.warning(f"{name} failed: {messages.of(problem)}")
        if faults >= FAULTS_MAX:
            messages.warning(f"{name} failed {faults} times, and is told nothing more")
            self._each.remove(onlooker)


def now() -> tuple[float, float]:
    """Return the time, by both clocks."""
    return time.monotonic(), time.time()
