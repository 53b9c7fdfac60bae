from __future__ import annotations

import errno
import os
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.net.listening import ReservedPort
from holdfast.rendezvous import worker_store
from holdfast.rendezvous.worker_store import SingleNodeHandler, WorkerStore
from holdfast.store.store_errors import DistNetworkError
from holdfast.store.tcp.store_client import TCPStore

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 60


def begin(stores: WorkerStore, generation: int, rank: int = 0, number: int = 0) -> None:
    """Begin a generation of two nodes on this host."""
    stores.begin(generation, rank=rank, size=2, host="127.0.0.1", number=number, key=bytes(32))


@pytest.fixture
def stores() -> Iterator[WorkerStore]:
    made = WorkerStore(ports=3)
    yield made
    made.close()


def test_each_generation_has_an_empty_store_on_its_own_port(stores: WorkerStore) -> None:
    first = stores.open(0)
    with TCPStore("127.0.0.1", first) as before:
        before.set("key", "old")
        second = stores.open(1)
        assert first != second
        assert not {first, second} & {*stores.numbers}
        with TCPStore("127.0.0.1", second) as after:
            assert not after.check(["key"])
            after.set("key", "new")
            # A late worker still has the old store, and only that.
            assert before.get("key") == b"old"


def test_former_first_node_keeps_its_store_for_one_generation(stores: WorkerStore) -> None:
    port = stores.numbers[0]
    begin(stores, 0, number=port)
    assert stores.is_serving
    with TCPStore("127.0.0.1", port) as store:
        store.set("key", "value")
        begin(stores, 1, rank=1)
        assert not stores.is_serving
        assert store.get("key") == b"value"
        begin(stores, 2, rank=1)
        with pytest.raises(DistNetworkError):
            store.get("key")


@pytest.mark.parametrize(("access", "warnings"), [("hosts", 1), ("open", 0), ("private", 0)])
def test_store_that_must_serve_every_host_causes_a_warning(
    access: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    stores = WorkerStore(ports=1, access=access)
    stores.begin(0, rank=0, size=2, host="127.0.0.1", number=stores.numbers[0], key=b"")
    stores.close()
    assert len(caplog.messages) == warnings


def test_early_worker_waits_for_the_agent(stores: WorkerStore) -> None:
    with socket.create_connection(("127.0.0.1", stores.numbers[0])) as early:
        early.sendall(b"\x00\xce\xf7\x85\x3c" + b"\x0d\x07\x00\x00\x00")
        stores.open(0)
        assert early.recv(4) == b"\x07\x00\x00\x00"


# A store on demand, which its agent serves when the first client connects.


def serving_threads() -> int:
    """Return how many threads of this process were not started by `threading`."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def test_store_on_demand_starts_with_its_first_client(stores: WorkerStore) -> None:
    port, before = stores.open(0, on_demand=True), serving_threads()
    assert stores.is_serving
    assert stores.take_failure() == ""
    assert serving_threads() == before
    with ThreadPoolExecutor() as pool:
        client = pool.submit(TCPStore, "127.0.0.1", port)
        assert select.select([stores.fileno()], [], [], PATIENCE_S)[0]
        assert stores.take_failure() == ""
        with client.result(PATIENCE_S) as store:
            store.set("key", "value")
            assert select.select([stores.fileno()], [], [], 0)[0] == []
            assert store.get("key") == b"value"


def test_store_on_demand_can_be_served_immediately(stores: WorkerStore) -> None:
    port = stores.open(0, on_demand=True)
    for _ in range(2):
        stores.serve_now()
    with TCPStore("127.0.0.1", port) as store:
        store.set("key", "value")


def test_unused_store_on_demand_is_replaced() -> None:
    reserved = ReservedPort()
    number = reserved.number
    reserved.release()
    stores = WorkerStore(number=number)
    try:
        assert [stores.open(generation, on_demand=True) for generation in (0, 1)] == [number] * 2
        stores.serve_now()
        with TCPStore("127.0.0.1", number) as store:
            store.set("key", "value")
    finally:
        stores.close()
    assert stores.fileno() == -1


def test_port_is_never_used_twice(stores: WorkerStore) -> None:
    given = []
    for generation in range(40):
        port = stores.numbers[0]
        begin(stores, generation, number=port)
        given.append(port)
    assert len({*given}) == 40
    for port in given[:-2]:
        with socket.socket() as late:
            assert late.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_port_of_a_skipped_generation_is_released(stores: WorkerStore) -> None:
    """Workers of other nodes may have connected to it, and their connections would wait there."""
    missed, port, kept = stores.numbers
    with socket.create_connection(("127.0.0.1", missed)) as late:
        begin(stores, 1, number=port)
        assert stores.numbers[0] == kept
        assert not {missed, port} & {*stores.numbers}
        with pytest.raises(ConnectionResetError):
            late.recv(1)


def test_reserving_skips_a_port_that_was_already_used() -> None:
    stores = WorkerStore(ports=2)
    first = stores.open(0)
    stores.open(1)
    held = [ReservedPort() for _ in range(3)]
    stores._used_numbers |= {one.number for one in held}
    for one in held:
        one.release()
    stores.open(2)
    assert not {*stores.numbers} & {first, *(one.number for one in held)}
    stores.close()


def test_port_from_an_older_list_is_still_served(stores: WorkerStore) -> None:
    first = stores.open(0)
    for generation in (1, 2):
        stores.open(generation)
    begin(stores, 3, number=first)
    with TCPStore("127.0.0.1", first) as store:
        assert store.add("count", 1) == 1


def test_user_port_serves_every_generation() -> None:
    with ReservedPort() as chosen:
        number = chosen.number
    stores = WorkerStore(number=number)
    for generation in range(3):
        assert stores.open(generation) == number
        with TCPStore("127.0.0.1", number) as store:
            assert store.add("count", 1) == 1
    assert stores.is_serving
    stores.close()
    assert not stores.is_serving


def test_close_releases_everything() -> None:
    before = os.listdir("/proc/self/fd"), threading.enumerate()
    stores = WorkerStore(ports=4)
    port = stores.open(0)
    with socket.create_connection(("127.0.0.1", port)):
        stores.open(1)
        stores.close()
        stores.close()
    assert (os.listdir("/proc/self/fd"), threading.enumerate()) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_occupied_port_leaks_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(EnvironmentProblem, match="in use"):
            WorkerStore(number=taken.getsockname()[1])
        assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(("value", "asked"), [("1", True), ("0", False), (None, False)])
def test_torchelastic_variable_makes_workers_serve(
    monkeypatch: pytest.MonkeyPatch, value: str | None, asked: bool
) -> None:
    monkeypatch.delenv(worker_store.WORKERS_SERVE_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(worker_store.WORKERS_SERVE_ENV, value)
    assert worker_store.workers_serve_by_environment() is asked


# The handler of one node, which serves such a store.


def test_each_round_of_one_node_has_its_own_store_and_port() -> None:
    handler = SingleNodeHandler("job")
    one, other = handler.next_rendezvous(), handler.next_rendezvous()
    assert (one.rank, one.world_size, handler.num_nodes_waiting()) == (0, 1, 0)
    assert one.store is not other.store
    ports = [info.bootstrap_store_info.master_port for info in (one, other)]
    assert ports[0] != ports[1]
    assert one.bootstrap_store_info.master_addr == "127.0.0.1"
    with socket.socket() as taken:
        address = ("127.0.0.1", other.bootstrap_store_info.master_port)
        with pytest.raises(OSError, match="in use"):
            taken.bind(address)
        assert handler.shutdown()
        taken.bind(address)
    assert handler.is_closed()


def test_chosen_worker_address_is_passed_on_without_reserving() -> None:
    before = os.listdir("/proc/self/fd")
    handler = SingleNodeHandler(
        "job", master_addr="10.1.2.3", master_port=29555, workers_serve=True
    )
    where = handler.next_rendezvous().bootstrap_store_info
    assert (where.master_addr, where.master_port) == ("10.1.2.3", 29555)
    assert not handler.use_agent_store
    assert os.listdir("/proc/self/fd") == before


def test_store_is_served_on_the_chosen_port() -> None:
    with ReservedPort() as reserved:
        port = reserved.number
    handler = SingleNodeHandler("job", master_port=port)
    where = handler.next_rendezvous().bootstrap_store_info
    assert where.master_port == port
    socket.create_connection((where.master_addr, port)).close()
    handler.shutdown()
