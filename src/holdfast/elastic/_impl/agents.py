"""The agents that TorchElastic's programs derive from, with its methods to record events by hand.

Holdfast's own agents need none of these methods: their events come from the lifecycle of a run.
"""

from __future__ import annotations

import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.agent import agent, local_agent
from holdfast.observe.events.recorder import EventRecorder
from holdfast.observe.lifecycle import CustomEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.observe.events.event import Event


class SimpleElasticAgent(agent.SimpleElasticAgent):
    """An agent of one group of workers; derive from it to say what a worker is."""

    def get_event_succeeded(self) -> Event:
        """Return the event that the agent has succeeded."""
        return self._event_recorder().agent_event("SUCCEEDED", time.time())

    def get_event_failed(self) -> Event:
        """Return the event that the agent has failed, with the exception being handled."""
        return self._event_recorder().agent_event("FAILED", time.time(), traceback.format_exc())

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record an event of this state with the duration of the block.

        During a run it goes where the run's own events go.
        """
        begun = time.perf_counter()
        try:
            yield
        finally:
            took_ms = (time.perf_counter() - begun) * 1000
            event = self._event_recorder().agent_event(state, time.time(), duration_ms=took_ms)
            self._record(event)

    def _record(self, event: Event) -> None:
        if self._reporter.observers:
            self._reporter.report(CustomEvent(event))
            return
        from holdfast.events import record

        record(event, self._worker_group.spec.event_log_handler)

    def _event_recorder(self) -> EventRecorder:
        recorder = EventRecorder(lambda _event: None)
        recorder(self._reporter.describe_run())
        recorder(self._reporter.describe_rendezvous())
        return recorder


class LocalElasticAgent(local_agent.LocalElasticAgent, SimpleElasticAgent):
    """The agent of a real node."""
