"""The services of an agent besides its workers. They run in the agent's loop, without threads.

They are the watchdogs, the health probe and readiness check (`holdfast.observe.health`), samples of
the workers' progress, the control point, and the early import of the modules that a failure needs.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from holdfast import console, plugins
from holdfast.agent.preimports import Preimports
from holdfast.agent.watchdogs import Watchdogs
from holdfast.observe.health import health_server as health_servers
from holdfast.observe.health import loop_probe
from holdfast.processes.poll import min_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from typing import Protocol

    from holdfast.agent.blocked_workers import BlockedWorkers
    from holdfast.agent.lifecycle_reporter import LifecycleReporter
    from holdfast.control.control_point import ControlPoint
    from holdfast.core.machine import Event
    from holdfast.observe.health.health_server import Readiness
    from holdfast.observe.health.loop_probe import LoopProbe

    class HealthServer(Protocol):
        """A health check server, ours or TorchElastic's."""

        def start(self) -> None: ...

        def stop(self) -> None: ...


HEALTH_PORT_ENV = "TORCHELASTIC_HEALTH_CHECK_PORT"

# The services that a short run does not need start after this time.
DEFERRED_S = 1.0
# If workers report progress, the agent samples it for the timeline in the log directory. The interval
# grows: it is a twentieth of the time since the first sample.
SAMPLE_SHARE = 0.05
SAMPLE_S_MIN, SAMPLE_S_MAX = 0.1, 30.0
# With each sample, the agent notes the memory of its workers for those who watch later. If it has this many
# notes, it drops every other one, so older notes are further apart.
MEMORY_NOTES_MAX = 240


class SideServices:
    """The services of one run. Call `poll` when a descriptor is readable or the deadline passes."""

    def __init__(
        self,
        run_id: str,
        reporter: LifecycleReporter,
        health_server: HealthServer | None = None,
        blocked: BlockedWorkers | None = None,
    ) -> None:
        self.watchdogs = Watchdogs(run_id, reporter.report, self._first_heartbeat, blocked)
        self._reporter = reporter
        self._sampled_since = 0.0
        self._sample_at: float | None = None
        self._sampled: dict[int, tuple[int, float]] = {}
        self.memory: list[tuple[float, int]] = []
        """The memory of all workers, in bytes, at past times. Empty if progress is not sampled."""
        self._events: list[Event] = []
        self._start_others: Callable[[], None] = lambda: None
        self._deferred_until: float | None = None
        self._preimports = Preimports()
        self._observers = reporter.observers
        self._given_server = health_server
        self._health: HealthServer | None = None
        self._probe: LoopProbe | None = None
        self._readiness: Readiness | None = None
        self.control: ControlPoint | None = None
        """Where clients connect to this agent; `AgentLoop` opens it."""

    def begin(self, start_deferred_services: Callable[[], None]) -> None:
        """Start the services of a run. They call `start_deferred_services` after the first second."""
        self._start_others = start_deferred_services
        self._deferred_until = time.monotonic() + DEFERRED_S
        self._health = self._given_server
        if self._health is None and os.environ.get(HEALTH_PORT_ENV):
            if self._readiness is None:  # Otherwise an earlier run has added it.
                self._readiness = health_servers.Readiness()
                self._observers.add(self._readiness)
            self._probe = loop_probe.LoopProbe()
            self._health = health_servers.server_from_environment(
                os.environ, self._probe.alive_time, self._readiness.why_not
            )
        if self._health is None:
            return
        try:
            self._health.start()
        except BaseException as problem:
            problem.add_note(f"The health server {plugins.owner_of(self._health)} did not start.")
            self._health = None  # It did not start, so `end` must not stop it.
            self.end()
            raise

    def end(self) -> None:
        self.watchdogs.close()
        control, self.control = self.control, None
        if control is not None:
            self._observers.remove(control)
            control.close()
        health, self._health = self._health, None
        if health is not None:
            try:
                health.stop()
            except Exception as problem:  # noqa: BLE001 (a user's server may raise anything)
                who = plugins.owner_of(health)
                console.warning(f"cannot stop the health server {who}: {console.describe(problem)}")
        self._close_probe()

    def start_deferred_services(self) -> None:
        """Start the services that a short run does not need, and begin to import what a failure needs."""
        self._deferred_until = None
        self._start_others()
        self._preimports.begin(time.monotonic())

    @property
    def has_started_deferred_services(self) -> bool:
        """Whether the first second of the run is over."""
        return self._deferred_until is None

    def descriptors(self) -> list[int]:
        probe = [self._probe.fileno()] if self._probe is not None else []
        control = self.control.descriptors() if self.control is not None else []
        return self.watchdogs.descriptors() + probe + control

    def next_deadline(self, deadline: float | None) -> float | None:
        """Return when to `poll`, or the other deadline if that is sooner."""
        own = (
            self._deferred_until,
            self._preimports.due,
            self._sample_at,
            self._reporter.failures_due,
        )
        for at in (*own, self.watchdogs.next_deadline()):
            deadline = min_of(deadline, at)
        return deadline

    def poll(self, now: float) -> None:
        """Serve probes, timers and clients, and perform the tasks that are due."""
        if self._probe is not None:
            try:
                self._probe.respond()
            except OSError as problem:
                console.warning(f"health probe disabled: {problem}")
                self._close_probe()
        self._events += self.watchdogs.poll(now)
        if self._sample_at is not None and now >= self._sample_at:
            self._sample()
            self._note_memory(now)
            pause_s = (now - self._sampled_since) * SAMPLE_SHARE
            self._sample_at = now + min(SAMPLE_S_MAX, max(SAMPLE_S_MIN, pause_s))
        if self._reporter.failures_due is not None and now >= self._reporter.failures_due:
            self._reporter.report_failures()
        if self.control is not None:
            self.control.poll()
        if self._deferred_until is not None and now >= self._deferred_until:
            self.start_deferred_services()
        self._preimports.poll(now)

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def take_requests(self) -> Iterable[Event]:
        """Return the requests of operators as events."""
        return self.control.take_requests() if self.control is not None else ()

    def workers_stopped(self) -> None:
        """End the checks and samples of a generation, whose workers have exited."""
        self.watchdogs.stopped()
        self._sample()  # Even a short generation has a sample.
        self._sampled.clear()
        self._sample_at = None

    def _first_heartbeat(self, local_rank: int) -> None:
        """Note the first call of a worker that reports its progress."""
        self._reporter.first_heartbeat(local_rank)
        if self._observers.sampled and self._sample_at is None:
            self._sampled_since = time.monotonic()
            self._sample_at = self._sampled_since + SAMPLE_S_MIN

    def _sample(self) -> None:
        changed = [
            (rank, step, at)
            for rank, step, at in self.watchdogs.steps()
            if self._sampled.get(rank) != (step, at)
        ]
        if changed:
            self._sampled.update({rank: (step, at) for rank, step, at in changed})
            self._reporter.progress_sampled(tuple(changed))

    def _note_memory(self, now: float) -> None:
        if len(self.memory) >= MEMORY_NOTES_MAX:
            del self.memory[1::2]
        self.memory.append((now, self.watchdogs.memory()))

    def suspend_probe(self, what: str) -> AbstractContextManager[None]:
        """Return a context in which the health probe does not expect the loop to respond."""
        return self._probe.suspended(what) if self._probe is not None else nullcontext()

    def _close_probe(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            try:
                probe.close()
            except OSError:
                pass  # Its descriptor is closed already.
