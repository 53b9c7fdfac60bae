"""Functions that the tests call in worker processes, which import this small module only."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


def add(one: Any, two: Any) -> Any:
    return one + two


def give(value: Any) -> Any:
    return value


def give_many_bytes(count: int) -> bytes:
    return bytes(range(256)) * (count // 256)


def give_lock() -> object:
    return threading.Lock()


def fail(why: str) -> None:
    raise RuntimeError(why)


def leave(code: Any) -> None:
    sys.exit(code)


def leave_at_once(code: int) -> None:
    os._exit(code)


def tell(news: str, word: str) -> None:
    with open(news, "w") as stream:
        stream.write(f"{word} {os.getpid()}\n")


def tell_and_wait(news: str) -> None:
    tell(news, "ready")
    while True:  # Not for long: a signal just before Python goes to sleep does not wake it.
        time.sleep(0.1)


def say(out: str, err: str) -> None:
    print(out)
    print(err, file=sys.stderr)


def say_in_thread(text: str) -> None:
    """Write from a thread that outlives the function, into a stream that holds it back."""
    ready = threading.Event()

    def speak() -> None:
        ready.wait()
        sys.stdout.write(text)

    threading.Thread(target=speak).start()
    threading.Timer(0.01, ready.set).start()


def tracker_pipe() -> str:
    """Return which pipe leads to the process that destroys what nobody shares any more."""
    return os.readlink(f"/proc/self/fd/{resource_tracker.getfd()}")


def descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # That of the listing itself.
    return found


def signal_actions() -> tuple[bool, bool, set[int]]:
    """Return whether SIGINT and SIGTERM are as in any Python, and the blocked signals."""
    return (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        set(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    )


def use_all(queue: Any, event: Any, lock: Any, pipe: Any) -> str:
    """Use one of each kind of what `multiprocessing` shares between processes."""
    with lock:
        queue.put("from the worker")
    pipe.send({"pid": os.getpid()})
    answer = pipe.recv()
    assert event.wait(60)
    return str(answer)


def put_and_return(queue: Any, items: list[Any]) -> int:
    """Fill a queue whose feeder thread must have written all of it before the process ends."""
    for item in items:
        queue.put(item)
    return len(items)


def flags() -> tuple[int, bool]:
    return sys.flags.optimize, sys.flags.dev_mode
