"""What only a store in etcd does; what all stores do is in tests/contract."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import UsageError
from holdfast.etcd.settings import EtcdSettings
from holdfast.etcd.store import EtcdStore
from holdfast.etcd.sync_client import EtcdClient
from holdfast.store import DistNetworkError, DistStoreError, PrefixStore
from real_etcd import Etcd, running_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Those with a question mark are ones that TorchElastic's store loses.
ODD_KEYS = ["", "ab?", "a/", "a//b", "/", "?>", "a\x1fv", "\x1f", "\0", "é\n", "k" * 3000]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def client_of(etcd: Etcd) -> EtcdClient:
    return EtcdClient(EtcdSettings(endpoints=(("127.0.0.1", etcd.port),)))


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdClient]:
    with client_of(etcd) as made:
        yield made


@pytest.fixture
def store(client: EtcdClient, tmp_path: Path) -> EtcdStore:
    return EtcdStore(client, str(tmp_path))


def test_values_are_kept_as_they_are_behind_the_prefix(etcd: Etcd, store: EtcdStore) -> None:
    store.set("a/key", b"\x00\xff")
    assert store.prefix.endswith("/")
    (place,) = etcd.keys(store.prefix.encode())
    assert place == store.prefix.encode() + b"\x1fka/key\x1fv"
    assert etcd.get(place) == b"\x00\xff"


def test_odd_keys(store: EtcdStore) -> None:
    for number, key in enumerate(ODD_KEYS):
        store.set(key, str(number))
        store.queue_push(key, "one")
    for number, key in enumerate(ODD_KEYS):
        assert store.get(key) == str(number).encode()
        assert store.add(key, 1) == number + 1
    assert sorted(store.list_keys()) == sorted(ODD_KEYS)
    assert store.num_keys() == len(ODD_KEYS)
    assert all(store.delete_key(key) for key in ODD_KEYS)
    assert store.list_keys() == []
    assert [store.queue_pop(key) for key in ODD_KEYS] == [b"one"] * len(ODD_KEYS)
    assert not store.check([""])


def test_neighbours_are_not_seen(client: EtcdClient, tmp_path: Path) -> None:
    names = [str(tmp_path), f"{tmp_path}/below", f"{tmp_path}x", f"{tmp_path}/k"]
    stores = [EtcdStore(client, name) for name in names]
    for store in stores:
        store.multi_set(["key", "below/key"], [store.prefix] * 2)
        store.queue_push("queue", store.prefix)
    for store in stores:
        assert sorted(store.list_keys()) == ["below/key", "key"]
        assert store.get("below/key") == store.prefix.encode()
        assert store.queue_len("queue") == 1
    assert EtcdStore(client, f"{tmp_path}/").num_keys() == 2  # The slash is there anyhow.


def test_more_keys_than_a_transaction_has(store: EtcdStore) -> None:
    keys = [f"key {number}" for number in range(300)]
    store.multi_set(keys, keys)
    assert store.multi_get(keys) == [key.encode() for key in keys]
    store.wait(keys)
    assert store.check(keys)
    assert not store.check([*keys, "another"])
    assert store.num_keys() == 300


def test_values_that_together_are_too_large_for_one_transaction(store: EtcdStore) -> None:
    value = b"x" * 900_000
    store.multi_set(["a", "b", "c"], [value] * 3)
    assert store.multi_get(["a", "b", "c"]) == [value] * 3


def test_a_value_that_is_too_large_is_refused(etcd: Etcd, store: EtcdStore) -> None:
    with pytest.raises(DistStoreError, match=rf"^etcd at {etcd.endpoint}: .*too large"):
        store.set("key", b"x" * 2_000_000)
    assert not store.check(["key"])


def test_many_clients_add_at_once(etcd: Etcd, store: EtcdStore) -> None:
    def add(_: int) -> list[int]:
        with client_of(etcd) as client:
            mine = EtcdStore(client, store.prefix)
            return [mine.add("count", 1) for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        totals = sorted(total for some in pool.map(add, range(8)) for total in some)
    assert totals == list(range(1, 81))


def test_a_part_of_it(store: EtcdStore) -> None:
    part = PrefixStore("some", store)
    part.set("key", "1")
    part.barrier("here", 1)
    assert sorted(part.list_keys()) == ["here", "key"]
    assert store.get("some/key") == b"1"


def test_times(client: EtcdClient, tmp_path: Path) -> None:
    assert EtcdStore(client, str(tmp_path)).timeout == timedelta(seconds=300)
    store = EtcdStore(client, str(tmp_path), timedelta(seconds=7))
    assert store.timeout == store.clone().timeout == timedelta(seconds=7)


def test_a_time_to_live_is_a_time(client: EtcdClient) -> None:
    with pytest.raises(UsageError, match="ttl_s: -1"):
        EtcdStore(client, "/some", ttl_s=-1)


def test_without_a_time_to_live_there_is_no_lease(etcd: Etcd, store: EtcdStore) -> None:
    store.set("key", "1")
    assert etcd.leases() == []


def test_a_client_of_the_callers_is_not_closed(etcd: Etcd, tmp_path: Path) -> None:
    with client_of(etcd) as client:
        with EtcdStore(client, str(tmp_path)) as store:
            store.set("key", "1")
        assert store.get("key") == b"1"
    with pytest.raises(DistStoreError, match="the client is closed"):
        store.get("key")


def test_a_client_of_its_own_is_closed(etcd: Etcd, tmp_path: Path) -> None:
    with EtcdStore(client_of(etcd), str(tmp_path), closes_client=True) as store:
        store.clone().close()
        store.set("key", "1")
    with pytest.raises(DistStoreError, match="the client is closed"):
        store.set("key", "2")


def test_an_etcd_that_is_not_there(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path)
    try:
        with client_of(etcd) as client:
            store = EtcdStore(client, "/some")
            for call in (lambda: store.set("key", "1"), lambda: store.get("key")):
                with pytest.raises(DistNetworkError, match=f"etcd at {etcd.endpoint}"):
                    call()
    finally:
        etcd.close()
