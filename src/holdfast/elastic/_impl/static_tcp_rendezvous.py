"""`StaticTCPRendezvous`: the handler of `static`, with TorchElastic's constructor."""

from __future__ import annotations

from holdfast.errors import UsageError
from holdfast.net.endpoints import format_endpoint
from holdfast.rendezvous.coordinator_handler import StaticHandler
from holdfast.rendezvous.rdzv_conf import RendezvousParameters


class StaticTCPRendezvous(StaticHandler):
    """A rendezvous of nodes with fixed ranks and the address of the first node."""

    def __init__(
        self,
        master_addr: str,
        master_port: int,
        rank: int,
        world_size: int,
        run_id: str,
        timeout: float,
    ) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(
                f"--node-rank: {rank} is not a rank of {world_size} nodes; accepted: "
                f"0 to {world_size - 1}"
            )
        params = RendezvousParameters(
            "static",
            format_endpoint(master_addr, master_port),
            run_id,
            world_size,
            world_size,
            rank=rank,
            timeout=timeout,
        )
        super().__init__(params, rank)
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = timeout
