"""What an agent serves besides its workers, in the same loop and without a thread of its own.

Watchdog timers and sections (`watchdogs`), the health probe and readiness check
(`holdfast.observe.health`), and importing ahead of time what a failure will need.
"""

from __future__ import annotations

import os
import time

from holdfast import console
from holdfast.agent.watchdogs import Watchdogs
from holdfast.processes.poll import min_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from holdfast.agent.lifecycle_reporter import LifecycleReporter
    from holdfast.observe.health.loop_probe import LoopProbe
    from holdfast.observe.health.server import Readiness


QUIET_S = 1.0

NEEDED = (
    "traceback",
    "holdfast.observe.events.recorder",
    "holdfast.numa.visible_devices",
    "holdfast.observe.events.recorder",
    "holdfast.observe.events.handlers",
    "holdfast.processes.failures.failure",
    "holdfast.processes.failures.report",
    "holdfast.processes.failures.report",
    "holdfast.processes.failures.report_text",
    "holdfast.processes.failures.tracebacks",
    "holdfast.rendezvous.errors",
    "holdfast.store.tcp.server",
)


class PreImport:
    """Imports what is needed once, some time after it was told to begin."""

    def __init__(self) -> None:
        self._due: float | None = None

    def begin(self, now: float) -> None:
        """Have it done after a while."""
        self._due = now + QUIET_S

    def next_deadline(self) -> float | None:
        """Return when to `look`, if that is still to come."""
        return self._due

    def look(self, now: float) -> None:
        """Import it, if it is time."""
        if self._due is None or now < self._due:
            return
        self._due = None
        for name in NEEDED:
            try:
                __import__(name)
            except Exception as problem:  # noqa: BLE001 (a failure would meet it, and is not here yet)
                what = f"{name}: {console.describe(problem)}"
                console.warning(f"what a failure would need cannot be imported: {what}")
        console.debug("ready for failures")


HEALTH_PORT_ENV = "TORCHELASTIC_HEALTH_CHECK_PORT"


class SideServices:
    """They begin and end with a run."""

    def __init__(self, run_id: str, reporter: LifecycleReporter, health_check_server: Any) -> None:
        self.watchdogs = Watchdogs(run_id, reporter.report, reporter.first_heartbeat)
        self._foresight = PreImport()
        self._observers = reporter.observers
        self._given = health_check_server
        self._health: Any = None
        self._pulse: LoopProbe | None = None
        self._readiness: Readiness | None = None

    def begin(self) -> None:
        """Begin to answer health checks, if anybody wants to ask."""
        self._foresight.begin(time.monotonic())
        self._health = self._given
        if self._health is None and os.environ.get(HEALTH_PORT_ENV):
            from holdfast.observe.health.loop_probe import LoopProbe
            from holdfast.observe.health.server import server_from_environment

            self._pulse = LoopProbe()
            self._health = server_from_environment(
                os.environ, self._pulse.alive_time, self._obtain_readiness().why_not
            )
        if self._health is None:
            return
        try:
            self._health.start()
        except BaseException:
            self._health = None  # It has not been started, so it is not to be stopped.
            self.end()
            raise

    def end(self) -> None:
        """End everything."""
        self.watchdogs.close()
        health, self._health = self._health, None
        if health is not None:
            try:
                health.stop()
            except Exception as problem:  # noqa: BLE001 (it may be anybody's, and the run is over)
                what = f"{type(problem).__name__}: {problem}"
                console.warning(f"the health check server could not be stopped: {what}")
        self._drop_pulse()

    def _drop_pulse(self) -> None:
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            try:
                pulse.close()
            except OSError:
                pass  # Somebody has closed its descriptor.

    def _obtain_readiness(self) -> Readiness:
        """Return the one that looks on, at this run or at the one before already."""
        if self._readiness is None:
            from holdfast.observe.health.server import Readiness

            self._readiness = Readiness()
            self._observers.add(self._readiness)
        return self._readiness

    def descriptors(self) -> list[int]:
        """Return what can be read when there is something to `look` at."""
        found = self.watchdogs.descriptors()
        if self._pulse is not None:
            found.append(self._pulse.fileno())
        return found

    def next_deadline(self, deadline: float | None) -> float | None:
        """Return when to `look` at the latest, or the other deadline, whichever comes first."""
        return min_of(
            min_of(deadline, self._foresight.next_deadline()), self.watchdogs.next_deadline()
        )

    def look(self, now: float) -> None:
        """Do what is due."""
        if self._pulse is not None:
            try:
                self._pulse.answer()
            except OSError as problem:
                console.warning(f"health probe disabled: {problem}")
                self._drop_pulse()
        self.watchdogs.look(now)
        self._foresight.look(now)

    def away(self, what: str) -> Any:
        """Return a context in which the agent waits for something that is not its loop."""
        from contextlib import nullcontext

        return self._pulse.busy(what) if self._pulse is not None else nullcontext()
