"""Stores whose keys have a time to live."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.etcd.calls import KeptAlive, Request
from holdfast.etcd.lease import KeptLease
from holdfast.etcd.settings import EtcdSettings
from holdfast.etcd.store import EtcdStore
from holdfast.etcd.sync_client import EtcdClient, EtcdError
from holdfast.store import DistStoreError
from real_etcd import LOOK_AGAIN_S, PATIENCE_S, Etcd, running_etcd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LONG = 3600


class ListeningClient(EtcdClient):
    """A client that counts the signs of life."""

    def __init__(self, etcd: Etcd) -> None:
        super().__init__(EtcdSettings(endpoints=(("127.0.0.1", etcd.port),)))
        self.signs = threading.Semaphore(0)
        self.missed = threading.Semaphore(0)

    def call(self, request: Request, limit_s: float | None = None) -> Any:
        try:
            answer = super().call(request, limit_s)
        except EtcdError:
            self.missed.release()
            raise
        if isinstance(answer, KeptAlive) and answer.ttl_s:
            self.signs.release()
        return answer


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def client(etcd: Etcd) -> Iterator[ListeningClient]:
    with ListeningClient(etcd) as made:
        yield made
        for lease in etcd.leases():
            made.revoke(lease)


def lease_of(client: EtcdClient, store: EtcdStore, key: str) -> int:
    found = client.get(store.prefix.encode() + b"\x1fk" + key.encode() + b"\x1fv")
    assert found is not None
    return found.lease


def test_all_that_a_store_writes_hangs_on_one_lease(
    etcd: Etcd, client: ListeningClient, tmp_path: Path
) -> None:
    with EtcdStore(client, str(tmp_path), ttl_s=LONG) as store:
        assert (store.check(["key"]), etcd.leases()) == (False, [])
        store.set("key", "1")
        store.add("count", 1)
        store.append("text", "1")
        store.compare_set("compared", "", "1")
        store.barrier("here", 1)
        with store.clone() as clone:
            clone.set("cloned", "1")
        (lease,) = etcd.leases()
        keys = ["key", "count", "text", "compared", "here", "cloned"]
        assert {lease_of(client, store, key) for key in keys} == {lease}
        store.queue_push("queue", "1")
        client.revoke(lease)
        assert etcd.keys(store.prefix.encode()) == []


def test_a_store_gives_signs_of_life_until_it_and_its_clones_are_closed(
    etcd: Etcd, client: ListeningClient, tmp_path: Path
) -> None:
    store = EtcdStore(client, str(tmp_path), ttl_s=2)
    store.set("key", "1")
    clone = store.clone()
    store.close()
    for _ in range(2):
        assert client.signs.acquire(timeout=PATIENCE_S)
    assert clone.get("key") == b"1"
    place = store.prefix.encode() + b"\x1fkkey\x1fv"
    with client.watch(place, b"", etcd.revision() + 1) as watch:
        clone.close()
        (change,) = watch.next(PATIENCE_S)  # It stays for its time, and then it goes.
    assert (change.key, change.value) == (place, None)


def test_a_store_that_is_forgotten_is_kept_no_more(client: ListeningClient, tmp_path: Path) -> None:
    store = EtcdStore(client, str(tmp_path), ttl_s=LONG)
    store.set("key", "1")
    (keeping,) = (one for one in threading.enumerate() if one.name == "holdfast-etcd-lease")
    del store
    gc.collect()
    keeping.join(PATIENCE_S)
    assert not keeping.is_alive()


class CollectingClient(ListeningClient):
    """A client during whose first call the collector finds something."""

    found: Callable[[], None] | None = None

    def call(self, request: Request, limit_s: float | None = None) -> Any:
        found, self.found = self.found, None
        if found is not None:
            found()
        return super().call(request, limit_s)


def test_a_store_may_be_forgotten_in_the_middle_of_another_ones_write(etcd: Etcd) -> None:
    with CollectingClient(etcd) as client:
        kept = KeptLease(client, LONG)
        forgotten = kept.share()
        client.found = forgotten.release
        writing = threading.Thread(target=kept.current, daemon=True)
        writing.start()
        writing.join(PATIENCE_S)
        assert not writing.is_alive(), "it waits for itself"
        lease = kept.current()
        kept.release()
        kept.join()
        with pytest.raises(DistStoreError, match="the store is closed"):
            kept.current()
        client.revoke(lease)


def test_a_lease_that_was_lost_is_replaced_by_the_next_write(
    etcd: Etcd, client: ListeningClient, tmp_path: Path
) -> None:
    with EtcdStore(client, str(tmp_path), ttl_s=LONG) as store:
        store.set("key", "1")
        (lease,) = etcd.leases()
        client.revoke(lease)
        assert store.add("key", 5) == 5  # It went with the lease.
        (other,) = etcd.leases()
        assert other != lease
        assert lease_of(client, store, "key") == other


def test_a_lease_that_was_lost_is_noticed_between_writes(
    client: ListeningClient,
) -> None:
    kept = KeptLease(client, 1)
    lease = kept.current()
    client.revoke(lease)
    deadline = time.monotonic() + PATIENCE_S
    while kept.current() == lease:
        assert time.monotonic() < deadline
        time.sleep(LOOK_AGAIN_S)
    kept.release()
    kept.join()
