"""Functions that the tests call in worker processes, which import this small module only."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def add(one: Any, two: Any) -> Any:
    return one + two


def give(value: Any) -> Any:
    return value


def give_many_bytes(count: int) -> bytes:
    return bytes(range(256)) * (count // 256)


def give_environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def give_folder() -> str:
    return os.getcwd()


def give_lock() -> object:
    return threading.Lock()


def give_unreadable() -> object:
    return Unreadable()


class Unreadable:
    """Can be pickled, but not read again."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return fail, ("this value cannot be made again",)


def fail(why: str) -> None:
    raise RuntimeError(why)


def leave(code: Any) -> None:
    sys.exit(code)


def leave_without_code() -> None:
    sys.exit()


def leave_at_once(code: int) -> None:
    os._exit(code)


def tell(news: str, word: str) -> None:
    with open(news, "w") as stream:
        stream.write(f"{word} {os.getpid()}\n")


def tell_and_wait(news: str) -> None:
    tell(news, "ready")
    while True:  # Not for long: a signal just before Python goes to sleep does not wake it.
        time.sleep(0.1)


def tell_or_fail(news: str, rank: int, failing: int) -> None:
    if rank == failing:
        raise ValueError(f"rank {rank} fails")
    tell_and_wait(news)


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


def say_at_exit(text: str, earlier: str) -> None:
    atexit.register(sys.stdout.write, text)
    say_in_thread(earlier)


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


def identity() -> tuple[int, int, int]:
    return os.getpid(), os.getppid(), os.getsid(0)


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


def add_to_proxy(shared: Any, key: str, value: Any) -> None:
    shared[key] = value


def run_child() -> int:
    """Start and join a process of one's own, as a data loader does."""
    child = multiprocessing.get_context("fork").Process(target=add, args=(1, 1))
    child.start()
    child.join()
    assert child.exitcode == 0
    return len(multiprocessing.active_children())


def main_name() -> str:
    return str(getattr(sys.modules["__main__"], "__file__", None))


def flags() -> tuple[int, bool]:
    return sys.flags.optimize, sys.flags.dev_mode
