"""TorchElastic's ways to make and record events of an agent by hand: `EventMethods`.

An agent's own events need none of this: they are made of the moments of a run.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from holdfast.agent.lifecycle_reporter import LifecycleReporter
    from holdfast.agent.spec import WorkerGroup
    from holdfast.observe.events.event import Event
    from holdfast.observe.events.recorder import EventRecorder


class EventMethods:
    """What `SimpleElasticAgent` has of it."""

    _reporter: LifecycleReporter
    _worker_group: WorkerGroup

    def get_event_succeeded(self) -> Event:
        """Return the event that says that the agent is done."""
        return self._event_recorder().agent_event("SUCCEEDED", time.time())

    def get_event_failed(self) -> Event:
        """Return the event that says that the agent failed, of the exception being handled."""
        import traceback

        return self._event_recorder().agent_event("FAILED", time.time(), traceback.format_exc())

    def record_duration(self, state: str) -> AbstractContextManager[None]:
        """Return a context that records an event of this state with how long it took.

        While a run goes on it goes where the run's own events go.
        """
        from contextlib import contextmanager

        @contextmanager
        def measuring():  # type: ignore[no-untyped-def]
            begun = time.perf_counter()
            try:
                yield
            finally:
                took_ms = (time.perf_counter() - begun) * 1000
                event = self._event_recorder().agent_event(state, time.time(), duration_ms=took_ms)
                self._record(event)

        return measuring()

    def _record(self, event: Event) -> None:
        if self._reporter.observers:
            from holdfast.observe.lifecycle import CustomEvent

            self._reporter.report(CustomEvent(event))
            return
        from holdfast.events import record

        record(event, self._worker_group.spec.event_log_handler)

    def _event_recorder(self) -> EventRecorder:
        from holdfast.observe.events.recorder import EventRecorder

        recorder = EventRecorder(lambda _event: None)
        recorder(self._reporter.describe_run())
        recorder(self._reporter.describe_rendezvous())
        return recorder
