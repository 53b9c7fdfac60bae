"""Properties of every `RendezvousBackend`, independent of where its state is stored."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.elastic._impl.c10d_backend import C10dRendezvousBackend
from holdfast.elastic._impl.etcd_backend import EtcdRendezvousBackend
from holdfast.etcd.etcd_settings import EtcdSettings
from holdfast.etcd.sync_client import EtcdClient
from holdfast.rendezvous.file_backend import FileRendezvousBackend
from holdfast.store.file_store import FileStore
from holdfast.store.memory_store import MemoryStore
from holdfast.store.tcp.store_client import TCPStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from holdfast.rendezvous.backend_handler import RendezvousBackend

OURS = ["memory store", "file store", "tcp store", "file", "etcd"]
TORCHS = ["HashStore", "FileStore", "TCPStore"]


def store_of(kind: str, folder: Path, tcp_store: Any) -> Any:
    if kind == "memory store":
        return MemoryStore()
    if kind == "file store":
        return FileStore(folder)
    from torch import distributed

    if kind == "HashStore":
        return distributed.HashStore()
    if kind == "FileStore":
        return distributed.FileStore(str(folder / "file"))
    return distributed.PrefixStore(str(folder), tcp_store)


@pytest.fixture(params=[*OURS, *(pytest.param(one, marks=pytest.mark.torch) for one in TORCHS)])
def another(
    request: pytest.FixtureRequest, tmp_path: Path, tcp_store: Any, etcd_port: int
) -> Iterator[Callable[[], RendezvousBackend]]:
    """A factory of backends on the same state, as different nodes have them."""
    if request.param == "file":
        yield lambda: FileRendezvousBackend(tmp_path / "state")
    elif request.param == "etcd":
        with closing(EtcdClient(EtcdSettings(endpoints=(("127.0.0.1", etcd_port),)))) as client:
            yield lambda: EtcdRendezvousBackend(client, "job", str(tmp_path))
    elif request.param == "tcp store":
        with ExitStack() as stores:
            server = stores.enter_context(TCPStore("localhost", 0, is_master=True))
            yield lambda: C10dRendezvousBackend(stores.enter_context(server.clone()), "job")
    else:
        store = store_of(request.param, tmp_path, tcp_store)
        yield lambda: C10dRendezvousBackend(store, "job")


@pytest.fixture
def backend(another: Callable[[], RendezvousBackend]) -> RendezvousBackend:
    return another()


def won(backend: RendezvousBackend, state: bytes, token: object = None) -> Any:
    """Set a state that must be accepted, and return its token."""
    answer = backend.set_state(state, token)
    assert answer is not None
    assert answer[0::2] == (state, True)
    return answer[1]


@pytest.mark.parametrize("state", [b"", b"\x00 any bytes \xff\n", bytes(range(256)) * 4_000])
def test_state_is_read_as_written(backend: RendezvousBackend, state: bytes) -> None:
    token = won(backend, state)
    assert backend.get_state() == (state, token)


def test_other_nodes_read_the_state(another: Callable[[], RendezvousBackend]) -> None:
    one, other = another(), another()
    token = won(one, b"one")
    assert other.get_state() == (b"one", token)
    newer = won(other, b"two", token)
    assert one.get_state() == (b"two", newer)


def test_only_the_first_write_needs_no_token(backend: RendezvousBackend) -> None:
    token = won(backend, b"one")
    assert backend.set_state(b"two") == (b"one", token, False)
    assert backend.get_state() == (b"one", token)


def test_old_token_is_rejected(backend: RendezvousBackend) -> None:
    old = won(backend, b"one")
    new = won(backend, b"two", old)
    assert backend.set_state(b"three", old) == (b"two", new, False)
    assert backend.get_state() == (b"two", new)


def test_rejected_writer_continues_with_the_returned_state(backend: RendezvousBackend) -> None:
    old = won(backend, b"one")
    won(backend, b"two", old)
    shown = backend.set_state(b"three", old)
    assert shown is not None
    won(backend, b"three", shown[1])


def test_token_without_a_state_is_rejected(backend: RendezvousBackend) -> None:
    assert backend.set_state(b"one", b"c29tZXRoaW5n") is None
    assert backend.get_state() is None


def test_one_of_two_equal_writes_wins(
    another: Callable[[], RendezvousBackend],
) -> None:
    old = won(another(), b"old")
    new = won(another(), b"same", old)
    assert another().set_state(b"same", old) == (b"same", new, False)


def test_same_state_may_be_written_again(backend: RendezvousBackend) -> None:
    token = won(backend, b"same")
    won(backend, b"same", token)


def test_concurrent_threads_lose_no_write(another: Callable[[], RendezvousBackend]) -> None:
    def count_up(_: int) -> None:
        backend = another()
        while True:
            found = backend.get_state()
            number, token = (int(found[0]), found[1]) if found else (0, None)
            answer = backend.set_state(str(number + 1).encode(), token)
            if answer is not None and answer[2]:
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count_up, range(20)))
    found = another().get_state()
    assert found is not None
    assert found[0] == b"20"
