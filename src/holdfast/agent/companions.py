"""What an agent looks after besides its workers' exits, in the same loop and without a wake-up of
its own: timers and sections (`watchdogs`), and whoever asks whether it is well (`holdfast.health`).
"""

from __future__ import annotations

import os

from holdfast.agent.watchdogs import Watchdogs
from holdfast.processes.waiting import min_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from holdfast.agent.moments import Onlookers
    from holdfast.health.pulse import Pulse

HEALTH_PORT_ENV = "TORCHELASTIC_HEALTH_CHECK_PORT"


class Companions:
    """They begin and end with a run."""

    def __init__(self, run_id: str, onlookers: Onlookers, health_check_server: Any) -> None:
        self.watchdogs = Watchdogs(run_id, onlookers.tell)
        self._onlookers = onlookers
        self._given = health_check_server
        self._health: Any = None
        self._pulse: Pulse | None = None

    def begin(self) -> None:
        """Begin to answer health checks, if anybody wants to ask."""
        self._health = self._given
        if self._health is None and os.environ.get(HEALTH_PORT_ENV):
            from holdfast.agent.readiness import Readiness
            from holdfast.health.pulse import Pulse
            from holdfast.health.server import server_from_environment

            self._pulse, readiness = Pulse(), Readiness()
            self._onlookers.add(readiness)
            self._health = server_from_environment(
                os.environ, self._pulse.alive_time, readiness.why_not
            )
        if self._health is not None:
            self._health.start()

    def end(self) -> None:
        """End everything."""
        self.watchdogs.close()
        if self._health is not None:
            self._health.stop()
            self._health = None
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None

    def descriptors(self) -> list[int]:
        """Return what can be read when there is something to `look` at."""
        found = self.watchdogs.descriptors()
        if self._pulse is not None:
            found.append(self._pulse.fileno())
        return found

    def next_deadline(self, deadline: float | None) -> float | None:
        """Return when to `look` at the latest, or the other deadline, whichever comes first."""
        return min_of(deadline, self.watchdogs.next_deadline())

    def look(self, now: float) -> None:
        """Do what is due."""
        if self._pulse is not None:
            self._pulse.answer()
        self.watchdogs.look(now)

    def away(self, what: str) -> Any:
        """Return a context in which the agent waits for something that is not its loop."""
        from contextlib import nullcontext

        return self._pulse.away(what) if self._pulse is not None else nullcontext()
