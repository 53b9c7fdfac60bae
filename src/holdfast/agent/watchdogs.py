"""What ends workers that take too long: expired timers, and sections they did not leave in time.

Workers set timers through a named pipe (`holdfast.timers`), if the environment of the agent asks
for one, and tell of sections through a page of memory each (`holdfast.worker`). Both end in the
same way: the worker's stacks are written into its log, it is killed, and the agent finds out as it
finds out about any worker that died. What it died of is remembered for the report.
"""

from __future__ import annotations

import os
import time

from holdfast import messages
from holdfast.agent.moments import Watchdog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.agent.moments import Moment
    from holdfast.processes.failures import ProcessFailure
    from holdfast.processes.worker_page import Progress
    from holdfast.processes.worker_pages import WorkerPages
    from holdfast.timers.file_server import FileTimerServer
    from holdfast.timers.reaping import Reaper
    from holdfast.timers.requests import FileTimerRequest

ENABLE_ENV = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE_ENV = "TORCHELASTIC_TIMER_FILE"
KILLED = "kill worker process"
DUMP_S = 2.0  # The agent looks after nothing else meanwhile.


class Watchdogs:
    """The timers and sections of one agent's workers, over all generations."""

    def __init__(
        self, run_id: str, tell: Callable[[Moment], object], spoke: Callable[[int], object]
    ) -> None:
        self._run_id = run_id
        self._tell = tell
        self._spoke = spoke
        self._silent: set[int] = set()  # Local ranks that have not made a call yet.
        self._timers: FileTimerServer | None = None
        self._timers_path = ""
        self._pages: WorkerPages | None = None
        self._reaper: Reaper | None = None
        self._workers: dict[int, int] = {}  # Local ranks by process.
        self._logs: Mapping[int, str] = {}
        self._ended: dict[int, str] = {}  # By process, what it was killed for.

    # One generation after the other.

    def begin(self, ranks: Iterable[int], environ: Mapping[str, str]) -> None:
        """Make what the workers of a generation need."""
        self._workers, self._ended = {}, {}
        if self._timers is not None:
            self._timers.forget_all()
        elif environ.get(ENABLE_ENV) == "1":
            self._timers = self._serve_timers(environ.get(FILE_ENV, ""))
        if self._pages is None:
            from holdfast.processes.worker_pages import WorkerPages

            try:
                self._pages = WorkerPages()
            except OSError as problem:
                messages.info(f"workers cannot tell their progress: {problem}")
                return
        self._silent = set(ranks)
        self._pages.begin(self._silent)

    def environment(self, rank: int) -> dict[str, str]:
        """Return what a worker needs in its environment."""
        found = self._pages.environment(rank) if self._pages is not None else {}
        if self._timers is not None:
            found[FILE_ENV] = self._timers_path
        return found

    def started(self, pids: Mapping[int, int], logs: Mapping[int, str]) -> None:
        """Take note of who the workers are, and where what they say to standard error goes."""
        self._workers = {pid: rank for rank, pid in pids.items()}
        self._logs = logs

    def ended(self, rank: int) -> None:
        """Forget a worker that has ended: its number may be another process's soon."""
        for pid in [pid for pid, one in self._workers.items() if one == rank]:
            del self._workers[pid]
            if self._timers is not None:
                self._timers.clear_timers((pid,))

    def close(self) -> None:
        """Remove everything."""
        if self._timers is not None:
            self._timers.close()
            self._note("watchdog stopped", None)
        if self._pages is not None:
            self._pages.close()
        self._timers = self._pages = None
        self._workers = {}

    # In the agent's loop.

    def descriptors(self) -> list[int]:
        """Return what can be read when there is something to `look` at."""
        return [one.fileno() for one in (self._timers, self._pages) if one is not None]

    def next_deadline(self) -> float | None:
        """Return when to `look` at the latest."""
        times = [one.next_deadline() for one in (self._timers, self._pages) if one is not None]
        return min((at for at in times if at is not None), default=None)

    def look(self, now: float) -> None:
        """Take in what has come, and end whoever is late."""
        if self._timers is not None:
            self._timers.take(now)
        if self._pages is None:
            return
        for rank, section in self._pages.take(now):
            from holdfast.timers.sections import request_of

            # Whoever makes the calls is the one to look at; it may be below a shell.
            pid = self._pages.progress(rank).pid
            if pid:
                self._obtain_reaper().expire(pid, [request_of(section, pid, now, time.time())])
        if self._pages.was_asked and self._silent:
            for rank in [rank for rank in self._silent if self._pages.progress(rank).pid]:
                self._silent.discard(rank)
                self._spoke(rank)

    # What is known of workers.

    def explain(self, failure: ProcessFailure) -> ProcessFailure:
        """Return the failure of a worker that was killed here as what it is."""
        why = self._ended.get(failure.pid)
        if why:
            failure.detail = f"{why}; {failure.detail}" if failure.detail else why
            failure.consequence = failure.stopped = False
        return failure

    def progress(self) -> list[tuple[int, Progress]]:
        """Return how far each worker says that it is, by local rank."""
        pages = self._pages
        if pages is None:
            return []
        return [(rank, pages.progress(rank)) for rank in sorted(self._workers.values())]

    # How a worker is ended.

    def _serve_timers(self, path: str) -> FileTimerServer | None:
        from holdfast.timers.file_server import FileTimerServer

        if not path:
            import tempfile

            path = os.path.join(tempfile.gettempdir(), f"watchdog_timer_{os.urandom(8).hex()}")
        try:
            server = FileTimerServer(
                path, self._run_id, log_event=self._note, is_ours=self._is_ours, dump=self._dump
            )
        except OSError as problem:
            messages.warning(f"{FILE_ENV}: no timers at {path}: {problem.strerror or problem}")
            return None
        self._timers_path = path
        self._note("watchdog started", None)
        return server

    def _obtain_reaper(self) -> Reaper:
        from holdfast.timers.reaping import Reaper

        if self._reaper is None:
            self._reaper = Reaper(self._is_ours, dump=self._dump, tell=self._note)
        return self._reaper

    def _is_ours(self, pid: int) -> bool:
        from holdfast.timers.ownership import descends_from

        return descends_from(pid, self._workers)

    def _dump(self, pid: int) -> None:
        from holdfast.control import stacks

        rank = self._workers.get(pid)
        path = self._logs.get(rank, "") if rank is not None else ""
        if path:
            stacks.dump_into_log(pid, path, limit_s=DUMP_S)
        else:
            messages.error(stacks.dump_stacks(pid, limit_s=DUMP_S))

    def _note(self, what: str, request: FileTimerRequest | None) -> None:
        if request is None:
            self._tell(Watchdog(time.monotonic(), time.time(), what))
            return
        if what == KILLED:
            self._ended[request.worker_pid] = (
                f"was killed because the time was up for {request.scope_id!r}"
            )
        self._tell(
            Watchdog(
                time.monotonic(),
                time.time(),
                what,
                request.worker_pid,
                request.scope_id,
                request.expiration_time,
                request.signal,
            )
        )
