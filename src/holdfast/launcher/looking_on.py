"""Who looks on at a launch: the records of events and metrics, as the config asks for them.

The one thing to know: nothing of it delays a start. What happens before the workers run is kept,
and what is needed to record it is imported while they start.
"""

from __future__ import annotations

import sys

from holdfast.agent.moments import Ended, Moment, Started

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.agent.local import LocalElasticAgent
    from holdfast.events.job import JobEvents
    from holdfast.launcher.config import LaunchConfig
    from holdfast.metrics.endpoint import MetricsEndpoint

DEFAULT_EVENT_HANDLERS = ("null", "jsonl")


class LookingOn:
    """All onlookers of one launch, from `begin` to `end`; itself one for the agent."""

    name = "the record of events"

    def __init__(self, config: LaunchConfig, folder: Callable[[], str | None]) -> None:
        self._config = config
        self._folder = folder
        self._early: list[Moment] = []
        self._recorders: list[Callable[[Moment], object]] | None = None
        self._events: JobEvents | None = None
        self._endpoint: MetricsEndpoint | None = None

    def begin(self, agent: LocalElasticAgent) -> None:
        """Look on from now on; raises `UsageError` for a handler that there is not."""
        if self._config.event_log_handler not in DEFAULT_EVENT_HANDLERS:
            self._open_events()
        if self._config.metrics_port is not None:
            self._serve_metrics(agent, self._config.metrics_port)
        agent.onlookers.add(self)

    def __call__(self, moment: Moment) -> None:
        """Record a moment, and those before it once there is time for that."""
        if self._recorders is None:
            self._early.append(moment)
            if not isinstance(moment, (Started, Ended)):
                return
            self._recorders = self._make_recorders()
            early, self._early = self._early, []
            for one in early:
                self._record(one)
            return
        self._record(moment)

    def end(self) -> None:
        """Close everything; before the log directory is removed."""
        if self._events is not None:
            self._events.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def _record(self, moment: Moment) -> None:
        for recorder in self._recorders or ():
            recorder(moment)

    def _make_recorders(self) -> list[Callable[[Moment], object]]:
        from holdfast.agent.event_recorder import EventRecorder

        found: list[Callable[[Moment], object]] = [EventRecorder(self._open_events().record)]
        metrics = sys.modules.get("holdfast.metrics")  # Whoever configured any has imported it.
        if metrics is not None and metrics.is_configured():
            from holdfast.agent.metric_recorder import MetricRecorder

            found.append(MetricRecorder())
        return found

    def _open_events(self) -> JobEvents:
        from holdfast.events.job import JobEvents

        if self._events is None:
            self._events = JobEvents(self._config.event_log_handler, self._folder)
        return self._events

    def _serve_metrics(self, agent: LocalElasticAgent, port: int) -> None:
        from holdfast.agent.job_metrics import JobMetrics
        from holdfast.metrics.endpoint import MetricsEndpoint

        metrics = JobMetrics(agent.progress)
        agent.onlookers.add(metrics)
        self._endpoint = MetricsEndpoint(metrics.collect, host=self._config.metrics_addr, port=port)
        self._endpoint.start()
