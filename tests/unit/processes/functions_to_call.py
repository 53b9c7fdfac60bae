"""Functions that the tests call in worker processes, which import this small module only."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


def add(one: Any, two: Any) -> Any:
    return one + two


def give_many_bytes(count: int) -> bytes:
    return bytes(range(256)) * (count // 256)


def give_lock() -> object:
    return threading.Lock()


def fail(why: str) -> None:
    raise RuntimeError(why)


def leave_at_once(code: int) -> None:
    os._exit(code)


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
