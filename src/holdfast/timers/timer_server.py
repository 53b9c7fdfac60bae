"""The server of timers that workers set over a named pipe.

An agent drives it from its own loop, without a thread: it waits until `fileno()` is readable or until
`next_deadline()`, then calls `collect_late(now)`, and `close()` at the end. This only reports which timers
have expired; the agent's machine decides, and the agent reports the outcome with `finish`. Other programs
run the server in a thread with `start()` and `stop()`, as with TorchElastic; then it kills late workers itself.
The server reads all requests before it checks deadlines, so that a delayed server does not report workers
that were in time.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.processes.poll import wait_for
from holdfast.processes.procfs import has_ended, is_below_this_process
from holdfast.timers.pipe import TAKE_BYTES_MAX, RequestPipe
from holdfast.timers.reaper import STARTED, STOPPED, Reaper, fatal_of, send_signal
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


class FileTimerServer:
    """Watches the timers of this agent's workers. In a thread, it also kills those whose timers expire.

    `max_interval` is TorchElastic's and has no effect, since this server does not poll. `is_ours(pid)` returns
    whether a request may name a process, by default any descendant of this one. In a thread, `dump` writes a
    worker's stacks, `kill` signals it, and `log_event` receives each step.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
        *,
        is_ours: Callable[[int], bool] = is_below_this_process,
        dump: Callable[[int], object] | None = None,
        kill: Callable[[int, int], object] = send_signal,
    ) -> None:
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._reaper = Reaper(is_ours, dump=dump, kill=kill, report=log_event)
        self._timers: TimerTable[FileTimerRequest] = TimerTable(self._reaper.is_ours)
        self._lines = LineSplitter()
        self._refusals = RefusalLog()
        self._kills: dict[int, int] = {}
        self._full_reads = 0
        self._thread: ServerThread | None = None
        self._checking = False
        self._last_check = time.time()
        self._pipe = RequestPipe(file_path)

    # For an agent's own loop.

    def fileno(self) -> int:
        """Return the descriptor that is readable when there are requests."""
        return self._pipe.fileno()

    def next_deadline(self) -> float | None:
        """Return when the next timer is due, by the monotonic clock; None while there is none."""
        return self._timers.next_deadline()

    def collect_late(self, now: float) -> dict[int, list[FileTimerRequest]]:
        """Read the requests; return the timers that have expired, by process."""
        taken = self._read(now)
        self._full_reads = self._full_reads + 1 if taken >= TAKE_BYTES_MAX else 0
        if 0 < self._full_reads < FULL_READS_MAX:
            return {}
        return self._find_late(now)

    @property
    def failed_kills(self) -> Mapping[int, int]:
        """How often a late process could not be signalled; the server reports its timers again."""
        return self._kills

    def finish(
        self, pid: int, requests: list[FileTimerRequest], now: float, *, killed: bool
    ) -> None:
        """Drop the timers of a late process, or schedule another attempt to kill it."""
        if killed:
            if any(one.signal > 0 for one in requests):
                self.clear_timers((pid,))
            else:
                for one in requests:  # Other timers of this process remain.
                    self._timers.release(pid, one.scope_id)
            return
        kills = self._kills[pid] = self._kills.get(pid, 0) + 1
        if kills < KILLS_MAX:
            self._timers.schedule_again(requests, now + KILL_AGAIN_S)
        else:
            self.clear_timers((pid,))

    def is_reachable(self) -> bool:
        """Whether the pipe still exists at its path."""
        return self._pipe.is_reachable()

    def forget_all(self) -> None:
        """Drop all timers, after their workers have exited."""
        self._kills.clear()
        self._timers.clear_all()

    def close(self) -> None:
        """Remove the pipe and drop all timers. Stop the thread first, if there is one."""
        self._pipe.close()
        self.forget_all()

    # TorchElastic's interface, in which the server decides itself.

    def check(self, now: float) -> int:
        """Read the requests and kill late workers; return how many were late."""
        self._checking = True
        try:
            late = self.collect_late(now)
            if late:
                late = self._reaper.report_and_dump(
                    late,
                    more=lambda: self.collect_late(time.monotonic()),
                    again=self._kills,
                )
            for pid, requests in late.items():
                fatal = fatal_of(requests)
                killed = fatal is None or self._reaper.send(pid, fatal.signal, requests)
                self.finish(pid, requests, now, killed=killed)
            return len(late)
        finally:
            self._checking = False
            self._last_check = time.time()

    def start(self) -> None:
        """Watch in a thread."""

        if self._thread is None:
            self._thread = ServerThread(self, daemon=self._daemon)
            self._reaper.report(STARTED)

    def stop(self) -> None:
        """Stop the thread, if there is one, and remove the pipe."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        self.close()
        self._reaper.report(STOPPED)

    def run_once(self) -> None:
        """Read the requests that have arrived, kill late workers, and stop."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        if self._pipe.fileno() >= 0:
            self.check(time.monotonic())
        self.close()

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether there is a process with that pid."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # It exists and belongs to another user.
        return True

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Set or release timers of any process; only this agent's workers are ever killed."""
        for request in timer_requests:
            self._set(request, time.monotonic())

    def clear_timers(self, worker_pids: Iterable[int]) -> None:
        """Drop the timers of some processes."""
        for pid in worker_pids:
            self._kills.pop(pid, None)
            self._timers.clear((pid,))

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """Return the timers that expire up to a time of day, by process."""
        return self._timers.expired_by_wall(deadline)

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        return self._reaper.kill(worker_pid, signal)

    def get_last_progress_time(self) -> int:
        """Return when this server was last known to work: now, unless it is behind.

        A server without work sleeps, which is not a problem.
        """
        return int(self._last_check if self._is_behind() else time.time())

    # Internals.

    def _find_late(self, now: float) -> dict[int, list[FileTimerRequest]]:
        late = self._timers.due(now)
        requested = {pid: [one.to_json() for one in timers] for pid, timers in late.items()}
        log_debug_info_for_expired_timers(self._run_id, requested)
        return late

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
                if pid not in foreign and self._reaper.is_ours(pid):
                    self._set(request, now)
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

    def _set(self, request: FileTimerRequest, now: float) -> None:
        if not self._timers.set(request, now, time.time()):
            self._refusals.add(
                f"there are already {len(self._timers):,} timers",
                f"pid {request.worker_pid}, scope {request.scope_id!r}",
            )

    def _is_behind(self) -> bool:
        if self._checking:
            return True
        deadline = self._timers.next_deadline()
        if deadline is not None and deadline <= time.monotonic():
            return True
        if self._pipe.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._pipe.fileno(), select.POLLIN)
        return bool(poll.poll(0))


FAULT_PAUSE_S, FAULT_PAUSE_S_MAX = 0.1, 10.0
"""The thread waits this much longer after each consecutive failure, up to the maximum."""


class ServerThread:
    """Drives a server; it reports a failure once and continues."""

    def __init__(self, server: FileTimerServer, *, daemon: bool) -> None:
        self._server = server
        self._ending, self._end = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="holdfast-timers", daemon=daemon)
        self._thread.start()

    def stop(self) -> None:
        """Wait until the thread has read the remaining requests and ended."""
        os.close(self._end)
        self._thread.join()
        os.close(self._ending)

    def _run(self) -> None:
        faults = 0
        while True:
            if faults == 0:
                wait_for(self._server.next_deadline(), self._server.fileno(), self._ending)
            else:  # The failure may persist, so wait before the next attempt.
                pause_s = min(faults * FAULT_PAUSE_S, FAULT_PAUSE_S_MAX)
                wait_for(time.monotonic() + pause_s, self._ending)
            # Checked before the read, so that the last read includes all earlier requests.
            ending = self._is_ending()
            try:
                self._server.check(time.monotonic())
                faults = 0
            except Exception as problem:  # noqa: BLE001 (a watchdog continues)
                faults += 1
                if faults == 1:
                    console.warning(f"timer server: {console.describe(problem)}; continuing")
            if ending:
                return

    def _is_ending(self) -> bool:
        poll = select.poll()
        poll.register(self._ending, select.POLLIN)
        return bool(poll.poll(0))
