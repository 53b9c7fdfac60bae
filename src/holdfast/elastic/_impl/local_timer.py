"""TorchElastic's timers over a queue: the base class `TimerServer`, and a server for child processes.

A subclass of `TimerServer` defines how to store timers and kill workers. `LocalTimerServer` watches the
processes that a program has started, over a queue of `multiprocessing`. Such a queue unpickles its
data, so use it only with trusted processes. The server watches and kills only descendants of its own
process.
"""

from __future__ import annotations

import abc
import os
import queue
import signal
import threading
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.processes.procfs import exists, is_descendant
from holdfast.timers.reaper import Reaper
from holdfast.timers.timer_client import TimerClient
from holdfast.timers.timer_requests import RELEASED, RefusalLog, TimerRequest, is_valid_expiry
from holdfast.timers.timer_table import TimerTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


FAULT_PAUSE_S = 0.1


class RequestQueue(abc.ABC):
    """The source of a server's requests."""

    @abc.abstractmethod
    def size(self) -> int:
        """Return about how many requests are waiting."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return up to `size` requests, after `timeout` seconds at the latest."""

    def wake(self) -> None:
        """Make a waiting `get` return; otherwise it waits until its timeout."""
        return


class TimerServer(abc.ABC):
    """Receives requests in a thread, and kills the workers whose timers expired."""

    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool = True
    ) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._thread: threading.Thread | None = None
        self._stopping = False

    @abc.abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Set or release timers."""

    @abc.abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Drop all timers of some workers."""

    @abc.abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Return the timers that expire up to a time of day, by worker."""

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """Kill a worker; return whether that succeeded. If not, the server tries again."""

    def next_deadline(self) -> float | None:
        """Return when the next timer is due, on the monotonic clock; None means `max_interval` from now."""
        return None

    def start(self) -> None:
        """Watch in a thread."""
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(
                target=self._watchdog_loop, name="holdfast-timers", daemon=self._daemon
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop watching, after `max_interval` at the latest."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping = True
            self._request_queue.wake()
            thread.join(self._max_interval)

    def _watchdog_loop(self) -> None:
        warned = False
        while not self._stopping:
            try:
                self._run_watchdog()
            except Exception as problem:  # noqa: BLE001 (a watchdog continues)
                if not warned:
                    console.warning(f"timer server: {console.describe(problem)}; continuing")
                warned = True
                time.sleep(FAULT_PAUSE_S)  # It may fail again at once.

    def _run_watchdog(self) -> None:
        queue = self._request_queue
        self.register_timers(queue.get(max(1, queue.size()), self._wait_s()))
        ended = set()
        for worker_id, timers in self._expired_now().items():
            console.error(
                f"timer expired: worker {worker_id}, {', '.join(self._get_scopes(timers))}"
            )
            if self._reap_worker_no_throw(worker_id):
                ended.add(worker_id)
        self.clear_timers(ended)

    def _wait_s(self) -> float:
        deadline = self.next_deadline()
        if deadline is None:
            return self._max_interval
        return min(self._max_interval, max(0.0, deadline - time.monotonic()))

    def _expired_now(self) -> dict[Any, list[TimerRequest]]:
        return self.get_expired_timers(time.time())

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception as problem:  # noqa: BLE001 (the server tries again)
            console.warning(f"cannot kill worker {worker_id}: {problem}")
            return False

    def _get_scopes(self, timer_requests: list[TimerRequest]) -> list[str]:
        return [one.scope_id for one in timer_requests]


# Timers for the processes that a program itself has started, over a queue of `multiprocessing`.


TRY_AGAIN_S = 1.0
"""If a worker cannot be killed, the server tries again after this time."""


class LocalTimerClient(TimerClient):
    """Sets timers of this process at the server that reads the queue."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set the timer of a scope, or move it."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        """Release the timer of a scope."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, RELEASED))


class MultiprocessingRequestQueue(RequestQueue):
    """Requests from a `multiprocessing.Queue`."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def size(self) -> int:
        """Return about how many requests are waiting."""
        size: int = self._mp_queue.qsize()
        return size

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return up to `size` requests, after `timeout` seconds at the latest."""
        requests: list[TimerRequest] = []
        deadline = time.monotonic() + timeout
        while len(requests) < size:
            try:
                found = self._mp_queue.get(True, max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if found is None:  # `wake` has put it there.
                break
            requests.append(found)
        return requests

    def wake(self) -> None:
        """Make a waiting `get` return."""
        try:
            self._mp_queue.put_nowait(None)
        except queue.Full:
            pass  # The queue is full, so `get` returns anyway.


class LocalTimerServer(TimerServer):
    """Kills processes below this one whose timers have expired.

    `is_ours(pid)` returns whether a request may name a process. `dump(pid)` writes the stacks of a
    process before the server kills it.
    """

    def __init__(
        self,
        mp_queue: Any,
        max_interval: float = 60,
        daemon: bool = True,
        *,
        is_ours: Callable[[int], bool] = is_descendant,
        dump: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        self._reaper = Reaper(is_ours, dump=dump)
        self._timers: TimerTable[TimerRequest] = TimerTable(self._reaper.is_ours)
        self._refusals = RefusalLog()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Set or release timers of any process; only descendants of this one are ever killed."""
        now, wall = time.monotonic(), time.time()
        for request in timer_requests:
            if not _is_request(request):
                self._refusals.add("invalid", repr(request)[:80])
            elif not self._timers.set(request, now, wall):
                self._refusals.add(
                    f"there are {len(self._timers):,} timers already", repr(request)[:80]
                )

    def clear_timers(self, worker_ids: set[int]) -> None:
        """Drop all timers of some processes."""
        self._timers.clear(worker_ids)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Return the timers that expire up to a time of day, by process."""
        return {**self._timers.expired_by_wall(deadline)}

    def next_deadline(self) -> float | None:
        """Return when the next timer is due, on the monotonic clock."""
        return self._timers.next_deadline()

    def _expired_now(self) -> dict[Any, list[TimerRequest]]:
        now = time.monotonic()
        late = self._timers.due(now)
        for pid, requests in [*late.items()]:
            # A killed process loses its timers; the server tries the others again.
            self._timers.schedule_again(requests, now + TRY_AGAIN_S)
            if self._reaper.is_ours(pid):
                continue
            if exists(pid):
                self._refusals.add(
                    "the process does not descend from this one",
                    f"pid {pid}, scope {requests[0].scope_id!r}",
                )
            self._timers.clear((pid,))
            del late[pid]
        return {**late}

    def _reap_worker(self, worker_id: int) -> bool:
        self._reaper.dump_stacks(worker_id)
        return self._reaper.kill(worker_id, signal.SIGKILL)


def _is_request(found: Any) -> bool:
    return (
        type(getattr(found, "worker_id", None)) is int
        and isinstance(getattr(found, "scope_id", None), str)
        and is_valid_expiry(getattr(found, "expiration_time", None))
    )
