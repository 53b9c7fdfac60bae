"""Which handler serves which `--rdzv-backend`: the registry, and the names it has from the start.

The backends themselves are imported by the first job that asks for them. Plug-ins are looked for
when a name is asked for that is not registered: the look alone takes longer than an agent's start.
So a plug-in never takes the place of a name that is; that it does not is said at that look.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.errors import UsageError
from holdfast.rendezvous import plugins
from holdfast.rendezvous.handler import RendezvousHandler
from holdfast.rendezvous.parameters import RendezvousParameters

RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Creators of handlers by the name of their backend."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Give a name its creator. A name that has another one keeps it: that is a `ValueError`."""
        if not backend:
            raise UsageError("the name of a rendezvous backend is empty")
        if self._creators.setdefault(backend, creator) is not creator:
            raise UsageError(
                f"the rendezvous backend {backend!r} is registered already, with "
                f"{self._creators[backend]!r}"
            )

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Return a new handler of the backend that the parameters name."""
        creator = self._creators.get(params.backend) or self._find(params.backend)
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"the handler made for the backend {params.backend!r} says it is "
                f"{handler.get_backend()!r}"
            )
        return handler

    def _find(self, backend: str) -> RendezvousHandlerCreator:
        """Return the creator for a name that is not registered."""
        raise UsageError(
            f"--rdzv-backend: {backend!r} is unknown; accepted: {', '.join(sorted(self._creators))}"
        )


class RegistryWithPlugins(RendezvousHandlerRegistry):
    """A registry that knows the installed plug-ins too."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: set[str] = set()

    def _find(self, backend: str) -> RendezvousHandlerCreator:
        found = plugins.installed()
        for name in sorted(found.keys() & self._creators.keys() - self._loaded):
            plugins.warn_shadowed(found[name])
        creator = plugins.load(found[backend]) if backend in found else None
        if creator is None:
            return super()._find(backend)
        self.register(backend, creator)
        self._loaded.add(backend)
        return creator


def _create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    if str(params.get("store_type", "")).strip().lower() == "file":
        return _create_file(params)
    from holdfast.rendezvous.coordinated import create_coordinated_handler

    return create_coordinated_handler(params)


def _create_static(params: RendezvousParameters) -> RendezvousHandler:
    from holdfast.rendezvous.coordinated import create_static_handler

    return create_static_handler(params)


def _create_file(params: RendezvousParameters) -> RendezvousHandler:
    from holdfast.rendezvous.file_backend import create_file_handler

    return create_file_handler(params)


def _create_on_etcd(params: RendezvousParameters) -> RendezvousHandler:
    from holdfast.rendezvous.etcd_handler import create_etcd_handler

    return create_etcd_handler(params)


rendezvous_handler_registry: RendezvousHandlerRegistry = RegistryWithPlugins()
for _name, _creator in {
    "c10d": _create_c10d,
    "holdfast": _create_c10d,
    "static": _create_static,
    "file": _create_file,
    "etcd": _create_on_etcd,
    "etcd-v2": _create_on_etcd,
}.items():
    rendezvous_handler_registry.register(_name, _creator)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return a new handler of the backend that the parameters name, from the global registry."""
    return rendezvous_handler_registry.create_handler(params)
