from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from holdfast.store.memory import MemoryStore

AT_ONCE = timedelta(milliseconds=1)
SOON_S = 0.001


def hash_store() -> Any:
    from torch.distributed import HashStore

    return HashStore()


@pytest.fixture(params=[MemoryStore, pytest.param(hash_store, marks=pytest.mark.torch)])
def store(request: pytest.FixtureRequest) -> Any:
    """Our store, and torch's in its place: what is said of `store` is true of both."""
    return request.param()


def test_values_are_bytes_however_they_were_given(store: Any) -> None:
    store.set("text", "é")
    store.set("bytes", b"\x00\xff")
    assert store.get("text") == "é".encode()
    assert store.get("bytes") == b"\x00\xff"


def test_a_later_value_replaces_the_earlier(store: Any) -> None:
    store.set("key", "one")
    store.set("key", "two")
    assert store.get("key") == b"two"


def test_add_counts_from_zero_and_the_count_is_a_value(store: Any) -> None:
    assert store.add("count", 2) == 2
    assert store.add("count", -5) == -3
    assert store.get("count") == b"-3"


def test_add_goes_on_from_a_number_that_was_set(store: Any) -> None:
    store.set("count", "40")
    assert store.add("count", 2) == 42


def test_check_wants_all_keys(store: Any) -> None:
    store.set("a", "")
    assert store.check(["a"])
    assert not store.check(["a", "b"])


def test_get_waits_until_another_thread_sets_the_value(store: Any) -> None:
    def answer() -> None:
        store.set("answer", b"got " + store.get("question"))

    with ThreadPoolExecutor() as pool:
        answering = pool.submit(answer)
        assert not store.check(["answer"])
        store.set("question", "it")
        assert store.get("answer") == b"got it"
        answering.result()


def test_wait_ends_with_the_last_of_its_keys(store: Any) -> None:
    def wait() -> bool:
        store.wait(["a", "b"], timedelta(minutes=1))
        return bool(store.check(["a", "b"]))

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait)
        store.add("a", 1)
        store.set("b", "1")
        assert waiting.result()


def test_wait_gives_up_when_the_time_is_over(store: Any) -> None:
    store.set("a", "")
    with pytest.raises((OSError, RuntimeError)):
        store.wait(["a", "b"], AT_ONCE)


def test_every_add_of_many_threads_counts(store: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        totals = sorted(pool.map(lambda _: store.add("count", 1), range(400)))
    assert totals == list(range(1, 401))


def test_a_first_add_ends_a_wait_too() -> None:
    """With torch's `HashStore` it does not."""
    store = MemoryStore()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.get, "count")
        store.add("count", 1)
        assert waiting.result() == b"1"


def test_the_time_is_over_for_the_keys_without_a_value() -> None:
    store = MemoryStore()
    store.set("b", "")
    with pytest.raises(TimeoutError, match=r"^no value came within 0\.001 s for: a, c$"):
        store.wait(["a", "b", "c"], AT_ONCE)


def test_the_stores_own_timeout_holds_where_none_is_given() -> None:
    store = MemoryStore(timeout_s=SOON_S)
    with pytest.raises(TimeoutError, match=r"for: a$"):
        store.get("a")
    with pytest.raises(TimeoutError, match=r"for: a$"):
        store.wait(["a"])


def test_a_signal_handler_can_end_a_wait() -> None:
    """The agent relies on it: a signal must get it out of the exit barrier."""

    class Enough(Exception):
        pass

    def enough(_signum: int, _frame: object) -> None:
        if not ended.is_set():
            ended.set()
            raise Enough

    def send() -> None:
        # Again and again: a signal in the moment before Python goes to sleep does not wake it.
        while not ended.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)

    def wait_for_ever() -> None:
        sender.start()
        store.get("never")

    store = MemoryStore()
    main = threading.get_ident()
    ended = threading.Event()
    sender = threading.Thread(target=send)
    previous = signal.signal(signal.SIGUSR1, enough)
    try:
        with pytest.raises(Enough):
            wait_for_ever()
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, previous)
    store.set("still", "usable")
    assert store.get("still") == b"usable"
