"""The server of timers that workers set over a named pipe.

An agent drives it from its own loop, without a thread: wait until `fileno()` is readable or until
`next_deadline()`, then `take(now)`; `close()` at the end. Everybody else runs it in a thread with
`start()` and `stop()`, as TorchElastic's. What has come is always taken in before asking what is
due, so that a server that was held up does not kill workers that were in time.

A client gives the expiry by the time of day. It is turned into seconds from now when it arrives,
and from then on only the monotonic clock counts: no step of the clock kills a worker.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from _thread import RLock
from typing import Generic, TypeVar

from holdfast import console
from holdfast.errors import UsageError
from holdfast.processes.poll import wait_for
from holdfast.processes.procfs import has_ended, is_below_this_process
from holdfast.timers.deadlines import Deadlines
from holdfast.timers.protocol import (
    TIME_MAX,
    InvalidRequest,
    LineSplitter,
    TimerRequest,
    parse_request,
)
from holdfast.timers.reaper import (
    STARTED,
    STOPPED,
    Reaper,
    send_signal,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Protocol

    from holdfast.timers.protocol import FileTimerRequest

    class Driven(Protocol):
        """What an agent's loop, or this thread, drives."""

        def fileno(self) -> int:
            """Return what can be read when there is something to take."""

        def next_deadline(self) -> float | None:
            """Return when to take in any case."""

        def take(self, now: float) -> object:
            """Do what is to be done now."""


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Log the expired timers of each process as they were asked for; nothing if there are none."""
    for pid, timers in expired_timers.items():
        console.info(f"run {run_id}: expired timers of process {pid}: {', '.join(timers)}")


NAMED_MAX = 5
"""So many refusals of a kind are told; the rest are only counted."""


class RefusalLog:
    """Tells of requests that are refused, without letting a faulty script fill the log."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(self._counts.values())

    def tell(self, kind: str, detail: str, level: int = console.WARNING) -> None:
        """Say that a request was refused; `kind` is why, `detail` is which."""
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count <= NAMED_MAX:
            console.log(level, f"{self._where}: {kind}: {detail}")
        if count == NAMED_MAX:
            console.log(level, f"{self._where}: {kind}: more of these are not told")


PIPE_BYTES = 1 << 20
"""How much the pipe holds, if the kernel lets it: about 8,000 requests."""

TAKE_BYTES_MAX = 2 * PIPE_BYTES
"""So much is taken at once, at most: all that was in the pipe, however fast it is filled."""

READ_BYTES = 1 << 16


class Fifo:
    """The reading end of a named pipe that is made here."""

    def __init__(self, path: str) -> None:
        self.path = path
        clear_path(path)
        try:
            os.mkfifo(path, 0o600)
        except OSError as problem:
            raise _unusable(path, problem.strerror or str(problem)) from problem
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._inode = os.fstat(self._fd).st_ino
        self._widen()

    def fileno(self) -> int:
        """Return the descriptor that can be read when something has come."""
        return self._fd

    def is_reachable(self) -> bool:
        """Return whether the pipe is still at its path."""
        try:
            return os.lstat(self.path).st_ino == self._inode
        except OSError:
            return False

    def chunks(self) -> Iterator[bytes]:
        """Take all that has come, and no more than `TAKE_BYTES_MAX`."""
        taken = 0
        while taken < TAKE_BYTES_MAX:
            try:
                chunk = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return
            taken += len(chunk)
            yield chunk

    def close(self) -> None:
        """Close the pipe, and remove it unless another is at its path by now."""
        if self._fd < 0:
            return
        if self.is_reachable():
            try:
                os.unlink(self.path)
            except OSError:
                pass  # Somebody has removed it just now, or its folder.
        os.close(self._fd)
        self._fd = -1

    def _widen(self) -> None:
        import fcntl

        try:
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            pass  # This user has many pipes: then clients wait more often until it is read.


def clear_path(path: str) -> None:
    """Remove a pipe that was left behind at a path; raise `UsageError` if it is anything else."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as problem:
        raise _unusable(path, problem.strerror or str(problem)) from problem
    if not stat.S_ISFIFO(there.st_mode):
        raise _unusable(path, "something else is there, and no pipe")
    if there.st_uid != os.geteuid():
        raise _unusable(path, "it is somebody else's pipe")
    if _is_read(path):
        raise _unusable(path, "another agent reads this pipe")
    os.unlink(path)


def _is_read(path: str) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as problem:
        return problem.errno != errno.ENXIO
    os.close(fd)
    return True


def _unusable(path: str, why: str) -> UsageError:
    return UsageError(
        f"cannot make the pipe for timers {path}: {why}",
        hint="TORCHELASTIC_TIMER_FILE names a path where nothing is yet, or nothing at all",
    )


Request = TypeVar("Request", bound=TimerRequest)

TIMERS_MAX = 10_000
"""So many timers are watched at once, about 5 MB of them; one more is refused."""

PURGE_S = 1.0
"""Where there are too many timers, those of ended processes are looked for this often."""


class TimerTable(Generic[Request]):
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


FAULT_PAUSE_S, FAULT_PAUSE_S_MAX = 0.1, 10.0
"""How much longer it waits after each fault, and how long at most."""


class ServerThread:
    """Sleeps until there is something to do; a fault is told, and does not end it."""

    def __init__(self, server: Driven, *, daemon: bool) -> None:
        self._server = server
        self._ending, self._end = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="holdfast-timers", daemon=daemon)
        self._thread.start()

    def stop(self) -> None:
        """Have it take once more what has come, and wait until it has ended."""
        os.close(self._end)
        self._thread.join()
        os.close(self._ending)

    def _run(self) -> None:
        faults = 0
        while True:
            if faults == 0:
                wait_for(self._server.next_deadline(), self._server.fileno(), self._ending)
            else:  # What failed is there still: do not try it all the time.
                pause_s = min(faults * FAULT_PAUSE_S, FAULT_PAUSE_S_MAX)
                wait_for(time.monotonic() + pause_s, self._ending)
            ending = self._is_ending()  # Asked first: what came before is taken in any case.
            try:
                self._server.take(time.monotonic())
                faults = 0
            except Exception as problem:  # noqa: BLE001 (a watchdog goes on)
                faults += 1
                if faults == 1:
                    kind = type(problem).__name__
                    console.warning(f"the watchdog had a fault and goes on: {kind}: {problem}")
            if ending:
                return

    def _is_ending(self) -> bool:
        import select

        poll = select.poll()
        poll.register(self._ending, select.POLLIN)
        return bool(poll.poll(0))


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
        self._timers: TimerTable[FileTimerRequest] = TimerTable()
        self._lines = LineSplitter()
        self._refusals = RefusalLog("a timer request is refused")
        self._kills: dict[int, int] = {}
        self._full_takes = 0
        self._thread: ServerThread | None = None
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

        if self._thread is None:
            self._thread = ServerThread(self, daemon=self._daemon)
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
                    request = parse_request(line)
                except InvalidRequest as problem:
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
            self._refusals.tell("it names a process that has ended", detail, console.INFO)
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
