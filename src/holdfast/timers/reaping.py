"""What is done to a worker whose time is up, and in which order.

It is told (`timer expired`), the worker's stacks are dumped, the worker gets the signal that the
timer named, and that is told (`kill worker process`). Nothing that goes wrong with the dump keeps
the worker alive, and the process that watches is never signalled.
"""

from __future__ import annotations

import os

from holdfast import messages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.timers.requests import FileTimerRequest

    Tell = Callable[[str, FileTimerRequest | None], object]

STARTED = "watchdog started"
STOPPED = "watchdog stopped"
EXPIRED = "timer expired"
KILLED = "kill worker process"

SCOPES_NAMED_MAX = 3


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
        self, pid: int, requests: Sequence[FileTimerRequest], *, again: bool = False
    ) -> bool:
        """Do what is to be done about expired timers, the earliest first.

        Returns False if the worker was to be killed and could not be; `again` tries only that.
        """
        if not self.is_ours(pid):
            return True  # It has ended; perhaps the number is somebody else's by now.
        fatal = next((one for one in requests if one.signal > 0), None)
        if not again:
            for request in requests:
                self.tell(EXPIRED, request)
                if request is fatal:
                    break
            self._explain(pid, requests, fatal)
            self.dump_stacks(pid)
        if fatal is None:
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
            messages.warning(
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
        messages.error(f"the time is up for {named} (pid {pid}): it is {what}")

    def dump_stacks(self, pid: int) -> None:
        """Have the stacks of a worker written, whatever comes of it."""
        if self._dump is None:
            return
        try:
            self._dump(pid)
        except Exception as problem:  # noqa: BLE001 (it must not keep the worker alive)
            kind = type(problem).__name__
            messages.warning(f"no stacks could be had (pid {pid}): {kind}: {problem}")
