"""Waits in etcd, with everything that can happen to one."""

from __future__ import annotations

import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.etcd.calls import Request, Txn
from holdfast.etcd.settings import EtcdSettings
from holdfast.etcd.store import TXN_OPS_MAX, EtcdStore
from holdfast.etcd.sync_client import BlockingWatch, EtcdClient
from holdfast.store import DistStoreError, StoreTimeoutError
from real_etcd import LOOK_AGAIN_S, PATIENCE_S, Etcd, running_etcd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class SeenClient(EtcdClient):
    """A client whose transactions and watches are seen before they are made."""

    def __init__(self, etcd: Etcd) -> None:
        super().__init__(EtcdSettings(endpoints=(("127.0.0.1", etcd.port),), call_s=2.0))
        self.transactions = self.watches = 0
        self.before_transaction: Callable[[int], object] = int
        self.before_watch: Callable[[int], object] = int

    def call(self, request: Request, limit_s: float | None = None) -> Any:
        if isinstance(request, Txn):
            self.transactions += 1
            self.before_transaction(self.transactions)
        return super().call(request, limit_s)

    def watch(self, key: bytes, end: bytes, start_revision: int) -> BlockingWatch:
        self.watches += 1
        self.before_watch(self.watches)
        return super().watch(key, end, start_revision)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def client(etcd: Etcd) -> Iterator[SeenClient]:
    with SeenClient(etcd) as made:
        yield made


@pytest.fixture
def store(client: SeenClient, tmp_path: Path) -> EtcdStore:
    return EtcdStore(client, str(tmp_path))


def watchers(etcd: Etcd) -> int:
    """Return how many watches etcd has, as it counts them itself."""
    with urllib.request.urlopen(f"{etcd.url}/metrics", timeout=PATIENCE_S) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("etcd_debugging_mvcc_watcher_total "):
                return int(line.split()[1])
    raise AssertionError("it does not say")


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(LOOK_AGAIN_S)


@contextmanager
def waiting(etcd: Etcd, call: Callable[..., Any], *args: Any) -> Iterator[Future[Any]]:
    """Wait in another thread; begin when etcd has the watch."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call, *args)
        until(lambda: watchers(etcd) > 0 or future.done())
        yield future


def test_a_wait_costs_one_look_and_one_watch_however_much_happens(
    etcd: Etcd, client: SeenClient, store: EtcdStore
) -> None:
    with SeenClient(etcd) as others, waiting(etcd, store.get, "key") as getting:
        other = EtcdStore(others, store.prefix)
        for number in range(20):
            other.multi_set(["another", "key2"], [str(number)] * 2)
        other.set("key", "value")
        assert getting.result(PATIENCE_S) == b"value"
    assert (client.transactions, client.watches) == (1, 1)


def test_the_watch_of_a_wait_that_is_over_is_gone(etcd: Etcd, store: EtcdStore) -> None:
    with pytest.raises(StoreTimeoutError, match=etcd.endpoint):
        store.wait(["key"], 0.01)
    with waiting(etcd, store.get, "key") as getting:
        store.set("key", "value")
        getting.result(PATIENCE_S)
    until(lambda: not watchers(etcd))


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_etcd_is_started_again_under_waits(tmp_path: Path, how: str) -> None:
    with (
        running_etcd(tmp_path) as etcd,
        SeenClient(etcd) as client,
        EtcdStore(client, "/some") as store,
        waiting(etcd, store.multi_get, ["one", "two"]) as getting,
    ):
        getattr(etcd, how)()
        etcd.start()
        with SeenClient(etcd) as others:
            EtcdStore(others, "/some").multi_set(["one", "two"], ["1", "2"])
        assert getting.result(PATIENCE_S) == [b"1", b"2"]


def test_etcd_does_not_come_back_in_time(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd, SeenClient(etcd) as client:
        store = EtcdStore(client, "/some")
        with waiting(etcd, store.wait, ["one", "two"], 0.5) as getting:
            etcd.kill()
            with pytest.raises(
                StoreTimeoutError,
                match=rf"one, two .*{etcd.endpoint}",
            ):
                getting.result(PATIENCE_S)


def test_revisions_that_are_forgotten_are_looked_for(
    etcd: Etcd, client: SeenClient, store: EtcdStore
) -> None:
    place = store.prefix.encode() + b"\x1fkkey\x1fv"

    def happen(number: int) -> None:
        if number == 1:
            etcd.put(b"another", b"1")
            etcd.put(place, b"value")
            etcd.put(b"another", b"2")
            etcd.compact()

    client.before_watch = happen
    assert store.get("key") == b"value"
    assert (client.transactions, client.watches) == (2, 1)


def test_a_value_that_went_before_it_was_seen_did_not_come(
    etcd: Etcd, client: SeenClient, store: EtcdStore
) -> None:
    place = store.prefix.encode() + b"\x1fkkey\x1fv"

    def happen(_: int) -> None:
        etcd.put(place, b"value")
        store.delete_key("key")

    client.before_watch = happen
    with pytest.raises(StoreTimeoutError):
        store.wait(["key"], 0.3)


def test_more_keys_than_a_transaction_has_are_there_at_once(
    client: SeenClient, store: EtcdStore
) -> None:
    """The first is gone when the last has come, and no look at either sees that."""
    keys = [f"key {number}" for number in range(TXN_OPS_MAX + 2)]
    store.multi_set(keys[:-1], keys[:-1])
    client.transactions = 0

    def happen(number: int) -> None:
        if number == 2:
            client.before_transaction = int
            store.delete_key(keys[0])
            store.set(keys[-1], "")

    client.before_transaction = happen
    with pytest.raises(StoreTimeoutError, match="key 0"):
        store.wait(keys, 0.3)
    client.before_transaction = int
    store.set(keys[0], "")
    store.wait(keys, 0.3)


def test_a_client_that_is_closed_ends_a_wait(etcd: Etcd, tmp_path: Path) -> None:
    client = SeenClient(etcd)
    with waiting(etcd, EtcdStore(client, str(tmp_path)).get, "key") as getting:
        client.close()
        with pytest.raises(DistStoreError, match="the client is closed"):
            getting.result(PATIENCE_S)


def test_a_pop_that_was_too_slow_waits_on_while_etcd_is_away(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd, SeenClient(etcd) as client, SeenClient(etcd) as others:
        store, other = EtcdStore(client, "/some"), EtcdStore(others, "/some")

        def happen(number: int) -> None:
            if number == 2:  # It was told of a value, and is about to take it.
                other.queue_pop("queue")
            elif number == 3:
                etcd.kill()
            elif number == 4:
                etcd.start()

        client.before_transaction = happen
        with waiting(etcd, store.queue_pop, "queue") as popping:
            other.queue_push("queue", "first")
            until(lambda: client.watches == 2)
            other.queue_push("queue", "second")
            assert popping.result(PATIENCE_S) == b"second"
