"""Which handler gets the events of which destination.

A destination is a name. What it stands for is looked up in this order: what `configure` was told;
what a program put into TorchElastic's table `_log_handlers`; the names of ours; plug-ins.

`null` is where TorchElastic sends events if nothing else is asked for, so that is what `configure`
sets unless told otherwise: `configure(MyEventHandler())` is enough.
"""

from __future__ import annotations

import sys

from holdfast.errors import UsageError
from holdfast.events.guarding import Guarded
from holdfast.events.handlers import EventHandler, NullEventHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from typing import Any

DEFAULT = "null"
NAMES = ("console", "dynamic_rendezvous", "jsonl", "logging", "null", "otel")
FLUSH_S = 5.0
"""How long the end of a job waits for handlers that are not ours."""

_configured: dict[str, Guarded] = {}
_added: dict[str, tuple[logging.Handler, Guarded]] = {}
_found: dict[str, Guarded] = {}


def configure(handler: EventHandler | logging.Handler, destination: str = DEFAULT) -> None:
    """Have a handler get the events of a destination from now on.

    It gets the events of every job of this process, in a thread of its own. The handler it
    replaces is closed, once it has what was recorded so far.
    """
    if not destination:
        raise UsageError("the name of a destination of events is empty")
    guarded = guard(handler, destination)
    old = _configured.get(destination)
    _configured[destination] = guarded
    if old is not None:
        old.close(FLUSH_S)


def is_configured(destination: str) -> bool:
    """Whether `configure` was called for a destination."""
    return destination in _configured


def is_recorded(destination: str) -> bool:
    """Whether events of a destination go anywhere."""
    return type(find(destination).handler) is not NullEventHandler


def find(destination: str) -> Guarded:
    """Return what gets the events of a destination; raise `UsageError` if there is none."""
    if destination in _configured:
        return _configured[destination]
    table = sys.modules.get("holdfast.events.log_handlers")
    added = table.added(destination) if table is not None else None
    if added is not None:
        return _guard_added(added, destination)
    if destination not in _found:
        _found[destination] = _make(destination)
    return _found[destination]


def _guard_added(handler: logging.Handler, destination: str) -> Guarded:
    """Return what guards a handler of TorchElastic's table, the same as long as it is there."""
    old = _added.get(destination)
    if old is not None and old[0] is handler:
        return old[1]
    guarded = guard(handler, destination)
    _added[destination] = (handler, guarded)
    if old is not None:
        old[1].close(FLUSH_S)
    return guarded


def guard(handler: Any, name: str) -> Guarded:
    """Return a handler so that it cannot hurt; one that is not ours gets a thread."""
    if type(handler) is NullEventHandler:
        return Guarded(handler, name)
    from holdfast.events.apart import Apart

    logging = sys.modules.get("logging")
    if logging is not None and isinstance(handler, logging.Handler):
        from holdfast.events.log_records import LogHandlerSink

        if isinstance(handler, logging.NullHandler):
            return Guarded(NullEventHandler(), name)
        handler = LogHandlerSink(handler, name)
    if isinstance(handler, type) or not callable(getattr(handler, "record", None)):
        raise UsageError(
            f"{handler!r} is no event handler: it has no method record",
            hint="derive from holdfast.events.EventHandler",
        )
    return Apart(handler, f"{name!r} ({type(handler).__name__})")


def flush(limit_s: float = FLUSH_S) -> None:
    """Wait until every handler has the events recorded so far, each for at most so long."""
    added = [guarded for _, guarded in _added.values()]
    for guarded in [*_configured.values(), *added, *_found.values()]:
        guarded.flush(limit_s)


def get_logging_handler(destination: str = DEFAULT) -> logging.Handler:
    """Return a destination as a `logging.Handler`; raise `KeyError` if there is none."""
    from holdfast.events.log_handlers import log_handler

    try:
        return log_handler(destination)
    except UsageError:
        raise KeyError(destination) from None


def _make(destination: str) -> Guarded:
    match destination:
        case "null" | "dynamic_rendezvous":
            return Guarded(NullEventHandler(), destination)
        case "console":
            from holdfast.events.console import ConsoleEventHandler

            return Guarded(ConsoleEventHandler(), destination)
        case "logging":
            from holdfast.events.log_records import LoggingEventHandler

            return guard(LoggingEventHandler(), destination)
        case "otel":
            from holdfast.events.open_telemetry import OpenTelemetryEventHandler

            return guard(OpenTelemetryEventHandler(), destination)
        case "jsonl":
            raise UsageError(
                "events: 'jsonl' needs a folder, which only a job has",
                hint="configure(JsonLinesEventHandler(folder), 'jsonl') names one",
            )
    from holdfast.events import plugins

    found = plugins.installed()
    if destination in found:
        return guard(plugins.load(found[destination]), destination)
    accepted = sorted({*NAMES, *_configured, *found})
    raise UsageError(f"events: {destination!r} is unknown; accepted: {', '.join(accepted)}")
