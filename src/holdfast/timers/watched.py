"""The timers a server watches: what was asked for, and when each is due.

A client says when a timer expires by the time of day. That is turned into seconds from now when it
arrives, and from then on only the monotonic clock counts: no step of the clock ends a worker.
"""

from __future__ import annotations

from _thread import RLock
from typing import TYPE_CHECKING, Generic, TypeVar

from holdfast.core.deadlines import Deadlines
from holdfast.timers.requests import TIME_MAX, TimerRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Request = TypeVar("Request", bound=TimerRequest)

TIMERS_MAX = 10_000
"""So many timers are watched at once, about 5 MB of them; one more is refused."""

PURGE_S = 1.0
"""Where there are too many timers, those of ended processes are looked for this often."""


class WatchedTimers(Generic[Request]):
    """Requests by process and scope, with their deadlines by the monotonic clock.

    A thread may watch while others ask: each call is one step for all of them.
    """

    def __init__(self, timers_max: int = TIMERS_MAX) -> None:
        self._timers_max = timers_max
        self._requests: dict[int, dict[str, Request]] = {}
        self._count = 0
        self._deadlines = Deadlines()
        self._purged_at = float("-inf")
        self._lock = RLock()

    def __len__(self) -> int:
        return self._count

    def set(self, request: Request, now: float, wall: float) -> bool:
        """Set, move or release a timer; return False if there are too many already."""
        pid, scope = request.worker_id, request.scope_id
        if request.expiration_time < 0:
            self.release(pid, scope)
            return True
        with self._lock:
            scopes = self._requests.get(pid, {})
            if scope not in scopes:
                if self._count >= self._timers_max:
                    return False
                self._count += 1
            self._requests.setdefault(pid, scopes)[scope] = request
            expires = min(request.expiration_time, TIME_MAX)
            self._deadlines.set(pid, scope, now + (expires - wall))
        return True

    def release(self, pid: int, scope: str) -> None:
        """Drop one timer, if there is such a one."""
        with self._lock:
            scopes = self._requests.get(pid, {})
            if scopes.pop(scope, None) is None:
                return
            self._count -= 1
            self._deadlines.release(pid, scope)
            if not scopes:
                del self._requests[pid]

    def clear(self, pids: Iterable[int]) -> None:
        """Drop all timers of some processes."""
        with self._lock:
            for pid in pids:
                self._count -= len(self._requests.pop(pid, ()))
                self._deadlines.forget(pid)

    def clear_all(self) -> None:
        """Drop all timers."""
        with self._lock:
            self.clear([*self._requests])

    def purge(self, now: float, is_there: Callable[[int], bool]) -> None:
        """Drop the timers of processes that are gone, if that was not done just now."""
        with self._lock:
            if now - self._purged_at >= PURGE_S:
                self._purged_at = now
                self.clear([pid for pid in self._requests if not is_there(pid)])

    def next_deadline(self) -> float | None:
        """Return when the next timer is due, by the monotonic clock."""
        with self._lock:
            return self._deadlines.next_deadline()

    def due(self, now: float) -> dict[int, list[Request]]:
        """Return what is due, by process, the earliest first; it is to be dropped or put off."""
        found: dict[int, list[Request]] = {}
        with self._lock:
            for pid, scope in self._deadlines.due(now):
                found.setdefault(pid, []).append(self._requests[pid][scope])
        return found

    def put_off(self, requests: Iterable[Request], until: float) -> None:
        """Have timers that were due be due once more."""
        with self._lock:
            for request in requests:
                if request.scope_id in self._requests.get(request.worker_id, {}):
                    self._deadlines.set(request.worker_id, request.scope_id, until)

    def expired_by_wall(self, deadline: float) -> dict[int, list[Request]]:
        """Return the timers that expire up to a time of day; for those who ask by hand."""
        found: dict[int, list[Request]] = {}
        with self._lock:
            for pid, scopes in self._requests.items():
                expired = [one for one in scopes.values() if one.expiration_time <= deadline]
                if expired:
                    found[pid] = sorted(expired, key=lambda one: one.expiration_time)
        return found
