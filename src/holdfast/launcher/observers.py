"""Who looks on at a launch: the records of events and metrics, as the config asks for them.

The one thing to know: nothing of it delays a start. What happens before the workers run is kept,
and what is needed to record it is imported while they start; or at the end, if nobody could look at
the record before, and not at all if it would be thrown away.
"""

from __future__ import annotations

import os
import sys
from collections import deque

from holdfast import console
from holdfast.errors import UsageError
from holdfast.observe.lifecycle import GenerationStarted, LifecycleEvent, RunEnded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.agent.local_agent import LocalElasticAgent
    from holdfast.launcher.config import LaunchConfig
    from holdfast.observe.events.recorder import EventRecorder, JobEvents, RendezvousRecorder
    from holdfast.observe.metrics.exporters import MetricExporters
    from holdfast.processes.logs.specs import LogsSpecs

DEFAULT_EVENT_HANDLERS = ("null", "jsonl")
OTEL_ENV = "OTEL_METRICS_EXPORTER"
EARLY_EVENTS_MAX = 10_000
"""Moments that are kept; of a job that fails, the newest say most."""


class LaunchObservers:
    """All observers of one launch, from `begin` to `end`; itself one for the agent."""

    name = "the record of events"

    def __init__(self, config: LaunchConfig, logs_specs: LogsSpecs) -> None:
        self._config = config
        self._logs = logs_specs
        self._early: deque[LifecycleEvent] = deque(maxlen=EARLY_EVENTS_MAX)
        self._is_for_failures_alone = False
        self._recorder: EventRecorder | None = None
        self._events: JobEvents | None = None
        self._rdzv: RendezvousRecorder | None = None
        self._outlets: MetricExporters | None = None

    def begin(self, agent: LocalElasticAgent) -> None:
        """Look on from now on; raises `UsageError` for a handler that there is not."""
        if self._config.event_log_handler not in DEFAULT_EVENT_HANDLERS:
            self._open_events()
        if self._config.metrics_addr and self._config.metrics_port is None:
            console.warning("--metrics-addr does nothing without --metrics-port")
        if self._wants_metrics():
            from holdfast.observe.metrics.exporters import open_exporters

            self._outlets = open_exporters(
                agent.observers,
                port=self._config.metrics_port,
                host=self._config.metrics_addr,
                progress=agent.progress,
            )
        handlers = sys.modules.get("holdfast.observe.events.destinations")
        self._is_for_failures_alone = (
            getattr(self._logs, "is_for_failures_alone", False)
            and self._events is None
            and (handlers is None or not handlers.is_recorded("null"))
        )
        agent.observers.add(self)
        if handlers is not None and handlers.is_recorded("dynamic_rendezvous"):
            from holdfast.observe.events.recorder import RendezvousRecorder

            self._rdzv = RendezvousRecorder()
            agent.observers.add(self._rdzv)
        agent.observers.recorded = True

    def _wants_metrics(self) -> bool:
        if self._config.metrics_port is not None or os.environ.get(OTEL_ENV):
            return True
        handlers = sys.modules.get(
            "holdfast.observe.metrics.handlers"
        )  # Imported by whoever configured any.
        return handlers is not None and handlers.has_handler()

    def __call__(self, moment: LifecycleEvent) -> None:
        """Record a moment, and those before it once there is time for that."""
        if self._recorder is None:
            self._early.append(moment)
            if not self._is_time(moment):
                return
            from holdfast.observe.events.recorder import EventRecorder

            self._recorder = EventRecorder(self._open_events().record)
            for one in self._early:
                self._recorder(one)
            self._early.clear()
            return
        self._recorder(moment)

    def _is_time(self, moment: LifecycleEvent) -> bool:
        """Whether what was kept must be recorded now."""
        if self._is_for_failures_alone:
            return isinstance(moment, RunEnded) and moment.state != "succeeded"
        return isinstance(moment, (GenerationStarted, RunEnded))

    def end(self) -> None:
        """Close everything; before the log directory is removed."""
        if self._outlets is not None:
            self._outlets.finish()
        if self._events is not None:
            self._events.close()
        if self._rdzv is not None:
            self._rdzv.end()
        if self._outlets is not None:
            self._outlets.close()

    def _open_events(self) -> JobEvents:
        from holdfast.observe.events.recorder import JobEvents

        if self._events is None:
            try:
                self._events = JobEvents(
                    self._config.event_log_handler, lambda: getattr(self._logs, "run_dir", None)
                )
            except UsageError as problem:
                what = problem.message.removeprefix("events: ")
                raise UsageError(f"--event-log-handler: {what}", hint=problem.hint) from None
        return self._events
