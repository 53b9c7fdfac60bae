from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.elastic._impl.static_tcp_rendezvous import StaticTCPRendezvous
from holdfast.errors import UsageError
from holdfast.net.listening import ReservedPort


def test_nodes_keep_their_configured_ranks() -> None:
    with ReservedPort() as port:
        nodes = [
            StaticTCPRendezvous("127.0.0.1", port.number, rank, 2, "job", 30) for rank in (1, 0)
        ]
        try:
            with ThreadPoolExecutor(2) as pool:
                infos = list(pool.map(lambda node: node.next_rendezvous(), nodes))
            assert [(info.rank, info.world_size) for info in infos] == [(1, 2), (0, 2)]
            infos[0].store.set("key", "value")
            assert infos[1].store.get("key") == b"value"
            assert (nodes[0].master_addr, nodes[0].master_port) == ("127.0.0.1", port.number)
            assert (nodes[0].rank, nodes[0].world_size, nodes[0].run_id) == (1, 2, "job")
            assert {node.get_backend() for node in nodes} == {"static"}
            assert {node.num_nodes_waiting() for node in nodes} == {0}
        finally:
            for node in nodes:
                assert node.shutdown()


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_of_the_job_is_rejected(rank: int) -> None:
    with pytest.raises(UsageError, match=r"^--node-rank: .* accepted: 0 to 1$"):
        StaticTCPRendezvous("host", 1, rank, 2, "job", 30)
