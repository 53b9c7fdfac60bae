"""Detects workers that take too long: expired timers, sections, uninterruptible sleep.

Workers set timers through a named pipe (`holdfast.timers`), if the agent's environment enables
it. Each worker reports sections through its own page of memory (`holdfast.worker`). `poll` reports both
as `TimersExpired`. The supervision decides which stacks to dump (`dump`) and which processes get
which signal (`signal`). The killed worker's exit is an ordinary event, and the failure report names the timer.
`blocked_workers` detects uninterruptible sleep.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.supervision import ExpiredTimer, TimersExpired
from holdfast.errors import UsageError
from holdfast.observe.lifecycle import WatchdogEvent
from holdfast.processes import stacks
from holdfast.processes.procfs import root_of, usage_of
from holdfast.processes.workers.pages import WorkerPages
from holdfast.timers import reaper, worker_timers
from holdfast.worker import PAGE_ENV

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.agent.blocked_workers import BlockedWorkers
    from holdfast.core.machine import Event
    from holdfast.observe.lifecycle import LifecycleEvent
    from holdfast.processes.failures.failure import ProcessFailure
    from holdfast.processes.workers.pages import Progress
    from holdfast.timers.reaper import Reaper
    from holdfast.timers.timer_requests import FileTimerRequest
    from holdfast.timers.worker_timers import WorkerTimers

ENABLE_ENV = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE_ENV = "TORCHELASTIC_TIMER_FILE"
TRUE_WORDS = ("1", "true", "yes", "on")
DUMP_S = 2.0
"""The limit for all dumps of one decision, which block the agent."""
DUMP_EACH_S_MIN = 0.1
"""The minimum for each dump: enough to read the state from the kernel."""
STACKS_CHARS_MAX = 64 * 1024
"""The part of a worker's stacks that the report keeps if the worker has no log."""


class TimeoutKill:
    """Why the agent killed a worker, or a process below it."""

    def __init__(self, pid: int, signum: int, scope: str, *, direct: bool) -> None:
        self._signum = signum
        self._direct = direct
        self._scope = scope
        self._target = "the worker" if direct else f"its process {pid}"

    def is_of(self, failure: ProcessFailure) -> bool:
        """Whether this signal ended the worker, or the program of a worker that is a shell."""
        own = failure.exitcode == -self._signum and self._direct
        return own or failure.exitcode == 128 + self._signum

    def why(self, failure: ProcessFailure) -> str:
        """Return what the signal did; a worker may survive it."""
        survived = self._direct and not self.is_of(failure)
        what = f"sent signal {self._signum:d} to" if survived else "killed"
        return f"timer {self._scope!r} expired: {what} {self._target}"


class Watchdogs:
    """The timers and sections of one agent's workers, over all generations."""

    def __init__(
        self,
        run_id: str,
        report: Callable[[LifecycleEvent], object],
        first_heartbeat: Callable[[int], object],
        blocked: BlockedWorkers | None = None,
    ) -> None:
        self._run_id = run_id
        self._report = report
        self._first_heartbeat = first_heartbeat
        self._blocked = blocked
        self._late: dict[int, list[FileTimerRequest]] = {}
        """Expired timers and sections that the supervision has not dealt with, by process."""
        self._silent: set[int] = set()  # Local ranks without a heartbeat so far.
        self._timers: WorkerTimers | None = None
        self._timers_path = ""
        self._pages: WorkerPages | None = None
        self._reaper: Reaper | None = None
        self._workers: dict[int, int] = {}  # Local ranks by process id.
        self._logs: Mapping[int, str] = {}
        self._roots: dict[int, int] = {}  # The worker of each late process.
        self._kills: dict[int, TimeoutKill] = {}  # By worker.
        self._stacks: dict[int, str] = {}  # By worker, if it has no log.
        self._dump_until = 0.0
        self._timers_failed = self._pages_failed = False  # For the rest of the run.

    # Generations.

    def begin(self, ranks: Iterable[int], environ: Mapping[str, str]) -> None:
        """Prepare pages and the pipe for the workers of a generation."""
        self._workers, self._roots, self._kills, self._stacks = {}, {}, {}, {}
        self._late = {}
        if self._pages is None and not self._pages_failed:
            try:
                self._pages = WorkerPages()
            except OSError as problem:
                console.info(f"workers cannot report progress: {problem}")
        self._silent = set(ranks)
        if self._pages is not None:
            try:
                self._pages.begin(self._silent)
            except OSError as problem:
                self._give_up_pages(problem)
        if self._timers is not None:
            self._timers.forget_all()
            if not self._timers.is_reachable():
                console.warning(f"{self._timers_path} was removed; creating a new pipe for timers")
                self._stop_timers()
        wanted = environ.get(ENABLE_ENV, "").strip().lower() in TRUE_WORDS
        if self._timers is None and wanted and not self._timers_failed:
            self._timers = self._serve_timers(environ.get(FILE_ENV, ""))
            self._timers_failed = self._timers is None

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables that a worker needs."""
        found = self._pages.environment(rank) if self._pages is not None else {}
        if PAGE_ENV not in found and os.environ.get(PAGE_ENV):
            # The agent inherited this page as a worker of another agent.
            found[PAGE_ENV] = ""
        if self._timers is not None:
            found[FILE_ENV] = self._timers_path
        elif self._timers_failed:
            found[FILE_ENV] = ""  # The inherited variable names a pipe without a reader.
        return found

    def started(self, generation: int, pids: Mapping[int, int], logs: Mapping[int, str]) -> None:
        """Record the workers' processes and the logs of their standard error."""
        if self._blocked is not None:
            self._blocked.started(generation, pids, time.monotonic())
        self._workers = {pid: rank for rank, pid in pids.items()}
        self._logs = logs

    def ended(self, rank: int) -> None:
        """Forget a worker that has exited, because another process may get its pid."""
        if self._blocked is not None:
            self._blocked.ended(rank)
        for pid in [pid for pid, one in self._workers.items() if one == rank]:
            del self._workers[pid]
            if self._timers is not None:
                self._timers.clear((pid,))

    def stopped(self) -> None:
        """Stop the checks: all workers have exited."""
        if self._blocked is not None:
            self._blocked.stopped()

    def close(self) -> None:
        self.stopped()
        self._stop_timers()
        if self._pages is not None:
            _close_quietly(self._pages)
            self._pages = None
        self._timers_failed = self._pages_failed = False
        self._workers = {}

    def _stop_timers(self) -> None:
        timers, self._timers = self._timers, None
        if timers is not None:
            _close_quietly(timers)
            self._record("watchdog stopped", None)

    # For the agent's loop.

    def descriptors(self) -> list[int]:
        return [one.fileno() for one in (self._timers, self._pages) if one is not None]

    def next_deadline(self) -> float | None:
        watched = (self._timers, self._pages, self._blocked)
        times = [one.next_deadline() for one in watched if one is not None]
        return min((at for at in times if at is not None), default=None)

    def poll(self, now: float) -> list[Event]:
        """Read new data from workers; return events for the supervision."""
        events = self._blocked.poll(now) if self._blocked is not None else []
        late = self._take_late(now)
        for pid, requests in late.items():
            self._late.setdefault(pid, []).extend(requests)
        if late:
            events.append(TimersExpired(tuple(map(_expired, self._late.items()))))
        return events

    def _take_late(self, now: float) -> dict[int, list[FileTimerRequest]]:
        """Return the timers and sections that have newly expired, by process."""
        late: dict[int, list[FileTimerRequest]] = {}
        if self._timers is not None:
            try:
                late = self._timers.collect_late(now)
            except OSError as problem:
                console.warning(f"timers disabled: {problem}")
                timers, self._timers, self._timers_failed = self._timers, None, True
                _close_quietly(timers)
        if self._pages is not None:
            try:
                for pid, requests in self._late_sections(self._pages, now).items():
                    late.setdefault(pid, []).extend(requests)
            except OSError as problem:
                self._give_up_pages(problem)
        return late

    def dump(self, timers: tuple[ExpiredTimer, ...]) -> tuple[ExpiredTimer, ...]:
        """Dump the stacks of these processes; return their timers and those that expired meanwhile."""
        self._dump_until = 0.0
        late = self._obtain_reaper().report_and_dump(
            {one.pid: self._late[one.pid] for one in timers if one.pid in self._late},
            more=lambda: self._take_late(time.monotonic()),
            again=self._timers.failed_kills if self._timers is not None else (),
        )
        self._late.update(late)
        dumped = tuple(map(_expired, late.items()))
        for one in dumped:
            if one.signum <= 0:
                self._finish(one.pid, self._late.pop(one.pid), signalled=True)
        return dumped

    def signal(self, pid: int, signum: int) -> None:
        """Send a signal to a late process, if it is still a worker's."""
        late = self._late.pop(pid, None)
        if late is not None:
            self._finish(pid, late, signalled=self._obtain_reaper().send(pid, signum, late))

    def _finish(self, pid: int, late: list[FileTimerRequest], *, signalled: bool) -> None:
        if self._timers is not None:
            self._timers.finish(pid, late, time.monotonic(), killed=signalled)

    def _give_up_pages(self, problem: OSError) -> None:
        console.warning(f"sections and progress disabled: {problem}")
        pages, self._pages, self._pages_failed = self._pages, None, True
        if pages is not None:
            _close_quietly(pages)

    def _late_sections(self, pages: WorkerPages, now: float) -> dict[int, list[FileTimerRequest]]:
        """Return the sections that passed their deadline, by process."""
        late: dict[int, list[FileTimerRequest]] = {}
        for rank, section in pages.take(now):
            # The process that calls `holdfast.worker`; it may be the child of a shell.
            pid = pages.progress(rank).pid
            if not self._is_ours(pid):
                # The pid belongs to a container's namespace, or the process is no longer below the worker.
                pid = next((pid for pid, one in self._workers.items() if one == rank), 0)
            if pid:
                timer = reaper.section_timer(section, pid, now, time.time())
                late.setdefault(pid, []).append(timer)
        if pages.was_requested and self._silent:
            for rank in [rank for rank in self._silent if pages.progress(rank).pid]:
                self._silent.discard(rank)
                self._first_heartbeat(rank)
        return late

    # Reports.

    def explain(self, failure: ProcessFailure) -> None:
        """Add the reason to the failure of a worker that a watchdog killed."""
        kill = self._kills.get(failure.pid)
        if kill is None:
            return
        if kill.is_of(failure):
            failure.consequence = failure.stopped = False
        elif failure.consequence or failure.stopped:
            return
        why = kill.why(failure)
        if why not in failure.detail:
            failure.detail = f"{why}; {failure.detail}" if failure.detail else why
        stacks = self._stacks.get(failure.pid, "")
        if stacks and not failure.stderr_tail.endswith(stacks):
            failure.stderr_tail += stacks

    def progress(self) -> list[tuple[int, Progress]]:
        """Return the progress that workers report, by local rank."""
        pages = self._pages
        if pages is None:
            return []
        return [(rank, pages.progress(rank)) for rank in sorted(self._workers.values())]

    def steps(self) -> list[tuple[int, int, float]]:
        """Return each worker's last step and when it was reported; also for workers that have exited."""
        return self._pages.steps() if self._pages is not None else []

    def memory(self) -> int:
        """Return the resident memory of all running workers, in bytes."""
        return sum(usage_of(pid)[1] for pid in self._workers)

    def curves(self) -> list[list[bytes]]:
        """Return the past progress of some workers, by generation; see `WorkerPages.curves`."""
        return self._pages.curves() if self._pages is not None else []

    # Timers and dumps.

    def _serve_timers(self, path: str) -> WorkerTimers | None:
        if not path:
            path = self._own_path()
        try:
            timers = worker_timers.WorkerTimers(path, self._run_id, self._is_ours)
        except UsageError as problem:  # The job runs without timers.
            console.warning(f"{problem.message}: timers disabled ({problem.hint})")
            return None
        except OSError as problem:
            console.warning(
                f"{FILE_ENV}: timers disabled: cannot use {path}: {problem.strerror or problem}"
            )
            return None
        self._timers_path = path
        self._record("watchdog started", None)
        return timers

    def _own_path(self) -> str:
        """Return a unique path, in the folder that is removed even if this agent is killed."""
        if self._pages is not None:
            return os.path.join(self._pages.folder, "timers")
        return os.path.join(tempfile.gettempdir(), f"watchdog_timer_{os.urandom(8).hex()}")

    def _obtain_reaper(self) -> Reaper:
        if self._reaper is None:
            self._reaper = reaper.Reaper(self._is_ours, dump=self._dump, report=self._record)
        return self._reaper

    def _is_ours(self, pid: int) -> bool:
        return root_of(pid, self._workers) > 0

    def _dump(self, pid: int) -> None:
        now = time.monotonic()
        self._dump_until = self._dump_until or now + DUMP_S
        limit_s = max(DUMP_EACH_S_MIN, self._dump_until - now)
        root = self._roots.get(pid, pid)
        rank = self._workers.get(root)
        path = self._logs.get(rank, "") if rank is not None else ""
        if path:
            stacks.dump_into_log(pid, path, limit_s=limit_s)
        else:
            found = stacks.dump_stacks(pid, limit_s=limit_s)
            console.error(found)
            self._stacks[root] = found[:STACKS_CHARS_MAX]

    def _record(self, what: str, request: FileTimerRequest | None) -> None:
        at, wall = time.monotonic(), time.time()
        if request is None:
            self._report(WatchdogEvent(at, wall, what))
            return
        pid = request.worker_pid
        if what == reaper.EXPIRED:
            # Look it up now, because the ancestors of a killed process are unknown.
            self._roots[pid] = root_of(pid, self._workers)
        elif what == reaper.KILLED:
            root = self._roots.get(pid, pid)
            self._kills[root] = TimeoutKill(
                pid, request.signal, request.scope_id, direct=root == pid
            )
        scope, expires = request.scope_id, request.expiration_time
        self._report(WatchdogEvent(at, wall, what, pid, scope, expires, request.signal))


def _expired(late: tuple[int, list[FileTimerRequest]]) -> ExpiredTimer:
    """Return the timer that decides which signal a late process gets."""
    pid, requests = late
    one = reaper.fatal_of(requests) or requests[0]
    return ExpiredTimer(pid, one.scope_id, one.signal)


def _close_quietly(one: WorkerTimers | WorkerPages) -> None:
    try:
        one.close()
    except OSError:
        pass  # Its descriptors are closed already.
