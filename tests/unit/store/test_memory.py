"""What only the store in memory does; what all stores do is in tests/contract."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from holdfast.store.memory import KEY_CHARS_SHOWN_MAX, KEYS_SHOWN_MAX, MemoryStore, named

AT_ONCE = timedelta(milliseconds=1)
SOON_S = 0.001


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


def test_a_signal_handler_can_end_a_barrier_and_is_not_counted() -> None:
    class Enough(Exception):
        pass

    class Interrupted(MemoryStore):
        def _sleep(self, is_over: object, timeout_s: float) -> bool:
            raise Enough

    store = Interrupted()
    with pytest.raises(Enough):
        store.barrier("here", 2)
    assert store.clone().get("here") == b"0"
    with pytest.raises(TimeoutError, match=r"^1 of 2 came within 0\.001 s to the barrier here$"):
        store.clone().barrier("here", 2, AT_ONCE)


def test_a_message_names_some_keys_of_many() -> None:
    keys = [str(number) for number in range(KEYS_SHOWN_MAX + 3)]
    assert named(keys).endswith("7 and 3 more")
    assert named(keys[:KEYS_SHOWN_MAX]).endswith("7")
    assert named(["x" * 5000]) == "x" * KEY_CHARS_SHOWN_MAX + "..."
