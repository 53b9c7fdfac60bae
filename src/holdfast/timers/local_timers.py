"""Timers for the processes that a program itself has started, over a queue of `multiprocessing`.

Such a queue unpickles what comes, so it is for processes one trusts as oneself. Whom a request
names is checked all the same: only what descends from the server's process is watched and ended.
"""

from __future__ import annotations

import os
import signal
import time

from holdfast.timers.clients import TimerClient
from holdfast.timers.ownership import is_below_this_process
from holdfast.timers.queue_server import RequestQueue, TimerServer
from holdfast.timers.reaping import Reaper
from holdfast.timers.refusals import Refusals
from holdfast.timers.requests import RELEASED, TimerRequest, is_time
from holdfast.timers.watched import WatchedTimers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

TRY_AGAIN_S = 1.0
"""A worker that could not be ended is tried again after this time."""


class LocalTimerClient(TimerClient):
    """Sets timers of this process with whoever reads the queue."""

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
    """Requests out of a `multiprocessing.Queue`."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def size(self) -> int:
        """Return about how many requests are waiting."""
        size: int = self._mp_queue.qsize()
        return size

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return up to `size` requests, after `timeout` seconds at the latest."""
        import queue

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
        """Have a `get` that waits return."""
        import queue

        try:
            self._mp_queue.put_nowait(None)
        except queue.Full:
            pass  # Then there is something to get anyhow.


class LocalTimerServer(TimerServer):
    """Kills processes below this one whose timers have expired.

    `is_ours(pid)` says whom a request may name, and `dump(pid)` writes the stacks of a process that
    is about to be killed.
    """

    def __init__(
        self,
        mp_queue: Any,
        max_interval: float = 60,
        daemon: bool = True,
        *,
        is_ours: Callable[[int], bool] = is_below_this_process,
        dump: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        self._reaper = Reaper(is_ours, dump=dump)
        self._timers: WatchedTimers[TimerRequest] = WatchedTimers()
        self._refusals = Refusals("a timer request is refused")

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Set or release timers, whoever's they are; only processes below this are ever ended."""
        now, wall = time.monotonic(), time.time()
        for request in timer_requests:
            if not _is_request(request):
                self._refusals.tell("it cannot be read", repr(request)[:80])
            elif not self._timers.set(request, now, wall):
                self._timers.purge(now, self._reaper.is_ours)
                if not self._timers.set(request, now, wall):
                    self._refusals.tell(
                        f"there are {len(self._timers):,} timers already", repr(request)[:80]
                    )

    def clear_timers(self, worker_ids: set[int]) -> None:
        """Forget all timers of some processes."""
        self._timers.clear(worker_ids)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Return the timers that expire up to a time of day, by process."""
        return {**self._timers.expired_by_wall(deadline)}

    def next_deadline(self) -> float | None:
        """Return when the next timer is due, by the monotonic clock."""
        return self._timers.next_deadline()

    def _expired_now(self) -> dict[Any, list[TimerRequest]]:
        now = time.monotonic()
        late = self._timers.due(now)
        for pid, requests in [*late.items()]:
            # Whoever is ended loses his timers; the others are looked at again.
            self._timers.put_off(requests, now + TRY_AGAIN_S)
            if self._reaper.is_ours(pid):
                continue
            if os.path.exists(f"/proc/{pid}"):
                self._refusals.tell(
                    "it names a process that is not below this one",
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
        and is_time(getattr(found, "expiration_time", None))
    )
