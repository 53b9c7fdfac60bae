"""The observers of a launch: the recorders of events and metrics that the config requests.

They do not delay the start. Until the agent has started the workers, lifecycle events are buffered and the
import of `event_recorder` is postponed. If records are kept only for a failed run, this lasts until the run fails.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import UsageError
from holdfast.launcher import dashboard_process
from holdfast.observe import events_wanted, metrics_wanted, timeline
from holdfast.observe.events import event_recorder
from holdfast.observe.lifecycle import GenerationStarted, LifecycleEvent, RunEnded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.agent.loop import AgentLoop
    from holdfast.launcher.config import LaunchConfig
    from holdfast.launcher.dashboard_process import DashboardProcess
    from holdfast.observe.events.event_recorder import JobEvents, RendezvousRecorder
    from holdfast.observe.lifecycle import Observer
    from holdfast.observe.metrics.exporters import MetricExporters
    from holdfast.processes.logs.specs import LogsSpecs

DEFAULT_EVENT_HANDLERS = ("null", "jsonl")
OTEL_ENV = "OTEL_METRICS_EXPORTER"
EARLY_EVENTS_MAX = 10_000
"""Limit of buffered lifecycle events. The oldest are dropped."""


def check_event_handler(destination: str) -> None:
    """Raise `UsageError` if `--event-log-handler` names no destination; load nothing."""
    if destination in DEFAULT_EVENT_HANDLERS:
        return
    from holdfast.observe.events import destinations

    with _naming_the_flag():
        destinations.check_name(destination)


@contextmanager
def _naming_the_flag() -> Iterator[None]:
    try:
        yield
    except UsageError as problem:
        what = problem.message.removeprefix("events: ")
        raise UsageError(f"--event-log-handler: {what}", hint=problem.hint) from None


class LaunchObservers:
    """All observers of one launch, from `begin` to `end`. It is an observer of the agent itself."""

    name = "the record of events"

    def __init__(self, config: LaunchConfig, logs_specs: LogsSpecs) -> None:
        self._config = config
        self._logs = logs_specs
        self._early: deque[LifecycleEvent] = deque(maxlen=EARLY_EVENTS_MAX)
        self._is_kept_only_on_failure = False
        self._recorders: tuple[Observer, ...] = ()
        self._events: JobEvents | None = None
        self._rendezvous: RendezvousRecorder | None = None
        self._exporters: MetricExporters | None = None
        self._dashboard: DashboardProcess | None = None

    def begin(self, agent: AgentLoop) -> None:
        """Observe from now on; raise `UsageError` for an unknown handler."""
        if self._config.event_log_handler not in DEFAULT_EVENT_HANDLERS:
            self._open_events()
        if self._config.metrics_addr and self._config.metrics_port is None:
            console.warning("--metrics-addr has no effect without --metrics-port")
        if self._wants_metrics():
            from holdfast.observe.metrics.exporters import open_exporters

            self._exporters = open_exporters(
                agent.reporter.observers,
                port=self._config.metrics_port,
                host=self._config.metrics_addr,
                progress=agent.progress,
            )
        if self._config.dashboard_port is not None:
            run_id = agent.group.spec.rdzv_handler.get_run_id()
            self._dashboard = dashboard_process.DashboardProcess(
                self._config.dashboard_port, run_id, self._logs
            )
            agent.reporter.observers.add(self._dashboard)
        self._is_kept_only_on_failure = (
            getattr(self._logs, "is_kept_only_on_failure", False)
            and self._events is None
            and not events_wanted("null")
        )
        agent.reporter.observers.sampled = getattr(self._logs, "keeps_records", False)
        agent.reporter.observers.add(self)
        if events_wanted("dynamic_rendezvous"):
            self._rendezvous = event_recorder.RendezvousRecorder()
            agent.reporter.observers.add(self._rendezvous)
        agent.reporter.observers.recorded = True

    def _wants_metrics(self) -> bool:
        if self._config.metrics_port is not None or os.environ.get(OTEL_ENV):
            return True
        return metrics_wanted()

    def __call__(self, event: LifecycleEvent) -> None:
        self._early.append(event)
        if not self._recorders:
            if not self._must_record_now(event):
                return
            events = self._open_events()
            self._recorders = (
                event_recorder.EventRecorder(events.record),
                timeline.TimelineRecorder(events.record_line),
            )
        while self._early:
            one = self._early.popleft()
            for record in self._recorders:
                record(one)

    def _must_record_now(self, event: LifecycleEvent) -> bool:
        if self._is_kept_only_on_failure:
            return isinstance(event, RunEnded) and event.state != "succeeded"
        return isinstance(event, (GenerationStarted, RunEnded))

    def end(self) -> None:
        """Close everything. The caller removes the log directory after this."""
        if self._dashboard is not None:
            self._dashboard.end()
        if self._exporters is not None:
            self._exporters.finish()
        if self._events is not None:
            self._events.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        if self._exporters is not None:
            self._exporters.close()

    def _open_events(self) -> JobEvents:
        if self._events is None:
            with _naming_the_flag():
                self._events = event_recorder.JobEvents(
                    self._config.event_log_handler, lambda: getattr(self._logs, "run_dir", None)
                )
        return self._events
