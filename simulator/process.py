"""A simulated process: it has its own clock, may be stopped for a while, and may exit at any time.

Events for a stopped process wait until it continues, like bytes in a socket. Then it handles the events
first and its timer last, like an event loop that was delayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from simulator.world import World

NEVER = float("inf")
TIMER_GRAIN_S = 1e-6  # No timer expires early, or twice at the same time.
CLOCK_RATE_SPREAD = 0.01
CLOCK_OFFSET_S = 100_000.0


class Process:
    """The base of simulated agents and coordinators."""

    def __init__(self, world: World, name: str, rng: Random) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.paused = False
        self.host_up = True
        """A host that is up refuses messages to a process that has exited; a host that is down does not
        respond."""
        self.rate = 1.0 + CLOCK_RATE_SPREAD * (2.0 * rng.random() - 1.0)
        self.offset = CLOCK_OFFSET_S * rng.random()
        self._backlog: list[tuple[Callable[[Any], None], Any]] = []
        self._timer_at = NEVER
        self._timer_due = False

    def __repr__(self) -> str:
        return self.name

    @property
    def clock(self) -> float:
        """The time by this process's own clock, which differs from all other clocks."""
        return self.offset + self.world.now * self.rate

    def tick(self) -> None:
        """Handle the timer, which has expired."""

    def arm(self, deadline: float | None) -> None:
        """Call `tick` at this time of its own clock, unless the timer is already set to an earlier time."""
        if deadline is None:
            return
        now = self.world.now
        at = (deadline - self.offset) / self.rate
        at = max(at, now) + TIMER_GRAIN_S
        if at < self._timer_at:
            self._timer_at = at
            self.world.schedule(at, self._fire, at)

    def _fire(self, at: float) -> None:
        if at != self._timer_at or not self.alive:
            return  # The timer was set to another time.
        self._timer_at = NEVER
        if self.paused:
            self._timer_due = True
            return
        self.world.steps += 1
        self.tick()

    def after(self, delay_s: float, what: Callable[[Any], None], arg: Any = None) -> None:
        """Call `what` after a delay, or later if the process is stopped then."""
        self.world.schedule(self.world.now + delay_s, self._handle, (what, arg))

    def _handle(self, one: tuple[Callable[[Any], None], Any]) -> None:
        if not self.alive:
            return
        if self.paused:
            self._backlog.append(one)
            return
        self.world.steps += 1
        one[0](one[1])

    def pause(self) -> None:
        self.paused = True
        self.world.note(self, "is stopped (SIGSTOP)")

    def resume(self, _arg: object = None) -> None:
        """Continue the process, which first handles the events that have arrived."""
        if not self.paused or not self.alive:
            return
        self.paused = False
        self.world.note(self, "continues (SIGCONT)")
        backlog, self._backlog = self._backlog, []
        for one in backlog:
            if self.alive:
                self.world.steps += 1
                one[0](one[1])
        if self._timer_due and self.alive:
            self._timer_due = False
            self.world.steps += 1
            self.tick()
