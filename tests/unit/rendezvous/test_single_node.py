from __future__ import annotations

import os
import socket

import pytest

from holdfast.net.listening import ReservedPort
from holdfast.rendezvous.single_node import SingleNodeHandler
from holdfast.store.memory import MemoryStore


def test_the_round_is_this_node_alone() -> None:
    handler = SingleNodeHandler("job", backend="c10d")
    round_ = handler.next_rendezvous()
    assert (round_.rank, round_.world_size) == (0, 1)
    assert isinstance(round_.store, MemoryStore)
    assert round_.bootstrap_store_info.master_addr == "127.0.0.1"
    assert handler.get_run_id() == "job"
    assert handler.get_backend() == "c10d"
    assert handler.num_nodes_waiting() == 0
    assert handler.use_agent_store
    assert not handler.polls_membership
    handler.shutdown()


def test_every_round_has_a_store_of_its_own_and_the_same_port() -> None:
    handler = SingleNodeHandler("job")
    one, other = handler.next_rendezvous(), handler.next_rendezvous()
    assert one.store is not other.store
    assert one.bootstrap_store_info == other.bootstrap_store_info
    handler.shutdown()


def test_the_port_is_reserved_until_the_shutdown() -> None:
    handler = SingleNodeHandler("job")
    port = handler.next_rendezvous().bootstrap_store_info.master_port
    with socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        assert handler.shutdown()
        other.bind(("127.0.0.1", port))
    assert handler.shutdown()


def test_a_chosen_address_of_a_worker_is_passed_on_and_nothing_is_reserved() -> None:
    before = os.listdir("/proc/self/fd")
    handler = SingleNodeHandler("job", master_addr="10.1.2.3", master_port=29555, worker_store=True)
    where = handler.next_rendezvous().bootstrap_store_info
    assert (where.master_addr, where.master_port) == ("10.1.2.3", 29555)
    assert not handler.use_agent_store
    assert os.listdir("/proc/self/fd") == before


def test_the_store_is_served_at_the_chosen_port() -> None:
    with ReservedPort() as reserved:
        port = reserved.number
    handler = SingleNodeHandler("job", master_port=port)
    where = handler.next_rendezvous().bootstrap_store_info
    assert where.master_port == port
    socket.create_connection((where.master_addr, port)).close()
    handler.shutdown()


@pytest.mark.parametrize("port", [None, 0])
def test_without_a_port_number_one_is_chosen(port: int | None) -> None:
    handler = SingleNodeHandler("job", master_addr="localhost", master_port=port)
    where = handler.next_rendezvous().bootstrap_store_info
    assert where.master_addr == "localhost"
    assert 1024 <= where.master_port <= 65535
    handler.shutdown()


def test_it_is_closed_by_being_told_so_or_by_the_shutdown() -> None:
    handler = SingleNodeHandler("job")
    assert not handler.is_closed()
    handler.set_closed()
    assert handler.is_closed()
    other = SingleNodeHandler("job")
    other.shutdown()
    assert other.is_closed()
