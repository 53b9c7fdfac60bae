"""Scripted rounds, and workers that run a shell script, for tests of agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.agent.spec import WorkerSpec
from holdfast.rendezvous.handler import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from holdfast.store.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.store.store_interface import RoundStore


FOREVER_S = 3600.0


class ScriptedRendezvous(RendezvousHandler):
    """In each round this node has `rank` of `world_size`, and a store from `make_store`.

    `waiting` has the results of `num_nodes_waiting`, one for each call; further calls return 0.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        make_store: Callable[[], RoundStore] = MemoryStore,
        waiting: list[int] | None = None,
    ) -> None:
        self._place = (rank, world_size)
        self._make_store = make_store
        self.waiting = waiting or []
        self.rounds = 0
        self.polls = 0

    def get_backend(self) -> str:
        return "scripted"

    def next_rendezvous(self) -> RendezvousInfo:
        self.rounds += 1
        where = RendezvousStoreInfo("master.example", 29000 + self.rounds)
        return RendezvousInfo(self._make_store(), *self._place, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        self.polls += 1
        return self.waiting.pop(0) if self.waiting else 0

    def get_run_id(self) -> str:
        return "job"

    def shutdown(self) -> bool:
        return True


class QuietRendezvous(ScriptedRendezvous):
    """A rendezvous that the agent need not poll for waiting nodes."""

    polls_membership = False


def shell_spec(script: str | None, **settings: Any) -> WorkerSpec:
    """Describe one worker that runs a shell script."""
    return WorkerSpec(
        **{
            "role": "trainer",
            "local_world_size": 1,
            "rdzv_handler": settings.pop("handler", None) or QuietRendezvous(),
            "entrypoint": "/bin/sh",
            "args": ("-c", script),
            "max_restarts": 0,
            # Far too long to be useful, because no test may depend on it.
            "monitor_interval": FOREVER_S,
            **settings,
        }
    )
