"""One stop of a worker group: signal, wait, kill, clean up leftovers, or give up.

::

    SIGNALLED ──all exited, some died of the signal──► LEFTOVERS ──gone──► ENDED
       │ │                                                │                 ▲
       │ └──all exited in other ways────────┐             │ deadline        │ gone, or given up
       │ deadline, or KillRequested         ▼             ▼                 │
       └──► KILLING ──all exited──► SWEEPING ───────────────────────────────┘

Only a worker's leader, the process that was started, gets the signal: it knows its children and the order
in which to stop them. If a leader *handles* the signal, it is responsible for its children; processes
that it leaves behind are killed once all leaders have exited. If a leader *dies* of the signal, as a shell
around a trainer does, it has not forwarded the signal; so the processes that it leaves behind get the
signal too, and the rest of the grace period. A process that survives SIGKILL (in uninterruptible sleep) is
given up after `reap_s` and reported. Leaders that still run after `notice_s` are reported once.

A key identifies a worker.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from holdfast.core.machine import Effect, Event, InvalidEvent, Story, Tick
from holdfast.defaults import REAP_S

if TYPE_CHECKING:
    from collections.abc import Iterable

SIGKILL = 9
# How long the killed leftovers may take to exit after a leader was given up.
LEFTOVERS_EXIT_S = 1.0


class StopPhase(Enum):
    """The phase of a stop."""

    SIGNALLED = "signalled"
    KILLING = "killing"
    LEFTOVERS = "leftovers"
    SWEEPING = "sweeping"
    ENDED = "ended"


# Events.


class StopRequested(Event):
    """The stop was requested; always the first event."""


class LeaderExited(Event):
    """A leader exited; `died_of` is the signal that killed it, or 0."""

    key: int
    died_of: int = 0


class LeftoversGone(Event):
    """The workers that exited have no child processes left."""


class KillRequested(Event):
    """The caller wants to kill the workers immediately."""


class KeeperLost(Event):
    """The keeper exited, and the workers with it."""


# Effects.


class SignalLeader(Effect):
    """Send the signal to this worker's leader."""

    key: int
    signum: int


class KillTree(Effect):
    """Send SIGKILL to this worker and all its descendants."""

    key: int


class SignalLeftovers(Effect):
    """Signal the processes that exited workers left behind; `LeftoversGone` once there are none."""

    signum: int


class ReportSlow(Effect):
    """Inform the user about workers that take long to exit, and when they will be killed."""

    keys: tuple[int, ...]
    rest_s: float


class KillLeftovers(Effect):
    """Kill the processes that exited workers left behind; `LeftoversGone` once there are none."""


class Stop:
    """One stop, from the first signal until nothing is left."""

    def __init__(
        self,
        running: Iterable[int],
        *,
        signum: int,
        grace_s: float,
        reap_s: float = REAP_S,
        unresponsive: Iterable[int] = (),
        notice_s: float | None = None,
    ) -> None:
        self.phase = StopPhase.SIGNALLED
        self.running = set(running)
        self.killed: set[int] = set()
        self.given_up: set[int] = set()
        self.leftovers_given_up = False
        """Whether a process that exited workers left behind cannot be killed."""
        self.grace_expired = False
        """Whether workers were killed because the grace period expired, not on request."""
        self.story = Story("stop")
        # Leaders that cannot react to a signal: they are killed immediately.
        self._unresponsive = set(unresponsive)
        self._signum = signum
        self._grace_s = grace_s
        self._reap_s = reap_s
        self._deadline: float | None = None
        self._notice_s = notice_s
        self._notice_at: float | None = None
        self._signal_was_effective = False

    @property
    def ended(self) -> bool:
        """Whether no process is left, or the remaining ones were given up."""
        return self.phase is StopPhase.ENDED

    def handle(self, now: float, event: Event, cause: str = "") -> list[Effect]:
        phase = self.phase
        match event:
            case Tick():
                effects = self._tick(now)
            case StopRequested():
                effects = self._begin(now)
            case LeaderExited(key, died_of):
                effects = self._leader_exited(now, key, died_of)
            case LeftoversGone():
                effects = []
                if phase in (StopPhase.LEFTOVERS, StopPhase.SWEEPING):
                    self.phase = StopPhase.ENDED
            case KillRequested():
                effects = self._kill_now(now)
            case KeeperLost():
                effects = []
                self.running.clear()
                self.leftovers_given_up = False
                self.phase = StopPhase.ENDED
            case _:
                raise InvalidEvent(f"{event!r} is not an event of a stop")
        if effects or self.phase is not phase or not isinstance(event, Tick):
            self.story.record(now, phase, event, effects, cause)
        return effects

    def next_deadline(self) -> float | None:
        if self.ended:
            return None
        if self._notice_at is not None and self.phase is StopPhase.SIGNALLED:
            return self._notice_at
        return self._deadline

    def has_sent(self, signum: int, key: int) -> bool:
        """Whether this stop has sent this signal to this leader."""
        return key in self.killed if signum == SIGKILL else signum == self._signum

    def _begin(self, now: float) -> list[Effect]:
        self._deadline = now + self._grace_s
        if not self.running:
            return self._sweep(now)
        if self._signum == SIGKILL or self._grace_s <= 0 or self.running <= self._unresponsive:
            return self._kill(now)
        if self._notice_s is not None and self._notice_s < self._grace_s:
            self._notice_at = now + self._notice_s
        self.killed = self.running & self._unresponsive
        return [
            KillTree(key) if key in self._unresponsive else SignalLeader(key, self._signum)
            for key in sorted(self.running)
        ]

    def _leader_exited(self, now: float, key: int, died_of: int) -> list[Effect]:
        self.running.discard(key)
        self.given_up.discard(key)  # It exited after all.
        if self.phase is StopPhase.SIGNALLED and died_of == self._signum:
            self._signal_was_effective = True
        if self.phase not in (StopPhase.SIGNALLED, StopPhase.KILLING):
            return []
        if self.running:
            only_unresponsive = (
                self.phase is StopPhase.SIGNALLED and self.running <= self._unresponsive
            )
            return self._kill(now) if only_unresponsive else []
        if self.phase is StopPhase.SIGNALLED and self._signal_was_effective:
            self.phase = StopPhase.LEFTOVERS
            return [SignalLeftovers(self._signum)]
        return self._sweep(now)

    def _kill_now(self, now: float) -> list[Effect]:
        if self.phase is StopPhase.SIGNALLED:
            return self._kill(now)
        if self.phase is StopPhase.LEFTOVERS:
            return self._sweep(now)
        return []

    def _tick(self, now: float) -> list[Effect]:
        if self._deadline is not None and now < self._deadline:
            return self._report_slow(now, self._deadline)
        if self._deadline is None or self.ended:
            return []
        if self.phase in (StopPhase.SIGNALLED, StopPhase.LEFTOVERS):
            self.grace_expired = True
            return self._kill_now(now)
        if self.phase is StopPhase.KILLING:
            # A leader cannot be killed. Kill the leftovers of the others anyway.
            self.given_up |= self.running
            effects = self._sweep(now)
            self._deadline = now + min(LEFTOVERS_EXIT_S, self._reap_s)
            return effects
        self.leftovers_given_up = not self.running  # Otherwise a leader remains.
        self.phase = StopPhase.ENDED
        return []

    def _report_slow(self, now: float, deadline: float) -> list[Effect]:
        is_due = self._notice_at is not None and now >= self._notice_at
        slow = self.running - self._unresponsive
        if not is_due or not slow or self.phase is not StopPhase.SIGNALLED:
            return []
        self._notice_at = None
        return [ReportSlow(tuple(sorted(slow)), deadline - now)]

    def _kill(self, now: float) -> list[Effect]:
        self.phase = StopPhase.KILLING
        self._deadline = now + self._reap_s
        self.killed |= self.running
        if not self.running:
            return self._sweep(now)
        return [KillTree(key) for key in sorted(self.running)]

    def _sweep(self, now: float) -> list[Effect]:
        self.phase = StopPhase.SWEEPING
        self._deadline = now + self._reap_s
        return [KillLeftovers()]
