"""Which handler gets the events of which destination, and `record`, which gives it one.

A destination is a name. It is looked up in this order: what `configure` was given; what a program
put into TorchElastic's table `_log_handlers`; our own names; plug-ins. `null` is the default, so
`configure(MyEventHandler())` is enough.

A plug-in is an entry point `name = module:attribute` of the group `holdfast.event_handlers`. It is
called without arguments and returns a handler for `--event-log-handler name`. Only the plug-in that
is asked for is loaded, since loading one may import anything.

Recording never raises on account of a handler; only an unknown destination is an error.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from holdfast import console
from holdfast.errors import UsageError
from holdfast.observe.events.event import NodeState, RdzvEvent
from holdfast.observe.events.handlers import EventHandler, NullEventHandler
from holdfast.observe.safe_handler import SafeHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from typing import Any

    from holdfast.observe.events.event import Event


GROUP = "holdfast.event_handlers"


def installed_plugins() -> dict[str, Any]:
    """Return the entry points of all plug-ins by name; none of them is loaded."""
    from importlib.metadata import entry_points

    return {one.name: one for one in entry_points(group=GROUP)}


def load_plugin(plugin: Any) -> Any:
    """Return the handler that a plug-in makes; raise `UsageError` if it makes none."""
    try:
        return plugin.load()()
    except (Exception, SystemExit) as problem:  # A module that exits when it is imported included.
        what = f"the event handler {plugin.name!r} ({plugin.value})"
        raise UsageError(f"{what} cannot be made: {console.describe(problem)}") from problem


DEFAULT = "null"
NAMES = ("console", "dynamic_rendezvous", "jsonl", "logging", "null", "otel")
FLUSH_S = 5.0
"""How long the end of a job waits for handlers that are not ours."""

_configured: dict[str, SafeHandler] = {}
_added: dict[str, tuple[logging.Handler, SafeHandler]] = {}
_found: dict[str, SafeHandler] = {}


def configure(handler: EventHandler | logging.Handler, destination: str = DEFAULT) -> None:
    """Have a handler get the events of a destination from now on.

    It gets the events of every job of this process, in a thread of its own. The handler it
    replaces is closed, once it has what was recorded so far.
    """
    if not destination:
        raise UsageError("the name of a destination of events is empty")
    guarded = make_safe(handler, destination)
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


def find(destination: str) -> SafeHandler:
    """Return what gets the events of a destination; raise `UsageError` if there is none."""
    if destination in _configured:
        return _configured[destination]
    table = sys.modules.get("holdfast.observe.events.logging_handlers")
    added = table.added(destination) if table is not None else None
    if added is not None:
        return _guard_added(added, destination)
    if destination not in _found:
        _found[destination] = _make(destination)
    return _found[destination]


def _guard_added(handler: logging.Handler, destination: str) -> SafeHandler:
    """Return what guards a handler of TorchElastic's table, the same as long as it is there."""
    old = _added.get(destination)
    if old is not None and old[0] is handler:
        return old[1]
    guarded = make_safe(handler, destination)
    _added[destination] = (handler, guarded)
    if old is not None:
        old[1].close(FLUSH_S)
    return guarded


def make_safe(handler: Any, name: str) -> SafeHandler:
    """Return a handler so that it cannot hurt; one that is not ours gets a thread."""
    if type(handler) is NullEventHandler:
        return SafeHandler(handler, name)
    from holdfast.observe.background import BackgroundHandler

    logging = sys.modules.get("logging")
    if logging is not None and isinstance(handler, logging.Handler):
        from holdfast.observe.events.logging_handlers import LogHandlerSink

        if isinstance(handler, logging.NullHandler):
            return SafeHandler(NullEventHandler(), name)
        handler = LogHandlerSink(handler, name)
    if isinstance(handler, type) or not callable(getattr(handler, "record", None)):
        raise UsageError(
            f"{handler!r} is no event handler: it has no method record",
            hint="derive from holdfast.events.EventHandler",
        )
    return BackgroundHandler(handler, f"{name!r} ({type(handler).__name__})")


def flush(limit_s: float = FLUSH_S) -> None:
    """Wait until every handler has the events recorded so far, each for at most so long."""
    added = [guarded for _, guarded in _added.values()]
    for guarded in [*_configured.values(), *added, *_found.values()]:
        guarded.flush(limit_s)


def get_logging_handler(destination: str = DEFAULT) -> logging.Handler:
    """Return a destination as a `logging.Handler`; raise `KeyError` if there is none."""
    from holdfast.observe.events.logging_handlers import log_handler

    try:
        return log_handler(destination)
    except UsageError:
        raise KeyError(destination) from None


def _make(destination: str) -> SafeHandler:
    match destination:
        case "null" | "dynamic_rendezvous":
            return SafeHandler(NullEventHandler(), destination)
        case "console":
            from holdfast.observe.events.handlers import ConsoleEventHandler

            return SafeHandler(ConsoleEventHandler(), destination)
        case "logging":
            from holdfast.observe.events.logging_handlers import LoggingEventHandler

            return make_safe(LoggingEventHandler(), destination)
        case "otel":
            from holdfast.observe.events.otel import OpenTelemetryEventHandler

            return make_safe(OpenTelemetryEventHandler(), destination)
        case "jsonl":
            raise UsageError(
                "events: 'jsonl' needs a folder, which only a job has",
                hint="configure(JsonLinesEventHandler(folder), 'jsonl') names one",
            )

    found = installed_plugins()
    if destination in found:
        return make_safe(load_plugin(found[destination]), destination)
    accepted = sorted({*NAMES, *_configured, *found})
    raise UsageError(f"events: {destination!r} is unknown; accepted: {', '.join(accepted)}")


RENDEZVOUS = "dynamic_rendezvous"
"""The destination of events of the rendezvous; it has no handler unless one is configured."""


def record(event: Event, destination: str = DEFAULT) -> None:
    """Record an event. Raises `UsageError` if there is no such destination, and nothing else."""
    find(destination).record(stamped(event))


def stamped(event: Any) -> Any:
    """Return the event as it is now, with the time in it: it may wait, and the caller goes on."""
    other = object.__new__(type(event))
    other.__dict__.update(event.__dict__)
    if isinstance(event.metadata, dict):
        other.metadata = {**event.metadata}
    if not event.timestamp:
        other.timestamp = time.time_ns() // 1_000_000
    return other


def record_rdzv_event(event: RdzvEvent) -> None:
    """Record an event of the rendezvous."""
    known: Any = event  # A handler for this destination gets these, and no other events.
    find(RENDEZVOUS).record(known)


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Make an event of the rendezvous and record it; do nothing if nobody gets such events.

    Its name says who called: the file, and `name` or else the function. If the node failed, the
    traceback of the exception that is being handled is in it.
    """
    if not is_recorded(RENDEZVOUS):
        return
    caller = sys._getframe(1).f_code
    trace = ""
    if node_state == NodeState.FAILED:
        import traceback

        trace = traceback.format_exc()
    record_rdzv_event(
        RdzvEvent(
            name=f"{os.path.basename(caller.co_filename)}:{name or caller.co_name}",
            run_id=run_id,
            message=message,
            hostname=hostname or os.uname().nodename,
            pid=pid or os.getpid(),
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=trace,
        )
    )
