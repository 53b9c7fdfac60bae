"""The server of timers that are asked for over a named pipe.

An agent drives it from its own loop, without a thread: wait until `fileno()` can be read or for
`next_deadline()`, then `take(now)`; `close()` at the end. Everybody else lets it run in a thread
with `start()` and `stop()`, as TorchElastic's. What has come is always taken in before it is asked
what is due, so that a server that was held up does not end workers that were in time.
"""

from __future__ import annotations

import os
import time

from holdfast import messages
from holdfast.timers.debug_info import log_debug_info_for_expired_timers
from holdfast.timers.fifo import TAKE_BYTES_MAX, Fifo
from holdfast.timers.ownership import has_ended, is_below_this_process
from holdfast.timers.reaping import STARTED, STOPPED, Reaper, send_signal
from holdfast.timers.refusals import Refusals
from holdfast.timers.request_lines import Lines, Unreadable, parse
from holdfast.timers.watched import WatchedTimers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.timers.requests import FileTimerRequest
    from holdfast.timers.threads import WatchThread

KILL_AGAIN_S = 1.0
KILLS_MAX = 5
"""A worker that cannot be killed is tried so often, `KILL_AGAIN_S` apart."""

FULL_TAKES_MAX = 8
"""While the pipe is filled as fast as it is read, nobody is found late, but for so many times."""


class FileTimerServer:
    """Watches the timers of this agent's workers, and ends those whose time is up.

    `max_interval` is taken for TorchElastic's sake; nothing here is looked at every so often.
    `is_ours(pid)` says whom a request may name: without it, whatever descends from this process.
    `dump` writes a worker's stacks, `kill` signals it, and `log_event` hears what happens.
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
        self._reaper = Reaper(is_ours, dump=dump, kill=kill, tell=log_event)
        self._timers: WatchedTimers[FileTimerRequest] = WatchedTimers()
        self._lines = Lines()
        self._refusals = Refusals("a timer request is refused")
        self._kills: dict[int, int] = {}
        self._full_takes = 0
        self._thread: WatchThread | None = None
        self._taking = False
        self._last_take = time.time()
        self._fifo = Fifo(file_path)

    # For an agent's own loop.

    def fileno(self) -> int:
        """Return the descriptor that can be read when there are requests."""
        return self._fifo.fileno()

    def next_deadline(self) -> float | None:
        """Return when the next timer is due, by the monotonic clock; None while there is none."""
        return self._timers.next_deadline()

    def take(self, now: float) -> int:
        """Take in what has come, end whoever is late; return how many workers that were."""
        self._taking = True
        try:
            return self._take(now)
        finally:
            self._taking = False
            self._last_take = time.time()

    def is_reachable(self) -> bool:
        """Return whether clients find the pipe where it was made."""
        return self._fifo.is_reachable()

    def forget_all(self) -> None:
        """Forget all timers: the workers they were for have ended."""
        self._kills.clear()
        self._timers.clear_all()

    def close(self) -> None:
        """Remove the pipe and forget all timers; a thread must have been stopped before."""
        self._fifo.close()
        self.forget_all()

    # TorchElastic's interface.

    def start(self) -> None:
        """Watch in a thread."""
        from holdfast.timers.threads import WatchThread

        if self._thread is None:
            self._thread = WatchThread(self, daemon=self._daemon)
            self._reaper.tell(STARTED)

    def stop(self) -> None:
        """Stop the thread, if there is one, and remove the pipe."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        self.close()
        self._reaper.tell(STOPPED)

    def run_once(self) -> None:
        """Take in what has come up to now, end whoever is late, and stop."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        if self._fifo.fileno() >= 0:
            self.take(time.monotonic())
        self.close()

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Return whether there is a process of that number."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # It is another user's, and there.
        return True

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Set or release timers, whoever's they are; only this agent's workers are ever ended."""
        for request in timer_requests:
            self._set(request, time.monotonic())

    def clear_timers(self, worker_pids: Iterable[int]) -> None:
        """Forget the timers of some processes."""
        for pid in worker_pids:
            self._kills.pop(pid, None)
            self._timers.clear((pid,))

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """Return the timers that expire up to a time of day, by process."""
        return self._timers.expired_by_wall(deadline)

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        return self._reaper.kill(worker_pid, signal)

    def get_last_progress_time(self) -> int:
        """Return when this server was last known to do its work: now, unless it has fallen behind.

        It sleeps while there is nothing to do, and that is no fault.
        """
        return int(self._last_take if self._is_behind() else time.time())

    # How it is done.

    def _take(self, now: float) -> int:
        taken = self._read(now)
        self._full_takes = self._full_takes + 1 if taken >= TAKE_BYTES_MAX else 0
        if 0 < self._full_takes < FULL_TAKES_MAX:
            return 0
        late: dict[int, list[FileTimerRequest]] = {}

        def find_late() -> dict[int, list[FileTimerRequest]]:
            found = self._find_late(max(now, time.monotonic()) if late else now)
            for pid, requests in found.items():
                late.setdefault(pid, []).extend(requests)
            return found

        def find_more() -> dict[int, list[FileTimerRequest]]:
            self._read(time.monotonic())  # They may have released them while others were shown.
            return find_late()

        alive = self._reaper.expire(find_late(), more=find_more, again=self._kills)
        for pid, requests in late.items():
            self._settle(pid, requests, now, killed=pid not in alive)
        return len(late)

    def _find_late(self, now: float) -> dict[int, list[FileTimerRequest]]:
        late = self._timers.due(now)
        asked = {pid: [one.to_json() for one in timers] for pid, timers in late.items()}
        log_debug_info_for_expired_timers(self._run_id, asked)
        return late

    def _read(self, now: float) -> int:
        taken = 0
        # To find out whose a process is takes longer than all else; so it is done once for those
        # that are not ours. They cannot become ours meanwhile.
        foreign: dict[int, bool] = {}  # And whether they have ended.
        for chunk in self._fifo.chunks():
            taken += len(chunk)
            for line in self._lines.feed(chunk):
                try:
                    request = parse(line)
                except Unreadable as problem:
                    self._refusals.tell("it cannot be read", str(problem))
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
        if ended:  # Most likely a worker's child, or a worker of the last generation: no fault.
            self._refusals.tell("it names a process that has ended", detail, messages.INFO)
        else:
            self._refusals.tell("it names a process that is no worker of this agent", detail)

    def _set(self, request: FileTimerRequest, now: float) -> None:
        wall = time.time()
        if self._timers.set(request, now, wall):
            return
        self._timers.purge(now, self._reaper.is_ours)
        if not self._timers.set(request, now, wall):
            self._refusals.tell(
                f"there are {len(self._timers):,} timers already",
                f"pid {request.worker_pid}, scope {request.scope_id!r}",
            )

    def _settle(
        self, pid: int, requests: list[FileTimerRequest], now: float, *, killed: bool
    ) -> None:
        """Drop the timers of a worker that has been seen to, or have it tried again."""
        if killed:
            if any(one.signal > 0 for one in requests):
                self.clear_timers((pid,))
            else:
                for one in requests:  # The others keep their own time.
                    self._timers.release(pid, one.scope_id)
            return
        kills = self._kills[pid] = self._kills.get(pid, 0) + 1
        if kills < KILLS_MAX:
            self._timers.put_off(requests, now + KILL_AGAIN_S)
        else:
            self.clear_timers((pid,))

    def _is_behind(self) -> bool:
        if self._taking:
            return True
        deadline = self._timers.next_deadline()
        if deadline is not None and deadline <= time.monotonic():
            return True
        if self._fifo.fileno() < 0:
            return False
        import select

        poll = select.poll()
        poll.register(self._fifo.fileno(), select.POLLIN)
        return bool(poll.poll(0))
