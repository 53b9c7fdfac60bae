"""Reports, dumps and signals workers whose timers have expired, as its caller decides.

`report_and_dump` reports each expiry (`timer expired`) and dumps the stacks. `send` sends a signal and
reports that (`kill worker process`). The timers of workers that wait for each other expire together, so
dump all of them before you signal the first. A dump that fails is only logged.
The reaper never signals its own process, and only watches and signals descendants of a worker.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.processes.procfs import has_ended
from holdfast.timers.timer_requests import FileTimerRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from holdfast.processes.workers.pages import OpenSection

    Report = Callable[[str, FileTimerRequest | None], object]


SECTION_SIGNAL = signal.SIGKILL


def section_timer(section: OpenSection, pid: int, now: float, wall: float) -> FileTimerRequest:
    """Return a section with a timeout as a timer, for `Reaper.report_and_dump`."""
    assert section.deadline_ns is not None
    expires = wall + (section.deadline_ns / 1e9 - now)
    return FileTimerRequest(pid, f"section {section.name}", expires, SECTION_SIGNAL)


STARTED = "watchdog started"
STOPPED = "watchdog stopped"
EXPIRED = "timer expired"
KILLED = "kill worker process"

SCOPES_NAMED_MAX = 3
REPORT_ROUNDS_MAX = 4
"""How many times to search for late workers before the first is signalled."""
DUMPS_AT_ONCE = 8
"""Concurrent dumps, so that the stacks of workers that wait for each other are from the same moment."""


def send_signal(pid: int, signum: int) -> None:
    """Signal a process, if it still exists."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


class Reaper:
    """Reports, dumps and signals workers whose timers expired.

    `is_ours(pid)` returns whether a process belongs to a worker. `dump(pid)` writes its stacks to its log, within a
    limited time. `kill(pid, signum)` signals it. `report(what, request)` receives each step.
    """

    def __init__(
        self,
        is_ours: Callable[[int], bool],
        *,
        dump: Callable[[int], object] | None = None,
        kill: Callable[[int, int], object] = send_signal,
        report: Report | None = None,
    ) -> None:
        self._is_ours = is_ours
        self._dump = dump
        self._kill = kill
        self._report = report

    def is_ours(self, pid: int) -> bool:
        """Whether a timer may watch and kill a process; never this process itself."""
        return pid > 0 and pid != os.getpid() and self._is_ours(pid)

    def report(self, what: str, request: FileTimerRequest | None = None) -> None:
        """Report a step."""
        if self._report is not None:
            self._report(what, request)

    def report_and_dump(
        self,
        late: Mapping[int, Sequence[FileTimerRequest]],
        *,
        more: Callable[[], Mapping[int, Sequence[FileTimerRequest]]] | None = None,
        again: Container[int] = (),
    ) -> dict[int, list[FileTimerRequest]]:
        """Report and dump processes with expired timers; return all, including those from `more`.

        Processes in `again` have been reported and dumped before.
        """
        expired: dict[int, list[FileTimerRequest]] = {}
        for round_ in range(REPORT_ROUNDS_MAX):
            # A process that already has a timer with a signal needs no further report.
            new = [pid for pid in late if fatal_of(expired.get(pid, ())) is None]
            for pid, requests in late.items():
                expired.setdefault(pid, []).extend(requests)
            self._report_and_dump(
                {pid: late[pid] for pid in new if pid not in again and self._is_alive(pid)}
            )
            if more is None or not new or round_ == REPORT_ROUNDS_MAX - 1:
                break
            late = more()
        return expired

    def _is_alive(self, pid: int) -> bool:
        """Whether a process still belongs to a worker and has not ended."""
        return self.is_ours(pid) and not has_ended(pid)

    def _report_and_dump(self, late: Mapping[int, Sequence[FileTimerRequest]]) -> None:
        for pid, requests in late.items():
            fatal = fatal_of(requests)
            for request in requests:
                self.report(EXPIRED, request)
                if request is fatal:
                    break
            self._log(pid, requests, fatal)
        self._dump_all([*late])

    def send(self, pid: int, signum: int, requests: Sequence[FileTimerRequest]) -> bool:
        """Send a process the signal of one of its timers; return False if that failed."""
        if not self._is_alive(pid):
            return True
        if not self.kill(pid, signum):
            return False
        self.report(KILLED, next(one for one in requests if one.signal == signum))
        return True

    def kill(self, pid: int, signum: int) -> bool:
        """Signal a worker; return False if that failed."""
        if not self.is_ours(pid):
            return True
        try:
            self._kill(pid, signum)
        except OSError as problem:
            console.warning(f"cannot kill the worker whose timer expired (pid {pid}): {problem}")
            return False
        return True

    def _log(
        self, pid: int, requests: Sequence[FileTimerRequest], fatal: FileTimerRequest | None
    ) -> None:
        scopes = [repr(one.scope_id) for one in requests[:SCOPES_NAMED_MAX]]
        more = len(requests) - len(scopes)
        named = ", ".join(scopes) + (f" and {more} more" if more else "")
        signum = f"its signal is {fatal.signal:d}" if fatal is not None else "it has no signal"
        console.error(f"timer expired: {named} (pid {pid}); {signum}")

    def _dump_all(self, pids: Sequence[int]) -> None:
        """Dump the stacks of several workers in parallel, so that a stuck worker does not delay the others."""
        waiting = [*reversed(pids)]

        def dump_some() -> None:
            while True:
                try:
                    pid = waiting.pop()
                except IndexError:
                    return
                self.dump_stacks(pid)

        others = []
        for _ in range(1, min(len(pids), DUMPS_AT_ONCE)):
            one = threading.Thread(target=dump_some, name="holdfast-dumps", daemon=True)
            try:
                one.start()
            except RuntimeError:
                break  # No more threads can be started; continue with these.
            others.append(one)
        dump_some()
        for one in others:
            one.join()

    def dump_stacks(self, pid: int) -> None:
        """Dump the stacks of a worker; a failure is only reported."""
        if self._dump is None:
            return
        try:
            self._dump(pid)
        except Exception as problem:  # noqa: BLE001 (the worker must be killed anyway)
            console.warning(f"cannot dump stacks (pid {pid}): {console.describe(problem)}")


def fatal_of(requests: Sequence[FileTimerRequest]) -> FileTimerRequest | None:
    """Return the timer whose signal a process receives: the first one with a signal."""
    return next((one for one in requests if one.signal > 0), None)
