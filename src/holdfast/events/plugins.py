"""Handlers from other packages, by the entry point group `holdfast.event_handlers`.

An entry point `name = module:attribute` is called without arguments and returns a handler for
`--event-log-handler name`: its class, or a function. TorchElastic has no such group. Only the
plug-in that is asked for is loaded, since loading one may import anything.
"""

from __future__ import annotations

from typing import Any

from holdfast import messages
from holdfast.errors import UsageError

GROUP = "holdfast.event_handlers"


def installed() -> dict[str, Any]:
    """Return the entry points of all plug-ins by name; none of them is loaded."""
    from importlib.metadata import entry_points

    return {one.name: one for one in entry_points(group=GROUP)}


def load(plugin: Any) -> Any:
    """Return the handler that a plug-in makes; raise `UsageError` if it makes none."""
    try:
        return plugin.load()()
    except (Exception, SystemExit) as problem:  # A module that exits when it is imported included.
        what = f"the event handler {plugin.name!r} ({plugin.value})"
        raise UsageError(f"{what} cannot be made: {messages.of(problem)}") from problem
