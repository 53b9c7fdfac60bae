"""The events and metrics of an agent that a program created itself, without a launcher.

Events go to the handler that the program configured, and to the handler that the `WorkerSpec` names. Metrics go
to the handlers that the program configured. Without handlers nothing is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.observe import events_wanted, metrics_wanted
from holdfast.observe.events.event_recorder import EventRecorder, JobEvents, RendezvousRecorder
from holdfast.observe.metrics.metric_recorder import MetricQueues, MetricRecorder
from holdfast.observe.timeline import TimelineRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.observe.lifecycle import LifecycleEvent, Observer

NO_EVENTS, RENDEZVOUS_EVENTS, JSON_LINES = "null", "dynamic_rendezvous", "jsonl"


class StandaloneRecords:
    """An observer of all runs of one agent; each start reads the configuration."""

    name = "the agent's record of events and metrics"

    def __init__(self, event_log_handler: str, folder: Callable[[], str | None]) -> None:
        self._handler = event_log_handler
        self._folder = folder
        self._events: JobEvents | None = None
        self._rendezvous: RendezvousRecorder | None = None
        self._metrics: MetricQueues | None = None
        self._recorders: list[Observer] = []

    def begin(self) -> None:
        """Find the handlers for a new run; raise `UsageError` for an unknown name."""
        self._events = self._rendezvous = self._metrics = None
        self._recorders = []
        if self._handler != NO_EVENTS or events_wanted(NO_EVENTS):
            folder = self._folder if self._handler == JSON_LINES else None
            self._events = JobEvents(self._handler, folder)
            self._recorders.append(EventRecorder(self._events.record))
            if folder is not None:
                self._recorders.append(TimelineRecorder(self._events.record_line))
        if events_wanted(RENDEZVOUS_EVENTS):
            self._rendezvous = RendezvousRecorder()
            self._recorders.append(self._rendezvous)
        if metrics_wanted():
            self._metrics = MetricQueues()
            self._recorders.append(MetricRecorder(self._metrics.put))

    def __call__(self, event: LifecycleEvent) -> None:
        for recorder in self._recorders:
            recorder(event)

    def end(self) -> None:
        """Wait, for a limited time, until the handlers have received all records."""
        for one in (self._events, self._rendezvous, self._metrics):
            if one is not None:
                one.close()


def records_wanted(event_log_handler: str) -> bool:
    """Whether there is a handler for events or metrics."""
    return (
        event_log_handler != NO_EVENTS
        or events_wanted(NO_EVENTS)
        or events_wanted(RENDEZVOUS_EVENTS)
        or metrics_wanted()
    )
