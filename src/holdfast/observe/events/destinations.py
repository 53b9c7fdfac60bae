"""The handlers of event destinations, and `record`, which sends an event to a destination.

A destination is a name. The lookup order is: `configure`; TorchElastic's table `_log_handlers`; Holdfast's own
names; plug-ins. `null` is the default, so `configure(MyEventHandler())` suffices.

A plug-in is an entry point `name = module:attribute` of the group `holdfast.event_handlers`. It is called without
arguments and returns a handler for `--event-log-handler name`. Only the selected plug-in is loaded, since
loading one may import anything.

Recording an event raises only for an unknown destination, never because of a handler.
"""

from __future__ import annotations

import sys
import time
from importlib import metadata
from typing import TYPE_CHECKING

from holdfast import console, plugins
from holdfast.errors import UsageError
from holdfast.observe import configured, event_checks
from holdfast.observe.background import BackgroundHandler
from holdfast.observe.events.event_handlers import (
    ConsoleEventHandler,
    EventHandler,
    NullEventHandler,
)
from holdfast.observe.events.event_otel import OpenTelemetryEventHandler
from holdfast.observe.events.logging_handlers import LoggingEventHandler, LogHandlerSink
from holdfast.observe.safe_handler import SafeHandler

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping
    from typing import Any

    from holdfast.observe.events.event import Event, RdzvEvent

GROUP = "holdfast.event_handlers"


def installed_plugins() -> dict[str, Any]:
    """Return the entry points of all plug-ins by name, without loading any."""
    return {one.name: one for one in metadata.entry_points(group=GROUP)}


def load_plugin(plugin: Any) -> Any:
    """Return the handler that a plug-in creates; raise `UsageError` if that fails."""
    plugins.note("events", plugin)
    try:
        return plugin.load()()
    except (Exception, SystemExit) as problem:  # Its module may call `sys.exit`.
        what = f"the event handler {plugin.name!r} ({plugin.value})"
        raise UsageError(f"cannot create {what}: {console.describe(problem)}") from problem


DEFAULT = "null"
NAMES = ("console", "dynamic_rendezvous", "jsonl", "logging", "null", "otel")
FLUSH_S = 5.0
"""How long the end of a job waits for handlers of the program and of plug-ins."""

_added: dict[str, tuple[logging.Handler, SafeHandler]] = {}
_found: dict[str, SafeHandler] = {}

find_added: Callable[[str], logging.Handler | None] | None = None
"""Looks a destination up in TorchElastic's table of handlers. The module with that table sets this function."""


def configure(handler: EventHandler | logging.Handler, destination: str = DEFAULT) -> None:
    """Send the events of a destination to a handler from now on.

    The handler receives the events of every job of this process, in its own thread. The previous handler receives
    the events recorded so far and is closed.
    """
    if not destination:
        raise UsageError("events: the name of a destination is empty")
    safe = make_safe(handler, destination)
    old = configured.get(destination)
    configured[destination] = safe
    if old is not None:
        old.close(FLUSH_S)


def is_configured(destination: str) -> bool:
    """Whether `configure` was called for a destination."""
    return destination in configured


def is_recorded(destination: str) -> bool:
    """Whether a destination has a handler."""
    return type(find(destination).handler) is not NullEventHandler


event_checks.append(is_recorded)


def find(destination: str) -> SafeHandler:
    """Return the handler of a destination; raise `UsageError` without one."""
    if destination in configured:
        return configured[destination]
    added = find_added(destination) if find_added is not None else None
    if added is not None:
        return _make_added_safe(added, destination)
    if destination not in _found:
        _found[destination] = _make(destination)
    return _found[destination]


def _make_added_safe(handler: logging.Handler, destination: str) -> SafeHandler:
    """Return the guard of a handler in TorchElastic's table: the same guard while the table has the handler."""
    old = _added.get(destination)
    if old is not None and old[0] is handler:
        return old[1]
    safe = make_safe(handler, destination)
    _added[destination] = (handler, safe)
    if old is not None:
        old[1].close(FLUSH_S)
    return safe


def make_safe(handler: Any, name: str) -> SafeHandler:
    """Return a handler with a guard; a handler of the program or of a plug-in runs in its own thread."""
    if type(handler) is NullEventHandler:
        return SafeHandler(handler, name)
    logging = sys.modules.get("logging")
    if logging is not None and isinstance(handler, logging.Handler):
        if isinstance(handler, logging.NullHandler):
            return SafeHandler(NullEventHandler(), name)
        handler = LogHandlerSink(handler, name)
    if isinstance(handler, type) or not callable(getattr(handler, "record", None)):
        raise UsageError(
            f"events: {name!r} is {handler!r}, which is not an event handler: it has no method record",
            hint="derive from holdfast.events.EventHandler",
        )
    return BackgroundHandler(handler, f"{name!r} ({type(handler).__name__})")


def flush(limit_s: float = FLUSH_S) -> None:
    """Wait, up to `limit_s` for each handler, until it has received the events recorded so far."""
    added = [safe for _, safe in _added.values()]
    for safe in [*configured.values(), *added, *_found.values()]:
        safe.flush(limit_s)


def _make(destination: str) -> SafeHandler:
    match destination:
        case "null" | "dynamic_rendezvous":
            return SafeHandler(NullEventHandler(), destination)
        case "console":
            return SafeHandler(ConsoleEventHandler(), destination)
        case "logging":
            return make_safe(LoggingEventHandler(), destination)
        case "otel":
            return make_safe(OpenTelemetryEventHandler(), destination)
        case "jsonl":
            raise UsageError(
                "events: 'jsonl' needs a log directory, which only a job has",
                hint="set one with configure(JsonLinesEventHandler(folder), 'jsonl')",
            )

    found = installed_plugins()
    check_name(destination, found)
    return make_safe(load_plugin(found[destination]), destination)


def check_name(destination: str, installed: Mapping[str, Any] | None = None) -> None:
    """Raise `UsageError` if there is no destination with this name."""
    known = {*NAMES, *configured, *(installed_plugins() if installed is None else installed)}
    if destination not in known:
        accepted = ", ".join(sorted(known))
        raise UsageError(f"events: {destination!r} is unknown; accepted: {accepted}")


RENDEZVOUS = "dynamic_rendezvous"
"""The destination of rendezvous events; it has no handler unless one is configured."""


def record(event: Event, destination: str = DEFAULT) -> None:
    """Record an event. Raises `UsageError` for an unknown destination, and nothing else."""
    find(destination).record(stamped(event))


def stamped(event: Any) -> Any:
    """Return a copy with a timestamp. The copy is queued, so the caller may change the original."""
    other = object.__new__(type(event))
    other.__dict__.update(event.__dict__)
    if isinstance(event.metadata, dict):
        other.metadata = {**event.metadata}
    if not event.timestamp:
        other.timestamp = time.time_ns() // 1_000_000
    return other


def record_rdzv_event(event: RdzvEvent) -> None:
    """Record an event of the rendezvous."""
    known: Any = event  # A handler of this destination receives only `RdzvEvent`s.
    find(RENDEZVOUS).record(known)
