"""The events of one job on this node: where they go, from its beginning to its end.

The launcher's way in::

    events = JobEvents(config.event_log_handler, logs_folder)
    agent.onlookers.add(EventRecorder(events.record))
    ...
    events.close()      # before the log directory is removed, and before `os._exit`

The log directory has all of them as JSON lines, whatever else is chosen. A handler that a program
configured for the default destination gets the events besides: whoever configures one wants it to
have them.
"""

from __future__ import annotations

import sys

from holdfast.events.guarding import Guarded
from holdfast.events.json_lines import JsonLinesEventHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.events.values import Event

JSON_LINES = "jsonl"
FLUSH_S = 5.0
"""How long the end of a job waits for handlers that are not ours."""


class JobEvents:
    """Gets the events of a job, and passes them on to the handlers that are chosen."""

    def __init__(self, name: str, folder: str | Callable[[], str | None] | None) -> None:
        """Choose by the name of a destination; raises `UsageError` if there is none.

        `folder` is the job's log directory, or a function that returns it as soon as it is there;
        None if the job has none, in which case no lines are written.
        """
        self._own: list[Guarded] = []
        self._shared: list[Guarded] = []
        is_configured = _is_configured(JSON_LINES)
        if folder is not None and not is_configured:
            self._own.append(Guarded(JsonLinesEventHandler(folder), JSON_LINES))
        if name not in ("null", JSON_LINES) or (name == JSON_LINES and is_configured):
            self._share(name)
        if _is_recorded("null"):
            self._share("null")

    def _share(self, name: str) -> None:
        from holdfast.events import destinations

        self._shared.append(destinations.find(name))

    def record(self, event: Event) -> None:
        """Record an event with everyone who is chosen."""
        for guarded in self._own:
            guarded.record(event)
        for guarded in self._shared:
            guarded.record(event)

    def close(self, limit_s: float = FLUSH_S) -> None:
        """End the job's own handlers; wait for the others, which may serve the next job too."""
        for guarded in self._own:
            guarded.close(limit_s)
        for guarded in self._shared:
            guarded.flush(limit_s)


def _is_configured(destination: str) -> bool:
    """Whether a program configured a destination; one that never imported that module did not."""
    destinations = sys.modules.get("holdfast.events.destinations")
    return destinations is not None and destinations.is_configured(destination)


def _is_recorded(destination: str) -> bool:
    destinations = sys.modules.get("holdfast.events.destinations")
    return destinations is not None and destinations.is_recorded(destination)
