"""How a group of workers is brought down: ask, wait, kill, sweep up, or give up on it.

::

    ASKING ──all ended, some died of the signal──► LEFTOVERS ──gone──► ENDED
       │ │                                             │                 ▲
       │ └──all ended in other ways──────┐             │ deadline        │ gone, or given up
       │ deadline, or kill_now           ▼             ▼                 │
       └──► KILLING ──all ended──► SWEEPING ─────────────────────────────┘

Only a worker's leader is asked: it knows its children and in which order to end them. A leader
that *handled* the signal is trusted to have done so, and what it left is killed once all leaders
are gone. A leader that simply *died* of the signal (a shell around a trainer does) has told
nobody, so what it left is asked too and has the rest of the time. A process that does not die
even of SIGKILL (in uninterruptible sleep) is given up after `reap_s` and reported.

Pure: time is an argument, and the caller performs the effects in order. Keys name workers.
"""

from __future__ import annotations

from enum import Enum

from holdfast.core.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

SIGKILL = 9
# How long a killed process may take to go. Taking apart a process with much memory or many GPUs
# takes the kernel seconds; longer than this, only uninterruptible sleep explains.
REAP_S = 15.0
# How long the rest may take once something was given up: it has been dying all that time.
REST_S = 1.0


class StopPhase(Enum):
    """Where a stop has got to."""

    ASKING = "asking"
    KILLING = "killing"
    LEFTOVERS = "leftovers"
    SWEEPING = "sweeping"
    ENDED = "ended"


class SignalLeader(Value):
    """Effect: send the signal to this worker's leader."""

    key: int
    signum: int


class KillTree(Value):
    """Effect: SIGKILL this worker and everything below it."""

    key: int


class AskLeftovers(Value):
    """Effect: signal all that ended workers left; `cleared` when none of it is there."""

    signum: int


class SweepLeftovers(Value):
    """Effect: SIGKILL all that ended workers left; `cleared` when none of it is there."""


Effect = SignalLeader | KillTree | AskLeftovers | SweepLeftovers


class Stop:
    """One stop, from the first signal until nothing is left.

    Call `begin` once; then tell it of every ended leader, of `cleared`, and `tick` it at
    `next_deadline`. After each call perform the returned effects.
    """

    def __init__(
        self,
        running: Iterable[int],
        *,
        signum: int,
        grace_s: float,
        reap_s: float = REAP_S,
        hopeless: Iterable[int] = (),
    ) -> None:
        self.phase = StopPhase.ASKING
        self.running = set(running)
        # Those that cannot answer a signal: they are killed at once, and not waited for.
        self._hopeless = set(hopeless)
        self.killed: set[int] = set()
        self.given_up: set[int] = set()
        # Whether something that ended workers left does not die either.
        self.leftovers_given_up = False
        self._signum = signum
        self._grace_s = grace_s
        self._reap_s = reap_s
        self._deadline: float | None = None
        self._some_died_untold = False
        # Whether time ran out, rather than that someone wanted it over at once.
        self.grace_expired = False

    @property
    def ended(self) -> bool:
        """Whether nothing is left, or what is left was given up."""
        return self.phase is StopPhase.ENDED

    def next_deadline(self) -> float | None:
        """Return when `tick` is due if nothing else happens before."""
        return None if self.ended else self._deadline

    def has_sent(self, signum: int, key: int) -> bool:
        """Whether the stop itself has sent this signal to this leader."""
        return key in self.killed if signum == SIGKILL else signum == self._signum

    def begin(self, now: float) -> list[Effect]:
        """Ask every running leader to end."""
        self._deadline = now + self._grace_s
        if not self.running:
            return self._sweep(now)
        if self._signum == SIGKILL or self._grace_s <= 0 or self.running <= self._hopeless:
            return self._kill(now)
        self.killed = self.running & self._hopeless
        return [
            KillTree(key) if key in self._hopeless else SignalLeader(key, self._signum)
            for key in sorted(self.running)
        ]

    def leader_ended(self, now: float, key: int, *, died_of: int = 0) -> list[Effect]:
        """Take in that a leader ended; `died_of` is the signal that ended it, if one did."""
        self.running.discard(key)
        self.given_up.discard(key)  # It did end, if late.
        if self.phase is StopPhase.ASKING and died_of == self._signum:
            self._some_died_untold = True
        if self.phase not in (StopPhase.ASKING, StopPhase.KILLING):
            return []
        if self.running:
            only_hopeless = self.phase is StopPhase.ASKING and self.running <= self._hopeless
            return self._kill(now) if only_hopeless else []
        if self.phase is StopPhase.ASKING and self._some_died_untold:
            self.phase = StopPhase.LEFTOVERS
            return [AskLeftovers(self._signum)]
        return self._sweep(now)

    def cleared(self) -> None:
        """Take in that nothing is left below the ended workers."""
        if self.phase in (StopPhase.LEFTOVERS, StopPhase.SWEEPING):
            self.phase = StopPhase.ENDED

    def abandon(self) -> None:
        """Take in that what could act on the workers is gone, and they with it."""
        self.running.clear()
        self.leftovers_given_up = False
        self.phase = StopPhase.ENDED

    def kill_now(self, now: float) -> list[Effect]:
        """End the patience: kill what still runs."""
        if self.phase is StopPhase.ASKING:
            return self._kill(now)
        if self.phase is StopPhase.LEFTOVERS:
            return self._sweep(now)
        return []

    def tick(self, now: float) -> list[Effect]:
        """Take in that time passed."""
        if self._deadline is None or now < self._deadline or self.ended:
            return []
        if self.phase in (StopPhase.ASKING, StopPhase.LEFTOVERS):
            self.grace_expired = True
            return self.kill_now(now)
        if self.phase is StopPhase.KILLING:
            # Some leader does not die; whatever else there is must go all the same.
            self.given_up |= self.running
            effects = self._sweep(now)
            self._deadline = now + min(REST_S, self._reap_s)
            return effects
        self.leftovers_given_up = not self.running  # Else it is a leader that is not gone.
        self.phase = StopPhase.ENDED
        return []

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
        return [SweepLeftovers()]
