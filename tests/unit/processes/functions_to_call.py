"""Functions that the tests call in worker processes, which import this small module only."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING

from holdfast.processes.workers import function_signals

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


def fail_if_told(fails: bool) -> None:
    if fails:
        raise RuntimeError("told to fail")


def leave_at_once(code: int) -> None:
    os._exit(code)


def signal_actions() -> tuple[bool, bool, set[int]]:
    """Return whether SIGINT and SIGUSR1 have Python's default handlers, and the blocked signals."""
    return (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL,
        set(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    )


def use_all(queue: Any, event: Any, lock: Any, pipe: Any) -> str:
    """Use one of each kind of object that `multiprocessing` shares between processes."""
    with lock:
        queue.put("from the worker")
    pipe.send({"pid": os.getpid()})
    answer = pipe.recv()
    assert event.wait(60)
    return str(answer)


def is_alive_after_return(pipe: Any, returns_first: bool) -> bool:
    """Return whether the worker that returns first is alive a moment later; the other one can tell."""
    if returns_first:
        pipe.send(os.getpid())
        return True
    pidfd = os.pidfd_open(pipe.recv())
    has_ended = bool(select.select([pidfd], [], [], 0.2)[0])
    os.close(pidfd)
    return not has_ended


def put_and_return(queue: Any, items: list[Any]) -> int:
    """Fill a queue whose feeder thread must have written all of it before the process ends."""
    for item in items:
        queue.put(item)
    return len(items)


def wait_and_tidy_up(messages: str, path: str) -> None:
    """Wait until something raises, then write a file."""
    try:
        with open(messages, "w") as stream:
            stream.write(f"waits {os.getpid()}\n")
        while True:
            time.sleep(0.1)
    finally:
        with open(path, "w") as stream:
            stream.write("tidy")


class WaitsInItsFinalizer:
    """Waits while it is deleted. Python ignores what raises then."""

    def __init__(self, messages: str) -> None:
        self._messages = messages

    def __del__(self) -> None:
        with open(self._messages, "w") as stream:
            stream.write(f"waits {os.getpid()}\n")
        while True:
            time.sleep(0.1)


def wait_in_a_finalizer(messages: str, path: str) -> None:
    """Wait in a finalizer and after it until something raises, then write a file."""
    try:
        WaitsInItsFinalizer(messages)
        while True:
            time.sleep(0.1)
    finally:
        with open(path, "w") as stream:
            stream.write("tidy")


def wait_in_native_code(messages: str) -> None:
    """Wait in a native call that never returns: for a lock that this thread itself holds."""
    function_signals.NATIVE_CALL_S_MAX = 0.1
    lock = ctypes.byref((ctypes.c_long * 8)())
    with open(messages, "w") as stream:
        stream.write(f"waits {os.getpid()}\n")
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(lock)


def signals_of_a_child() -> int:
    """Return 0 if a fork of this process has the default signal actions."""
    pid = os.fork()
    if pid == 0:
        is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        os._exit(0 if is_default and signal.set_wakeup_fd(-1) == -1 else 1)
    return os.waitpid(pid, 0)[1]
