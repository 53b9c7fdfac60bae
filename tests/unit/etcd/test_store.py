"""What only a store in etcd does; what all stores do is in tests/contract."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from holdfast.etcd.settings import EtcdSettings
from holdfast.etcd.store import EtcdStore
from holdfast.etcd.sync_client import EtcdClient
from holdfast.store import DistNetworkError, DistStoreError
from real_etcd import Etcd, running_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
