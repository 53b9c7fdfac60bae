"""Properties of memory stores and prefix stores, and the interface; tests/contract has the rest."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest

import holdfast.store
from holdfast.store import MemoryStore, PrefixStore

AT_ONCE = timedelta(milliseconds=1)


def test_stores_are_imported_on_first_use() -> None:
    program = (
        "import sys, holdfast.store\n"
        "assert [one for one in sys.modules if one.startswith('holdfast.store.')] == []\n"
        "from holdfast.store import MemoryStore\n"
        "found = [one for one in sys.modules if one.startswith('holdfast.store.')]\n"
        "assert not [one for one in found if one.startswith('holdfast.store.tcp')], found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    for name in holdfast.store.__all__:
        assert getattr(holdfast.store, name).__name__ == name


def test_signal_handler_can_end_a_wait() -> None:
    """The agent relies on it: a signal must end its wait at the exit barrier."""

    class Enough(Exception):
        pass

    def enough(_signum: int, _frame: object) -> None:
        if not ended.is_set():
            ended.set()
            raise Enough

    def send() -> None:
        while not store.check(["here"]):  # An earlier signal would end the test before the wait.
            time.sleep(0.001)
        # Repeatedly, because a signal just before Python sleeps does not wake it.
        while not ended.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)

    def wait_for_ever() -> None:
        sender.start()
        store.barrier("here", 2)

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
    assert store.get("here") == b"0"  # The caller is no longer counted.
    with pytest.raises(TimeoutError, match="1 of 2"):
        store.barrier("here", 2, AT_ONCE)


def test_prefix_stores_do_not_share_keys() -> None:
    store = MemoryStore()
    part, other = PrefixStore("part", store), PrefixStore("part2", store)
    part.set("a/part/b", "1")
    other.set("c", "2")
    store.set("part", "3")
    assert not other.check(["a/part/b"])
    assert (part.list_keys(), other.list_keys()) == (["a/part/b"], ["c"])
    assert part.num_keys() == 3  # The keys of the whole store, as in torch.
    PrefixStore("outer", PrefixStore("inner", store)).set("key", "1")
    assert store.get("inner/outer/key") == b"1"
    part.clone().queue_push("queue", "1")
    assert (part.queue_len("queue"), store.queue_len("part/queue")) == (1, 1)
    assert (other.queue_len("queue"), store.queue_len("queue")) == (0, 0)
    assert part.queue_pop("queue") == b"1"
