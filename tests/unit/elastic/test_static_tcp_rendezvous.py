from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.elastic._impl.static_tcp_rendezvous import StaticTCPRendezvous
from holdfast.errors import UsageError
from holdfast.net.listening import ReservedPort
from holdfast.rendezvous.handler import RendezvousStoreInfo
from holdfast.rendezvous.rendezvous_errors import RendezvousConnectionError
from holdfast.store.tcp.store_client import TCPStore


def test_nodes_share_a_store_at_the_endpoint() -> None:
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
            where = RendezvousStoreInfo("127.0.0.1", port.number)
            assert [info.bootstrap_store_info for info in infos] == [where, where]
            with TCPStore("127.0.0.1", port.number) as worker:
                assert worker.get("job/key") == b"value"
            assert nodes[0].next_rendezvous().store.get("key") == b"value"
            assert (nodes[0].master_addr, nodes[0].master_port) == ("127.0.0.1", port.number)
            assert (nodes[0].rank, nodes[0].world_size, nodes[0].run_id) == (1, 2, "job")
            assert {node.get_backend() for node in nodes} == {"static"}
            assert {node.num_nodes_waiting() for node in nodes} == {0}
            nodes[0].set_closed()
            assert not nodes[0].is_closed()
        finally:
            for node in nodes:
                assert node.shutdown()


def test_missing_node_0_is_a_connection_error() -> None:
    with ReservedPort() as port:
        node = StaticTCPRendezvous("127.0.0.1", port.number, 1, 2, "job", 0.01)
        with pytest.raises(RendezvousConnectionError, match=rf"127.0.0.1:{port.number}"):
            node.next_rendezvous()


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_of_the_job_is_rejected(rank: int) -> None:
    with pytest.raises(UsageError, match=r"^--node-rank: .* accepted: 0 to 1$"):
        StaticTCPRendezvous("host", 1, rank, 2, "job", 30)
