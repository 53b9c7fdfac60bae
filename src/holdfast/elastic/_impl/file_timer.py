"""TorchElastic's `FileTimerServer`: kills the workers whose timers expired.

Holdfast's agent uses only `timers.worker_timers`, which reports expired timers to the agent's machine. This
server decides itself. Other programs run it in a thread with `start()` and `stop()`.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.processes.poll import wait_for
from holdfast.processes.procfs import is_descendant
from holdfast.timers.reaper import STARTED, STOPPED, Reaper, fatal_of, send_signal
from holdfast.timers.worker_timers import WorkerTimers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.timers.timer_requests import FileTimerRequest


class FileTimerServer:
    """Watches the timers of workers, and kills those whose timers expire.

    `max_interval` is TorchElastic's and has no effect, since this server does not poll. `is_ours(pid)` returns
    whether a request may name a process, by default any descendant of this one. `dump` writes a worker's
    stacks, `kill` signals it, and `log_event` receives each step.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
        *,
        is_ours: Callable[[int], bool] = is_descendant,
        dump: Callable[[int], object] | None = None,
        kill: Callable[[int, int], object] = send_signal,
    ) -> None:
        self._max_interval = max_interval
        self._daemon = daemon
        self._reaper = Reaper(is_ours, dump=dump, kill=kill, report=log_event)
        self._timers = WorkerTimers(file_path, run_id, self._reaper.is_ours)
        self._thread: ServerThread | None = None
        self._checking = False
        self._last_check = time.time()

    def start(self) -> None:
        """Watch in a thread."""

        if self._thread is None:
            self._thread = ServerThread(self, daemon=self._daemon)
            self._reaper.report(STARTED)

    def stop(self) -> None:
        """Stop the thread, if there is one, and remove the pipe."""
        self._stop_thread()
        self.close()
        self._reaper.report(STOPPED)

    def run_once(self) -> None:
        """Read the requests that have arrived, kill late workers, and stop."""
        self._stop_thread()
        if self.fileno() >= 0:
            self.check(time.monotonic())
        self.close()

    def _stop_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    def check(self, now: float) -> int:
        """Read the requests and kill late workers; return how many were late."""
        self._checking = True
        try:
            late = self._timers.collect_late(now)
            if late:
                late = self._reaper.report_and_dump(
                    late,
                    more=lambda: self._timers.collect_late(time.monotonic()),
                    again=self._timers.failed_kills,
                )
            for pid, requests in late.items():
                fatal = fatal_of(requests)
                killed = fatal is None or self._reaper.send(pid, fatal.signal, requests)
                self._timers.finish(pid, requests, now, killed=killed)
            return len(late)
        finally:
            self._checking = False
            self._last_check = time.time()

    def fileno(self) -> int:
        """Return the descriptor that is readable when there are requests."""
        return self._timers.fileno()

    def next_deadline(self) -> float | None:
        """Return when the next timer is due, by the monotonic clock; None while there is none."""
        return self._timers.next_deadline()

    def close(self) -> None:
        """Remove the pipe and drop all timers. Stop the thread first, if there is one."""
        self._timers.close()

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
        """Set or release timers of any process; only descendants of this one are ever killed."""
        for request in timer_requests:
            self._timers.set(request, time.monotonic())

    def clear_timers(self, worker_pids: Iterable[int]) -> None:
        """Drop the timers of some processes."""
        self._timers.clear(worker_pids)

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

    def _is_behind(self) -> bool:
        if self._checking:
            return True
        deadline = self.next_deadline()
        if deadline is not None and deadline <= time.monotonic():
            return True
        return self.fileno() >= 0 and _is_readable(self.fileno())


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
            ending = _is_readable(self._ending)
            try:
                self._server.check(time.monotonic())
                faults = 0
            except Exception as problem:  # noqa: BLE001 (a watchdog continues)
                faults += 1
                if faults == 1:
                    console.warning(f"timer server: {console.describe(problem)}; continuing")
            if ending:
                return


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
