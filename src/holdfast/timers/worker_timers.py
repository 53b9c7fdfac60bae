"""The timers that workers set over a named pipe.

An agent waits in its own loop until `fileno()` is readable or until `next_deadline()`, then calls
`collect_late(now)`, and `close()` at the end. `collect_late` only reports which timers have
expired: the agent's machine decides, and the agent reports the outcome with `finish`. `collect_late` reads all
requests before it checks deadlines, so that a delayed agent does not report workers that were in time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.processes.procfs import has_ended
from holdfast.timers.pipe import TAKE_BYTES_MAX, RequestPipe
from holdfast.timers.timer_requests import InvalidRequest, LineSplitter, RefusalLog, parse_request
from holdfast.timers.timer_table import TimerTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.timers.timer_requests import FileTimerRequest


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Log the requests of the expired timers of each process."""
    for pid, timers in expired_timers.items():
        console.info(f"run {run_id}: expired timers of process {pid}: {', '.join(timers)}")


KILL_AGAIN_S = 1.0
KILLS_MAX = 5
"""Attempts to kill a worker, `KILL_AGAIN_S` apart."""

FULL_READS_MAX = 8
"""Consecutive reads of a full pipe after which timers may expire; until then, releases may still be in the pipe."""


class WorkerTimers:
    """The timers of an agent's workers. `is_ours(pid)` returns whether a request may name that process."""

    def __init__(self, path: str, run_id: str, is_ours: Callable[[int], bool]) -> None:
        self._run_id = run_id
        self._is_ours = is_ours
        self._table: TimerTable[FileTimerRequest] = TimerTable(is_ours)
        self._lines = LineSplitter()
        self._refusals = RefusalLog()
        self._kills: dict[int, int] = {}
        self._full_reads = 0
        self._pipe = RequestPipe(path)

    def __len__(self) -> int:
        return len(self._table)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there are requests; -1 once it is closed."""
        return self._pipe.fileno()

    def next_deadline(self) -> float | None:
        """Return when the next timer is due, by the monotonic clock; None while there is none."""
        return self._table.next_deadline()

    def collect_late(self, now: float) -> dict[int, list[FileTimerRequest]]:
        """Read the requests; return the timers that have expired, by process."""
        taken = self._read(now)
        self._full_reads = self._full_reads + 1 if taken >= TAKE_BYTES_MAX else 0
        if 0 < self._full_reads < FULL_READS_MAX:
            return {}
        late = self._table.due(now)
        requested = {pid: [one.to_json() for one in timers] for pid, timers in late.items()}
        log_debug_info_for_expired_timers(self._run_id, requested)
        return late

    @property
    def failed_kills(self) -> Mapping[int, int]:
        """How often each late process could not be signalled; `collect_late` returns its timers again."""
        return self._kills

    def finish(
        self, pid: int, requests: list[FileTimerRequest], now: float, *, killed: bool
    ) -> None:
        """Drop the timers of a late process, or schedule another attempt to kill it."""
        if killed:
            if any(one.signal > 0 for one in requests):
                self.clear((pid,))
            else:
                for one in requests:  # Other timers of this process remain.
                    self._table.release(pid, one.scope_id)
            return
        kills = self._kills[pid] = self._kills.get(pid, 0) + 1
        if kills < KILLS_MAX:
            self._table.schedule_again(requests, now + KILL_AGAIN_S)
        else:
            self.clear((pid,))

    def set(self, request: FileTimerRequest, now: float) -> None:
        """Set or release a timer of any process."""
        if not self._table.set(request, now, time.time()):
            self._refusals.add(
                f"there are already {len(self._table):,} timers",
                f"pid {request.worker_pid}, scope {request.scope_id!r}",
            )

    def clear(self, pids: Iterable[int]) -> None:
        """Drop the timers of some processes."""
        for pid in pids:
            self._kills.pop(pid, None)
            self._table.clear((pid,))

    def expired_by_wall(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """Return the timers that expire up to a time of day, by process."""
        return self._table.expired_by_wall(deadline)

    def is_reachable(self) -> bool:
        """Whether the pipe still exists at its path."""
        return self._pipe.is_reachable()

    def forget_all(self) -> None:
        """Drop all timers, after their workers have exited."""
        self._kills.clear()
        self._table.clear_all()

    def close(self) -> None:
        """Remove the pipe and drop all timers."""
        self._pipe.close()
        self.forget_all()

    # Requests.

    def _read(self, now: float) -> int:
        taken = 0
        # Finding a process's ancestors is slow, so this does it only once for each foreign process, which cannot
        # become a worker later.
        foreign: dict[int, bool] = {}  # By pid: whether it has ended.
        for chunk in self._pipe.chunks():
            taken += len(chunk)
            for line in self._lines.feed(chunk):
                try:
                    request = parse_request(line)
                except InvalidRequest as problem:
                    self._refusals.add("invalid", str(problem))
                    continue
                pid = request.worker_pid
                if pid not in foreign and self._is_ours(pid):
                    self.set(request, now)
                else:
                    if pid not in foreign:
                        foreign[pid] = has_ended(pid)
                    self._refuse(request, ended=foreign[pid])
        return taken

    def _refuse(self, request: FileTimerRequest, *, ended: bool) -> None:
        detail = f"pid {request.worker_pid}, scope {request.scope_id!r}"
        if ended:  # Probably a worker's child, or a worker of the previous generation.
            self._refusals.add("the process has exited", detail, console.INFO)
        else:
            self._refusals.add("the process is not a worker of this agent", detail)
