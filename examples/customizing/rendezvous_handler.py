"""A custom rendezvous, for nodes that have numbers and share a folder.

Run it. It starts two nodes on this machine, each in its own process:

    python examples/customizing/rendezvous_handler.py
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ProcessPoolExecutor

from holdfast.elastic import rendezvous
from holdfast.launcher import LaunchConfig, elastic_launch
from holdfast.store import FileStore, PrefixStore


class Numbered(rendezvous.RendezvousHandler):
    """Node 0 stores the workers' address in the folder; the other nodes read it."""

    def __init__(self, params: rendezvous.RendezvousParameters) -> None:
        self._params = params
        self._rounds = 0
        self._closed = False

    def get_backend(self) -> str:
        return "numbered"

    def get_run_id(self) -> str:
        return self._params.run_id

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        number, nodes = int(self._params.get("number")), self._params.max_nodes
        files = FileStore(f"{self._params.endpoint}/{self.get_run_id()}", nodes)
        store = PrefixStore(f"round-{self._rounds}", files)
        self._rounds += 1
        address = rendezvous.RendezvousStoreInfo.build(number, store, self._params.local_addr)
        return rendezvous.RendezvousInfo(store, number, nodes, address)

    def num_nodes_waiting(self) -> int:
        return 0  # No node joins a running job.

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def shutdown(self) -> bool:
        return True


rendezvous.rendezvous_handler_registry.register("numbered", Numbered)


def run_node(number: int, folder: str) -> None:
    config = LaunchConfig(
        min_nodes=2, max_nodes=2, nproc_per_node=1, run_id="ours", max_restarts=0,
        rdzv_backend="numbered", rdzv_endpoint=folder, rdzv_configs={"number": number},
        local_addr="127.0.0.1",
    )  # fmt: skip
    elastic_launch(config, "sh")("-c", "echo worker $RANK of $WORLD_SIZE runs on node $GROUP_RANK")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor() as nodes:
        list(nodes.map(run_node, (0, 1), (folder, folder)))
