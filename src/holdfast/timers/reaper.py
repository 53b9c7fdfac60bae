"""What happens to a worker whose timer has expired, and in which order.

The expiry is reported (`timer expired`), the worker's stacks are dumped, the worker gets the signal
that the timer named, and that is reported (`kill worker process`). Workers that wait for each other
are late together, so all are dumped before the first is killed. Nothing that goes wrong with the
dump keeps a worker alive, and the process that watches is never signalled. Only what descends from
a worker may be watched and killed.
"""

from __future__ import annotations

import os
import signal

from holdfast import console
from holdfast.processes.procfs import has_ended
from holdfast.timers.protocol import FileTimerRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from holdfast.processes.workers.pages import Section

    Tell = Callable[[str, FileTimerRequest | None], object]


SECTION_SIGNAL = signal.SIGKILL


def section_timer(section: Section, pid: int, now: float, wall: float) -> FileTimerRequest:
    """Return the timer that a section with a timeout amounts to, for `Reaper.expire`."""
    assert section.deadline_ns is not None
    expires = wall + (section.deadline_ns / 1e9 - now)
    return FileTimerRequest(pid, f"section {section.name}", expires, SECTION_SIGNAL)


STARTED = "watchdog started"
STOPPED = "watchdog stopped"
EXPIRED = "timer expired"
KILLED = "kill worker process"

SCOPES_NAMED_MAX = 3
REPORT_ROUNDS_MAX = 4
"""How often it is asked who has become late meanwhile, before the first is killed."""
DUMPS_AT_ONCE = 8
"""So many stacks are dumped in the same moment: what waits for each other is best seen so."""


def send_signal(pid: int, signum: int) -> None:
    """Signal a process; one that is gone already is no fault."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


class Reaper:
    """Ends workers whose time is up.

    `is_ours(pid)` says whether a process is a worker or belongs to one, `dump(pid)` writes its
    stacks where the person finds them (it has to end by itself), `kill(pid, signum)` signals it,
    and `tell(what, request)` hears of it.
    """

    def __init__(
        self,
        is_ours: Callable[[int], bool],
        *,
        dump: Callable[[int], object] | None = None,
        kill: Callable[[int, int], object] = send_signal,
        tell: Tell | None = None,
    ) -> None:
        self._is_ours = is_ours
        self._dump = dump
        self._kill = kill
        self._tell = tell

    def is_ours(self, pid: int) -> bool:
        """Return whether a process may be watched, and ended. This one may not, whoever asks."""
        return pid > 0 and pid != os.getpid() and self._is_ours(pid)

    def tell(self, what: str, request: FileTimerRequest | None = None) -> None:
        """Say that something happened."""
        if self._tell is not None:
            self._tell(what, request)

    def expire(
        self,
        late: Mapping[int, Sequence[FileTimerRequest]],
        *,
        more: Callable[[], Mapping[int, Sequence[FileTimerRequest]]] | None = None,
        again: Container[int] = (),
    ) -> list[int]:
        """Do what is to be done about expired timers, by process, the earliest first.

        All are shown before the first is killed, since its end has the agent stop the others: also
        those that `more()` finds late when the first are shown. Returns the processes that were to
        be killed and could not be; of those in `again`, only that is tried.
        """
        expired: dict[int, list[FileTimerRequest]] = {}
        for showing in range(REPORT_ROUNDS_MAX):
            # Of whom it is known that it will be killed, no more need be said.
            new = [pid for pid in late if _fatal(expired.get(pid, ())) is None]
            for pid, requests in late.items():
                expired.setdefault(pid, []).extend(requests)
            self._show({pid: late[pid] for pid in new if pid not in again and self._lives(pid)})
            if more is None or not new or showing == REPORT_ROUNDS_MAX - 1:
                break
            late = more()
        return [pid for pid, requests in expired.items() if not self._end(pid, requests)]

    def _lives(self, pid: int) -> bool:
        """Whether a process is a worker's still. It may have ended by itself, or been stopped."""
        return self.is_ours(pid) and not has_ended(pid)

    def _show(self, late: Mapping[int, Sequence[FileTimerRequest]]) -> None:
        for pid, requests in late.items():
            fatal = _fatal(requests)
            for request in requests:
                self.tell(EXPIRED, request)
                if request is fatal:
                    break
            self._explain(pid, requests, fatal)
        self._dump_all([*late])

    def _end(self, pid: int, requests: Sequence[FileTimerRequest]) -> bool:
        """Kill a process if that is asked for; return False if it could not be."""
        fatal = _fatal(requests)
        if fatal is None or not self._lives(pid):
            return True
        if not self.kill(pid, fatal.signal):
            return False
        self.tell(KILLED, fatal)
        return True

    def kill(self, pid: int, signum: int) -> bool:
        """Signal a worker; return False if it could not be."""
        if not self.is_ours(pid):
            return True
        try:
            self._kill(pid, signum)
        except OSError as problem:
            console.warning(
                f"a worker whose timer expired (pid {pid}) could not be killed: {problem}"
            )
            return False
        return True

    def _explain(
        self, pid: int, requests: Sequence[FileTimerRequest], fatal: FileTimerRequest | None
    ) -> None:
        scopes = [repr(one.scope_id) for one in requests[:SCOPES_NAMED_MAX]]
        more = len(requests) - len(scopes)
        named = ", ".join(scopes) + (f" and {more} more" if more else "")
        what = f"killed with signal {fatal.signal:d}" if fatal is not None else "left alone"
        console.error(f"the time is up for {named} (pid {pid}): it is {what}")

    def _dump_all(self, pids: Sequence[int]) -> None:
        """Have the stacks of several workers written at once: one that is stuck keeps no other."""
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
            import threading

            one = threading.Thread(target=dump_some, name="holdfast-dumps", daemon=True)
            try:
                one.start()
            except RuntimeError:
                break  # No more threads are to be had here; those there are will do.
            others.append(one)
        dump_some()
        for one in others:
            one.join()

    def dump_stacks(self, pid: int) -> None:
        """Have the stacks of a worker written, whatever comes of it."""
        if self._dump is None:
            return
        try:
            self._dump(pid)
        except Exception as problem:  # noqa: BLE001 (it must not keep the worker alive)
            kind = type(problem).__name__
            console.warning(f"no stacks could be had (pid {pid}): {kind}: {problem}")


def _fatal(requests: Sequence[FileTimerRequest]) -> FileTimerRequest | None:
    """Return the timer for whose sake a process is killed: the first that has a signal."""
    return next((one for one in requests if one.signal > 0), None)
