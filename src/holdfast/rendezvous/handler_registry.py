"""The registry of rendezvous handlers: the built-in backends, and plug-ins.

A job imports only the handler of its own backend. The registry searches for plug-ins only if a name is not
registered, because the search takes longer than the start of an agent. So a plug-in never replaces a registered
name; a search warns about a plug-in whose name is registered.

A plug-in is an entry point `name = module:attribute` of the group `torchrun.handlers`, which TorchElastic reads too.
The registry calls it without arguments, and it returns the creator of handlers for `--rdzv-backend name`. Only the
requested plug-in is loaded, since loading one may import anything. If a plug-in fails to load, the registry
warns and skips the plug-in.

A plug-in is usually written for TorchElastic, and may check for torch's `RendezvousParameters`. So its parameters
are also an instance of torch's class once torch is imported, even if the creator imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from holdfast import console, plugins
from holdfast.errors import PluginError, UsageError
from holdfast.rendezvous.backends import Backend
from holdfast.rendezvous.handler import RendezvousHandler
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.rendezvous.rendezvous_errors import naming

GROUP = "torchrun.handlers"
OWN_PREFIX = "holdfast."
"""The prefix of the module of our own entry point, which only torchrun uses."""
METHODS = (
    "get_backend", "get_run_id", "is_closed", "next_rendezvous", "num_nodes_waiting", "set_closed", "shutdown",
)  # fmt: skip
"""What every handler has."""


class PluginParameters(RendezvousParameters):
    """The parameters for a plug-in: for `isinstance`, also torch's, once torch's module is imported."""

    def __init__(self, params: RendezvousParameters) -> None:
        self.__dict__.update(params.__dict__)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        torch = sys.modules.get("torch.distributed.elastic.rendezvous.api")
        return getattr(torch, "RendezvousParameters", PluginParameters)


def installed() -> dict[str, Any]:
    """Return the entry points of all plug-ins by name, without loading them."""
    found = metadata.entry_points(group=GROUP)
    return {one.name: one for one in found if not one.value.startswith(OWN_PREFIX)}


def load(plugin: Any) -> Callable[[RendezvousParameters], RendezvousHandler] | None:
    """Return the creator of a plug-in; warn and return None if it fails to load."""
    try:
        creator = plugin.load()()
    except (Exception, SystemExit) as problem:  # noqa: BLE001 (its module may call `sys.exit`)
        _warn(plugin, f"{type(problem).__name__}: {problem}")
        return None
    if not callable(creator):
        _warn(plugin, f"it returned {creator!r}, which is not callable")
        return None
    return creator  # type: ignore[no-any-return]


def warn_shadowed(plugin: Any) -> None:
    """Warn about a plug-in that is not used because its name is registered."""
    console.warning(
        f"the rendezvous plug-in {plugin.name!r} ({plugin.value}) is not used: a backend with "
        "this name is registered"
    )


def _warn(plugin: Any, what: str) -> None:
    line = " ".join(what.split())
    console.warning(
        f"the rendezvous plug-in {plugin.name!r} ({plugin.value}) failed to load: {line}"
    )


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Creators of handlers by the name of their backend; with `plugins` also those of installed plug-ins."""

    def __init__(self, *, plugins: bool = False) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}
        self._has_plugins = plugins
        self._loaded: dict[str, str] = {}  # Descriptions of the plug-ins by backend.

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Register a creator; raises `UsageError`, a `ValueError`, if the name has another creator."""
        if not backend:
            raise UsageError("the name of a rendezvous backend is empty")
        if self._creators.setdefault(backend, creator) is not creator:
            raise UsageError(
                f"the rendezvous backend {backend!r} is already registered, with "
                f"{self._creators[backend]!r}"
            )

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Return a new handler of `params.backend`."""
        creator = self.creator_of(params.backend)
        if creator is create_built_in:
            return creator(params)
        source = self._loaded.get(params.backend, f"the rendezvous backend {params.backend!r}")
        if params.backend in self._loaded:
            params = PluginParameters(params)
        with naming(source):
            handler = creator(params)
            plugins.require(handler, ("get_backend",), source, "a rendezvous handler")
            name = handler.get_backend()
        if name != params.backend:
            raise PluginError(
                f"{source} created a handler for the backend {params.backend!r} with the name {name!r}"
            )
        plugins.require(handler, METHODS, source, "a rendezvous handler")
        return handler

    def creator_of(self, backend: str) -> RendezvousHandlerCreator:
        """Return the creator of a backend's handlers; raise `UsageError` for an unknown name."""
        return self._creators.get(backend) or self._find(backend)

    def _find(self, backend: str) -> RendezvousHandlerCreator:
        """Return the creator for a name that is not registered."""
        found = installed() if self._has_plugins else {}
        for name in sorted(found.keys() & self._creators.keys() - self._loaded.keys()):
            warn_shadowed(found[name])
        creator = load(found[backend]) if backend in found else None
        if creator is None:
            raise UsageError(
                f"--rdzv-backend: {backend!r} is unknown; accepted: "
                f"{', '.join(sorted(self._creators))}"
            )
        self.register(backend, creator)
        self._loaded[backend] = plugins.note("rendezvous", found[backend])
        return creator


DRIVERS = {
    Backend.C10D: "holdfast.rendezvous.coordinator_handler:create_coordinator_handler",
    Backend.STATIC: "holdfast.rendezvous.coordinator_handler:create_static_handler",
    Backend.FILE: "holdfast.rendezvous.file_backend:create_file_handler",
    Backend.ETCD: "holdfast.rendezvous.etcd_handler:create_etcd_handler",
    Backend.HA: "holdfast.rendezvous.ha_handler:create_ha_handler",
}


def create_built_in(params: RendezvousParameters) -> RendezvousHandler:
    """Return a handler of a built-in backend. A job imports only the handler that it uses."""
    assert params.kind is not None
    module, _, function = DRIVERS[params.kind].partition(":")
    handler: RendezvousHandler = getattr(import_module(module), function)(params)
    return handler


rendezvous_handler_registry = RendezvousHandlerRegistry(plugins=True)
for _backend in Backend:
    for _name in _backend.names:
        rendezvous_handler_registry.register(_name, create_built_in)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return a new handler of `params.backend`, from the global registry."""
    return rendezvous_handler_registry.create_handler(params)
