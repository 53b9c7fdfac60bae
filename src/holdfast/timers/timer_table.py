"""The timers that a server watches: their requests, and when each expires.

A client sends the expiry as a time of day. The server converts it to the monotonic clock when the request arrives,
so that a step of the clock does not kill a worker. Setting and releasing a timer take logarithmic time; finding the
next timer needs no search.
"""

from __future__ import annotations

import threading
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Generic, TypeVar

from holdfast.timers.timer_requests import TIME_MAX, TimerRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Request = TypeVar("Request", bound=TimerRequest)

TIMERS_MAX = 10_000
"""The limit of timers, about 5 MB; the server rejects further ones."""
PURGE_S = 1.0
"""The interval for dropping timers of ended processes if there are too many timers."""
STALE_MAX = 64
"""The heap is rebuilt if it has more entries than twice the timers plus this."""


class _Timer(Generic[Request]):
    __slots__ = ("request", "serial")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.serial = 0  # The serial of its valid entry in the heap; older entries are stale.


class TimerTable(Generic[Request]):
    """Timers by process and scope. Sleep until `next_deadline`, then call `due`.

    It is thread-safe. If there are too many timers, it calls `is_alive(pid)` to drop those of ended processes.
    """

    def __init__(self, is_alive: Callable[[int], bool], timers_max: int = TIMERS_MAX) -> None:
        self._is_alive = is_alive
        self._timers_max = timers_max
        self._timers: dict[int, dict[str, _Timer[Request]]] = {}
        self._count = 0
        self._heap: list[tuple[float, int, int, str]] = []
        self._serial = 0
        self._purged_at = float("-inf")
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return self._count

    def set(self, request: Request, now: float, wall: float) -> bool:
        """Set, move or release a timer; return False if there are too many."""
        pid, scope = request.worker_id, request.scope_id
        if request.expiration_time < 0:
            self.release(pid, scope)
            return True
        with self._lock:
            timer = self._timers.get(pid, {}).get(scope)
            if timer is None:
                if self._count >= self._timers_max:
                    self._purge(now)
                if self._count >= self._timers_max:
                    return False
                self._count += 1
                timer = self._timers.setdefault(pid, {})[scope] = _Timer(request)
            timer.request = request
            self._schedule(timer, now + (min(request.expiration_time, TIME_MAX) - wall))
        return True

    def release(self, pid: int, scope: str) -> None:
        """Drop a timer, if it exists."""
        with self._lock:
            scopes = self._timers.get(pid, {})
            if scopes.pop(scope, None) is not None:
                self._count -= 1
                if not scopes:
                    del self._timers[pid]

    def clear(self, pids: Iterable[int]) -> None:
        """Drop all timers of some processes."""
        with self._lock:
            for pid in pids:
                self._count -= len(self._timers.pop(pid, ()))

    def clear_all(self) -> None:
        """Drop all timers."""
        with self._lock:
            self.clear([*self._timers])

    def next_deadline(self) -> float | None:
        """Return when the next timer is due, by the monotonic clock; None while there is none."""
        with self._lock:
            while self._heap and self._timer_of(self._heap[0]) is None:
                heappop(self._heap)
            return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> dict[int, list[Request]]:
        """Return the due timers by process, the earliest first.

        Each is returned once: the caller releases it or schedules it again.
        """
        found: dict[int, list[Request]] = {}
        with self._lock:
            while self._heap and self._heap[0][0] <= now:
                entry = heappop(self._heap)
                timer = self._timer_of(entry)
                if timer is not None:
                    timer.serial = 0
                    found.setdefault(entry[2], []).append(timer.request)
        return found

    def schedule_again(self, requests: Iterable[Request], at: float) -> None:
        """Reschedule timers that were due."""
        with self._lock:
            for request in requests:
                timer = self._timers.get(request.worker_id, {}).get(request.scope_id)
                if timer is not None:
                    self._schedule(timer, at)

    def expired_by_wall(self, deadline: float) -> dict[int, list[Request]]:
        """Return the timers that expire up to a time of day, by process."""
        found: dict[int, list[Request]] = {}
        with self._lock:
            for pid, scopes in self._timers.items():
                requests = [one.request for one in scopes.values()]
                expired = [one for one in requests if one.expiration_time <= deadline]
                if expired:
                    found[pid] = sorted(expired, key=lambda one: one.expiration_time)
        return found

    def _purge(self, now: float) -> None:
        """Drop the timers of ended processes, at most once per `PURGE_S`."""
        if now - self._purged_at >= PURGE_S:
            self._purged_at = now
            self.clear([pid for pid in self._timers if not self._is_alive(pid)])

    def _schedule(self, timer: _Timer[Request], at: float) -> None:
        self._serial += 1
        timer.serial = self._serial
        heappush(self._heap, (at, self._serial, timer.request.worker_id, timer.request.scope_id))
        if len(self._heap) > 2 * self._count + STALE_MAX:
            self._heap = [entry for entry in self._heap if self._timer_of(entry) is not None]
            heapify(self._heap)

    def _timer_of(self, entry: tuple[float, int, int, str]) -> _Timer[Request] | None:
        """Return the timer of an entry of the heap; None if the entry is stale."""
        _, serial, pid, scope = entry
        timer = self._timers.get(pid, {}).get(scope)
        return timer if timer is not None and timer.serial == serial else None
