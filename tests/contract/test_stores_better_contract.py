"""Properties in which our stores are better than the stores of torch that they replace."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from stores import CLIENT_ON_TORCHS, IN_ETCD, IN_FOLDER, IN_PROCESS, OURS, over

from holdfast.store import DistStoreError, QueueEmptyError, StoreTimeoutError

LONG = timedelta(minutes=1)
SHORT = timedelta(milliseconds=50)
OUR_CLIENTS_TOO = [*OURS, CLIENT_ON_TORCHS]
UNSERVED = [*IN_PROCESS, *IN_FOLDER, *IN_ETCD]  # The stores that torch's protocol does not limit.


@over(OUR_CLIENTS_TOO)
def test_failed_comparison_ends_no_wait(store: Any) -> None:
    """With torch's server, `get` then returns an empty value for the missing key."""
    about_to = threading.Event()

    def get(mine: Any) -> Any:
        about_to.set()
        return mine.get("key")

    with ThreadPoolExecutor() as pool:
        getting = pool.submit(get, store.clone())
        about_to.wait()
        for number in range(20):
            assert store.compare_set("key", "something", str(number)) == b"something"
        store.set("key", "value")
        assert getting.result(60) == b"value"


@over(OURS)
def test_wait_continues_after_its_key_is_set_and_deleted(store: Any) -> None:
    about_to = threading.Event()

    def wait(mine: Any) -> None:
        about_to.set()
        mine.wait(["a", "b"], LONG)

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait, store.clone())
        about_to.wait()
        for _ in range(10):
            store.set("a", "")
            assert store.delete_key("a")
        store.set("b", "")
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        store.set("a", "")
        waiting.result(60)


@over(UNSERVED)
def test_queue_is_not_a_value(store: Any) -> None:
    """On a server, `get` returns an empty value for a queue: the protocol cannot distinguish them."""
    store.queue_push("queue", "one")
    store.set_timeout(SHORT)
    with pytest.raises(StoreTimeoutError, match="queue"):
        store.get("queue")


@over(OURS)
def test_barrier_can_be_reused(store: Any) -> None:
    came: list[int] = []

    def arrive(number: int, mine: Any) -> list[int]:
        seen = []
        for _ in range(3):
            came.append(number)
            mine.barrier("here", 3, LONG)
            seen.append(len(came))
        return seen

    with ThreadPoolExecutor(3) as pool:
        for seen in pool.map(arrive, range(3), [store.clone() for _ in range(3)]):
            # A thread may check late after the barrier, but never early.
            assert all(count >= 3 * (turn + 1) for turn, count in enumerate(seen))
    assert store.get("here") == b"3"
    with pytest.raises(StoreTimeoutError):
        store.barrier("here", 3, SHORT)


@over(OURS)
def test_caller_that_timed_out_at_a_barrier_is_no_longer_counted(store: Any) -> None:
    for _ in range(3):
        with pytest.raises(StoreTimeoutError, match="here"):
            store.barrier("here", 2, SHORT)
    assert store.get("here") == b"0"
    with ThreadPoolExecutor() as pool:
        first = pool.submit(store.clone().barrier, "here", 2, LONG)
        store.barrier("here", 2, LONG)
        first.result(60)


@over(OUR_CLIENTS_TOO)
def test_blocking_pop_always_returns_a_value(store: Any) -> None:
    """With torch's client it returns nothing if another client was faster."""
    clones = [store.clone() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        popping = [pool.submit(clone.queue_pop, "queue") for clone in clones]
        for number in range(6):
            store.queue_push("queue", str(number))
        assert sorted(one.result(60) for one in popping) == [b"%d" % one for one in range(6)]


@over(OUR_CLIENTS_TOO)
def test_timeout_names_the_key_and_the_duration(store: Any) -> None:
    store.multi_set(["b", "d"], ["", ""])
    with pytest.raises(StoreTimeoutError, match=r"a, \S*c\b"):
        store.wait(["a", "b", "c", "d"], SHORT)
    store.set_timeout(SHORT)
    with pytest.raises(StoreTimeoutError, match=r"a\b"):
        store.get("a")
    with pytest.raises(StoreTimeoutError, match="queue"):
        store.queue_pop("queue")
    with pytest.raises(QueueEmptyError, match="queue"):
        store.queue_pop("queue", block=False)


@over(OUR_CLIENTS_TOO)
def test_keys_and_values_must_have_the_same_number(store: Any) -> None:
    """Torch's store reads memory after the last value."""
    with pytest.raises(ValueError, match=r"^"):
        store.multi_set(["a", "b"], ["1"])
    assert not store.check(["a"])


@over(OURS)
def test_clone_has_its_own_timeout(store: Any) -> None:
    before = store.timeout
    clone = store.clone()
    assert clone.timeout == before
    clone.set_timeout(SHORT)
    assert (clone.timeout, store.timeout) == (SHORT, before)


@over(UNSERVED)
@pytest.mark.parametrize("value", ["", "one", "-", "é", "9" * 5000])
def test_add_to_a_value_without_a_number_fails(store: Any, value: str) -> None:
    """Torch's server closes the connection then."""
    store.set("key", value)
    with pytest.raises(DistStoreError, match="key"):
        store.add("key", 1)
    assert store.get("key") == value.encode()


@over(UNSERVED)
def test_counter_does_not_overflow(store: Any) -> None:
    """Torch's counter becomes negative."""
    assert store.add("count", 2**63 - 1) == 2**63 - 1
    with pytest.raises(DistStoreError, match="64"):
        store.add("count", 1)
    assert store.add("count", -1) == 2**63 - 2


@over(UNSERVED)
def test_key_with_another_value_cannot_be_a_barrier(store: Any) -> None:
    store.set("key", "value")
    with pytest.raises(DistStoreError):
        store.barrier("key", 1)
    assert store.get("key") == b"value"


@over(UNSERVED)
def test_timeouts_may_be_seconds(store: Any) -> None:
    with pytest.raises(StoreTimeoutError):
        store.wait(["key"], 0.001)
    with pytest.raises(StoreTimeoutError):
        store.barrier("here", 2, 0)
    store.set_timeout(0.5)
    assert store.timeout == timedelta(seconds=0.5)
    store.set("key", "")
    store.wait(["key"], timedelta.max)
