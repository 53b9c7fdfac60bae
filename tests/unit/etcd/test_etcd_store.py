"""Properties of the etcd store only: layout, contention, waits. tests/contract has those of all stores."""

from __future__ import annotations

import gc
import threading
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.etcd.calls import KeptAlive, Problem, ProblemKind, Request, Txn
from holdfast.etcd import etcd_store as store_transactions
from holdfast.etcd.async_client import CLOSED
from holdfast.etcd.etcd_settings import EtcdSettings
from holdfast.etcd.etcd_store import TXN_OPS_MAX, EtcdStore, as_store_error
from holdfast.etcd.lease import KeptLease
from holdfast.etcd.store_layout import KeyRange, StoreKeys
from holdfast.etcd.sync_client import BlockingWatch, EtcdClient, EtcdError
from holdfast.store import DistNetworkError, DistStoreError, StoreTimeoutError
from real_etcd import PATIENCE_S, POLL_S, Etcd, running_etcd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def test_more_keys_than_one_transaction_allows_are_set_and_read(store: EtcdStore) -> None:
    keys = [f"key {number}" for number in range(300)]
    store.multi_set(keys, keys)
    assert store.multi_get(keys) == [key.encode() for key in keys]
    store.wait(keys)
    assert store.check(keys)
    assert not store.check([*keys, "another"])
    assert store.num_keys() == 300


def test_values_larger_than_one_transaction_are_split(store: EtcdStore) -> None:
    value = b"x" * 900_000
    store.multi_set(["a", "b", "c"], [value] * 3)
    assert store.multi_get(["a", "b", "c"]) == [value] * 3


def test_too_large_value_is_refused_by_the_etcd_store(etcd: Etcd, store: EtcdStore) -> None:
    with pytest.raises(DistStoreError, match=rf"^etcd at {etcd.endpoint}: .*too large"):
        store.set("key", b"x" * 2_000_000)
    assert not store.check(["key"])


def test_callers_client_is_not_closed(etcd: Etcd, tmp_path: Path) -> None:
    with SeenClient(etcd) as client:
        with EtcdStore(client, str(tmp_path)) as store:
            store.set("key", "1")
        assert store.get("key") == b"1"
    with pytest.raises(DistStoreError, match="the client is closed"):
        store.get("key")


# The base64 of "ab?" contains a slash.
ODD_KEYS = ["", "a", "a/b", "/", "ab?", "é", "k", "a\x1f", "\x1f", "\x1fa", "a\x1fv", "a\x1f\x1fv",
            "a\x1fq", "a\0", "\n", "\U0001f600"]  # fmt: skip


def is_in(place: bytes, spot: KeyRange) -> bool:
    return spot.key <= place < spot.end if spot.end else place == spot.key


def places_of(key: str, places: StoreKeys) -> list[bytes]:
    """Return all etcd keys in which a key of a store has something."""
    return [
        places.value(key).key,
        places.queue(key).key,
        places.barrier(key).key,
        places.entry(key, 0).key,
        places.entry(key, 10**19).key,
    ]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_key_is_recovered_from_its_etcd_key(key: str) -> None:
    places = StoreKeys("/some/")
    value, *others = places_of(key, places)
    assert places.key_of(value) == key
    assert [places.key_of(other) for other in others] == [None] * len(others)


def test_no_two_keys_share_an_etcd_key_or_range() -> None:
    places = StoreKeys("/some/")
    for one, other in permutations(ODD_KEYS, 2):
        assert not set(places_of(one, places)) & set(places_of(other, places))
        assert not any(
            is_in(place, places.value_or_queue(one)) for place in places_of(other, places)
        )


def test_one_range_contains_value_and_queue_of_a_key() -> None:
    places = StoreKeys("/some/")
    for key in ODD_KEYS:
        found = [is_in(place, places.value_or_queue(key)) for place in places_of(key, places)]
        assert found == [True, True, False, False, False]
        assert all(is_in(place, places.all_keys()) for place in places_of(key, places)[:2])


def test_stores_with_nested_prefixes_share_no_keys() -> None:
    stores = [StoreKeys(prefix) for prefix in ("/", "/a/", "/a/k/", "/ab/", "/a/kb/", "")]
    for one, other in permutations(stores, 2):
        for key in ODD_KEYS:
            assert not any(is_in(place, one.all_keys()) for place in places_of(key, other))


def test_values_of_a_queue_sort_in_order_of_arrival() -> None:
    places = StoreKeys("/some/")
    numbers = [0, 1, 9, 10, 11, 100, 10**19]
    entries = [places.entry("key", number).key for number in numbers]
    assert sorted(entries) == entries


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (Problem(ProblemKind.UNREACHABLE, "it is gone"), DistNetworkError),
        (CLOSED, DistStoreError),
        (Problem(ProblemKind.NO_SPACE, "it is full"), DistStoreError),
        (Problem(ProblemKind.DENIED, "no"), DistStoreError),
    ],
)
def test_etcd_problems_become_store_errors(problem: Problem, kind: type[Exception]) -> None:
    error = as_store_error(EtcdError(problem, "host:1"))
    assert type(error) is kind
    assert str(error) == f"etcd at host:1: {problem.why}"


class SeenClient(EtcdClient):
    """A client whose transactions and watches the test observes before they are sent."""

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


@pytest.fixture
def client(etcd: Etcd) -> Iterator[SeenClient]:
    with SeenClient(etcd) as made:
        yield made


@pytest.fixture
def store(client: SeenClient, tmp_path: Path) -> EtcdStore:
    return EtcdStore(client, str(tmp_path))


def disturb(etcd: Etcd, client: SeenClient, store: EtcdStore, last: int) -> None:
    """Let the client lose the race: another one adds 10 to the counter just before each transaction up to this one."""
    place = store.prefix.encode() + b"\x1fkcount\x1fv"

    def add_ten(number: int) -> None:
        if number <= last:
            etcd.put(place, b"%d" % (int(etcd.get(place) or b"0") + 10))

    client.before_transaction = add_ten


def test_conflicting_change_is_retried_on_the_new_value(
    etcd: Etcd, client: SeenClient, store: EtcdStore
) -> None:
    disturb(etcd, client, store, 3)
    assert store.add("count", 1) == 31
    assert store.get("count") == b"31"


def test_change_that_becomes_impossible_is_abandoned(
    etcd: Etcd, client: SeenClient, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_transactions, "ATTEMPTS_MAX", 4)
    disturb(etcd, client, store, 100)
    with pytest.raises(DistStoreError, match=r"could not change .*count.* in 4 attempts"):
        store.add("count", 1)
    assert client.transactions == 4


def watchers(etcd: Etcd) -> int:
    """Return how many watches etcd reports."""
    with urllib.request.urlopen(f"{etcd.url}/metrics", timeout=PATIENCE_S) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("etcd_debugging_mvcc_watcher_total "):
                return int(line.split()[1])
    raise AssertionError("etcd has no metric of its watches")


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(POLL_S)


@contextmanager
def waiting(etcd: Etcd, call: Callable[..., Any], *args: Any) -> Iterator[Future[Any]]:
    """Wait in another thread; continue when etcd has the watch."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call, *args)
        until(lambda: watchers(etcd) > 0 or future.done())
        yield future


def test_wait_needs_one_read_and_one_watch(
    etcd: Etcd, client: SeenClient, store: EtcdStore
) -> None:
    with SeenClient(etcd) as others, waiting(etcd, store.get, "key") as getting:
        other = EtcdStore(others, store.prefix)
        for number in range(20):
            other.multi_set(["another", "key2"], [str(number)] * 2)
        other.set("key", "value")
        assert getting.result(PATIENCE_S) == b"value"
    assert (client.transactions, client.watches) == (1, 1)


def test_finished_wait_removes_its_watch(etcd: Etcd, store: EtcdStore) -> None:
    with pytest.raises(StoreTimeoutError, match=etcd.endpoint):
        store.wait(["key"], 0.01)
    with waiting(etcd, store.get, "key") as getting:
        store.set("key", "value")
        getting.result(PATIENCE_S)
    until(lambda: not watchers(etcd))


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_waits_survive_a_restart_of_etcd(tmp_path: Path, how: str) -> None:
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


def test_wait_survives_compacted_revisions(
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


def test_wait_for_more_keys_than_one_transaction_requires_all_at_once(
    client: SeenClient, store: EtcdStore
) -> None:
    """The first key is deleted before the last one is set, which no single read shows."""
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


def test_closing_the_client_ends_a_wait(etcd: Etcd, tmp_path: Path) -> None:
    client = SeenClient(etcd)
    with waiting(etcd, EtcdStore(client, str(tmp_path)).get, "key") as getting:
        client.close()
        with pytest.raises(DistStoreError, match="the client is closed"):
            getting.result(PATIENCE_S)


def test_pop_that_lost_the_race_keeps_waiting_while_etcd_is_down(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd, SeenClient(etcd) as client, SeenClient(etcd) as others:
        store, other = EtcdStore(client, "/some"), EtcdStore(others, "/some")

        def happen(number: int) -> None:
            if number == 2:  # The watch has reported a value, and the client is about to pop it.
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


LONG = 3600


class ListeningClient(EtcdClient):
    """A client that counts lease renewals."""

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


@pytest.fixture
def listening(etcd: Etcd) -> Iterator[ListeningClient]:
    with ListeningClient(etcd) as made:
        yield made
        for lease in etcd.leases():
            made.revoke(lease)


def lease_of(client: EtcdClient, store: EtcdStore, key: str) -> int:
    found = client.get(store.prefix.encode() + b"\x1fk" + key.encode() + b"\x1fv")
    assert found is not None
    return found.lease


def test_store_renews_its_lease_until_it_and_its_clones_are_closed(
    etcd: Etcd, listening: ListeningClient, tmp_path: Path
) -> None:
    store = EtcdStore(listening, str(tmp_path), ttl_s=2)
    store.set("key", "1")
    clone = store.clone()
    store.close()
    for _ in range(2):
        assert listening.signs.acquire(timeout=PATIENCE_S)
    assert clone.get("key") == b"1"
    place = store.prefix.encode() + b"\x1fkkey\x1fv"
    with listening.watch(place, b"", etcd.revision() + 1) as watch:
        clone.close()
        (change,) = watch.next(PATIENCE_S)  # It exists until its lease expires.
    assert (change.key, change.value) == (place, None)


def test_dropped_store_renews_no_lease(listening: ListeningClient, tmp_path: Path) -> None:
    store = EtcdStore(listening, str(tmp_path), ttl_s=LONG)
    store.set("key", "1")
    (keeping,) = (one for one in threading.enumerate() if one.name == "holdfast-etcd-lease")
    del store
    gc.collect()
    keeping.join(PATIENCE_S)
    assert not keeping.is_alive()


class CollectingClient(ListeningClient):
    """A client during whose first call the garbage collector runs."""

    found: Callable[[], None] | None = None

    def call(self, request: Request, limit_s: float | None = None) -> Any:
        found, self.found = self.found, None
        if found is not None:
            found()
        return super().call(request, limit_s)


def test_store_can_be_collected_during_another_stores_write(etcd: Etcd) -> None:
    with CollectingClient(etcd) as client:
        kept = KeptLease(client, LONG)
        forgotten = kept.share()
        client.found = forgotten.release
        writing = threading.Thread(target=kept.current, daemon=True)
        writing.start()
        writing.join(PATIENCE_S)
        assert not writing.is_alive(), "the collection of the store deadlocks"
        lease = kept.current()
        kept.release()
        kept.join()
        with pytest.raises(DistStoreError, match="the store is closed"):
            kept.current()
        client.revoke(lease)


def test_lost_lease_is_replaced_by_the_next_write(
    etcd: Etcd, listening: ListeningClient, tmp_path: Path
) -> None:
    with EtcdStore(listening, str(tmp_path), ttl_s=LONG) as store:
        store.set("key", "1")
        (lease,) = etcd.leases()
        listening.revoke(lease)
        assert store.add("key", 5) == 5  # The old value was removed with the lease.
        (other,) = etcd.leases()
        assert other != lease
        assert lease_of(listening, store, "key") == other


def test_lost_lease_is_detected_between_writes(listening: ListeningClient) -> None:
    kept = KeptLease(listening, 1)
    lease = kept.current()
    listening.revoke(lease)
    deadline = time.monotonic() + PATIENCE_S
    while kept.current() == lease:
        assert time.monotonic() < deadline
        time.sleep(POLL_S)
    kept.release()
    kept.join()
