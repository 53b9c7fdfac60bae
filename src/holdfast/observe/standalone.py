"""The records of an agent that a program made by hand: to whoever it configured, as a launch does.

A launcher looks on at the agents it makes, and says so. At any other agent nobody would: this is
for those. It records events for the handler that the program configured and for the one that the
`WorkerSpec` names, and metrics for the handlers that the program configured. Where there is
neither, nothing of this is imported.
"""

from __future__ import annotations

import sys

from holdfast.observe.events import recorder as rdzv_recorder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.observe.events.recorder import JobEvents
    from holdfast.observe.lifecycle import LifecycleEvent, Observer
    from holdfast.observe.metrics.recorder import MetricQueues

NO_EVENTS = "null"
"""Where events go if nothing else is asked for: nowhere, unless a program configured a handler."""
JSON_LINES = "jsonl"


class StandaloneRecords:
    """An observer at all runs of one agent; what is configured counts at the beginning of each."""

    name = "the agent's record of events and metrics"

    def __init__(self, event_log_handler: str, folder: Callable[[], str | None]) -> None:
        self._handler = event_log_handler
        self._folder = folder
        self._events: JobEvents | None = None
        self._rdzv: rdzv_recorder.RendezvousRecorder | None = None
        self._metrics: MetricQueues | None = None
        self._recorders: list[Observer] = []

    def begin(self) -> None:
        """Look up who wants records of the run that begins; raise `UsageError` for a bad name."""
        self._events, self._rdzv, self._metrics, self._recorders = None, None, None, []
        if _events_wanted(self._handler):
            from holdfast.observe.events.recorder import EventRecorder, JobEvents

            folder = self._folder if self._handler == JSON_LINES else None
            self._events = JobEvents(self._handler, folder)
            self._recorders.append(EventRecorder(self._events.record))
        if rdzv_recorder.rendezvous_events_wanted():
            self._rdzv = rdzv_recorder.RendezvousRecorder()
            self._recorders.append(self._rdzv)
        if _metrics_wanted():
            from holdfast.observe.metrics.recorder import MetricQueues, MetricRecorder

            self._metrics = MetricQueues()
            self._recorders.append(MetricRecorder(self._metrics.put))

    def __call__(self, moment: LifecycleEvent) -> None:
        """Record a moment."""
        for recorder in self._recorders:
            recorder(moment)

    def end(self) -> None:
        """Wait, for a limited time, until the handlers have what was recorded."""
        if self._events is not None:
            self._events.close()
        if self._rdzv is not None:
            self._rdzv.end()
        if self._metrics is not None:
            self._metrics.close()


def records_wanted(event_log_handler: str) -> bool:
    """Whether there is anybody who wants records."""
    if _events_wanted(event_log_handler) or _metrics_wanted():
        return True
    return rdzv_recorder.rendezvous_events_wanted()


# Whoever configured a handler has imported the module that took it.


def _events_wanted(event_log_handler: str) -> bool:
    destinations = sys.modules.get("holdfast.observe.events.destinations")
    return event_log_handler != NO_EVENTS or (
        destinations is not None and destinations.is_recorded(NO_EVENTS)
    )


def _metrics_wanted() -> bool:
    handlers = sys.modules.get("holdfast.observe.metrics.handlers")
    return handlers is not None and handlers.has_handler()
