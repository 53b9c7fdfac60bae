"""A handler and a plug-in that are nothing but their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.rendezvous.handler import RendezvousHandler, RendezvousInfo

if TYPE_CHECKING:
    from collections.abc import Callable


class AnyHandler(RendezvousHandler):
    def __init__(self, backend: str) -> None:
        self.backend = backend

    def get_backend(self) -> str:
        return self.backend

    def next_rendezvous(self) -> RendezvousInfo:
        raise NotImplementedError

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "job"

    def shutdown(self) -> bool:
        return True


class FakeEntryPoint:
    """Stands in for one of `importlib.metadata`; `thing` is what it loads."""

    value = "package:thing"

    def __init__(self, name: str, thing: Callable[[], object]) -> None:
        self.name = name
        self.thing = thing
        self.loads = 0

    def load(self) -> Callable[[], object]:
        self.loads += 1
        return self.thing
