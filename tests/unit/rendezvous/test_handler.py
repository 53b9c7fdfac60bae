from __future__ import annotations

from typing import Any

import pytest

from holdfast.rendezvous.handler import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from holdfast.store.memory import MemoryStore

METHODS = {
    "get_backend",
    "get_run_id",
    "is_closed",
    "next_rendezvous",
    "num_nodes_waiting",
    "set_closed",
    "shutdown",
}


def test_what_a_handler_must_have() -> None:
    assert RendezvousHandler.__abstractmethods__ == METHODS


@pytest.mark.torch
def test_a_handler_written_for_torch_has_all_that_is_needed() -> None:
    from torch.distributed.elastic.rendezvous import RendezvousHandler as Torch

    assert Torch.__abstractmethods__ == METHODS
    assert Torch.use_agent_store.fget(None) is False


def test_what_a_handler_is_unless_it_says_otherwise() -> None:
    handler: Any = object.__new__(type("Bare", (RendezvousHandler,), dict.fromkeys(METHODS)))
    assert handler.use_agent_store is False
    assert handler.polls_membership is True


def test_a_round_cannot_be_changed() -> None:
    store = MemoryStore()
    info: Any = RendezvousInfo(store, 2, 5, RendezvousStoreInfo("host", 29400))
    assert (info.store, info.rank, info.world_size) == (store, 2, 5)
    assert info.bootstrap_store_info == RendezvousStoreInfo("host", 29400)
    for name in ("store", "rank", "world_size", "bootstrap_store_info"):
        with pytest.raises(AttributeError):
            setattr(info, name, None)


@pytest.mark.torch
def test_where_workers_meet_is_told_as_by_torch() -> None:
    from torch.distributed.elastic.rendezvous import RendezvousStoreInfo as Torch

    ours, theirs = RendezvousStoreInfo("host", 1), Torch("host", 1)
    assert repr(ours) == repr(theirs)
    assert (ours.MASTER_ADDR_KEY, ours.MASTER_PORT_KEY) == ("MASTER_ADDR", "MASTER_PORT")
    assert (theirs.MASTER_ADDR_KEY, theirs.MASTER_PORT_KEY) == ("MASTER_ADDR", "MASTER_PORT")


def test_the_first_node_says_where_workers_meet() -> None:
    store = MemoryStore()
    first = RendezvousStoreInfo.build(0, store, "10.0.0.1", 29500)
    assert first == RendezvousStoreInfo("10.0.0.1", 29500)
    assert RendezvousStoreInfo.build(3, store, "10.0.0.4", 1) == first
    assert store.get("MASTER_ADDR") == b"10.0.0.1"


@pytest.mark.parametrize("port", [None, 0])
def test_without_a_port_it_is_one_that_is_free(port: int | None) -> None:
    import socket

    info = RendezvousStoreInfo.build(0, MemoryStore(), "::1", port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", info.master_port))


def test_without_an_address_it_is_the_name_of_the_host_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    import os

    caplog.set_level("INFO", "holdfast")
    info = RendezvousStoreInfo.build(0, MemoryStore(), None)
    assert info.master_addr == os.uname().nodename
    assert "--local-addr" in caplog.text
