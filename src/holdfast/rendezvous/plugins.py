"""Handlers from other packages, found by the entry point group that TorchElastic reads too.

An entry point `name = module:attribute` of the group `torchrun.handlers` is called without
arguments and returns the creator of handlers for `--rdzv-backend name`. The one thing to know: only
the plug-in that is asked for is loaded, since loading one may import anything. A faulty one is told
of and passed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.rendezvous.handler import RendezvousHandler
    from holdfast.rendezvous.parameters import RendezvousParameters

GROUP = "torchrun.handlers"
OUR_OWN = "holdfast."
"""The module of our own entry point begins like this; it is for torchrun alone."""


def installed() -> dict[str, Any]:
    """Return the entry points of all plug-ins by name; none of them is loaded."""
    from importlib.metadata import entry_points

    found = entry_points(group=GROUP)
    return {one.name: one for one in found if not one.value.startswith(OUR_OWN)}


def load(plugin: Any) -> Callable[[RendezvousParameters], RendezvousHandler] | None:
    """Return the creator that a plug-in brings, or None, with a warning, if it is faulty."""
    try:
        creator = plugin.load()()
    except Exception as problem:  # noqa: BLE001 (a plug-in may raise anything)
        _warn(plugin, f"{type(problem).__name__}: {problem}")
        return None
    if not callable(creator):
        _warn(plugin, f"it returned {creator!r}, which creates no handler")
        return None
    return creator  # type: ignore[no-any-return]


def warn_shadowed(plugin: Any) -> None:
    """Say that a plug-in has a name which is taken, and is not used."""
    messages.warning(
        f"the rendezvous plug-in {plugin.name!r} ({plugin.value}) is not used: there is a backend "
        "of this name already"
    )


def _warn(plugin: Any, what: str) -> None:
    line = " ".join(what.split())
    messages.warning(
        f"the rendezvous plug-in {plugin.name!r} ({plugin.value}) cannot be used: {line}"
    )
