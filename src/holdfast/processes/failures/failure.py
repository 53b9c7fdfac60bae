"""The failure of one worker, and the error that contains all failures.

If the error file cannot be read, `ProcessFailure` raises, as TorchElastic's does. The agent sets `tolerant`;
`detail` then contains the problem.

`core.blame` finds the first failure from the workers' tracebacks and messages, their times, and the
times of the exits (`ProcessFailure.trace`).
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from holdfast.core.blame import Blame, FailureTrace, Suspect, blame
from holdfast.lazy_dataclass import keyword_field, lazy_dataclass, post_init_field
from holdfast.processes import signals
from holdfast.processes.failures import peer_blame, tracebacks
from holdfast.processes.failures.error_file import enriched_signal_message, read_error_file
from holdfast.processes.failures.report_text import format_report

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.processes.workers.group import WorkerExit

NOT_AVAILABLE = "<N/A>"

_TIMESTAMP_S_MAX = (
    253_402_300_799  # The end of the year 9999, the last that `time.localtime` can show.
)

_SUDDEN = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGABRT")


@lazy_dataclass
class ProcessFailure:
    """One failed worker.

    The caller passes the first four fields. `error_file_data`, `message` and `timestamp` (whole
    seconds) are from the error file, or have defaults without one. An `error_file` that is not a
    regular file becomes `<N/A>`. The agent adds the keyword fields.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = post_init_field(init=False, repr=False)
    message: str | dict[str, Any] = post_init_field(init=False)
    timestamp: int = post_init_field(init=False)
    # The end of the worker's standard error.
    stderr_tail: str = keyword_field(default="", repr=False, kw_only=True)
    # Whether the failure happened after the stop of the group began; see `failed_after`.
    consequence: bool = keyword_field(default=False, kw_only=True)
    # Whether a signal that the stop of the group sent ended the worker.
    stopped: bool = keyword_field(default=False, kw_only=True)
    # A reason that the agent knows besides the exit code.
    detail: str = keyword_field(default="", kw_only=True)
    # Its position in the order in which the agent saw the exits, from 0.
    order: int = keyword_field(default=0, kw_only=True)
    stdout_file: str = keyword_field(default="", kw_only=True)
    stderr_file: str = keyword_field(default="", kw_only=True)
    # The host name; by default this host's.
    host: str = keyword_field(default="", kw_only=True)
    # When it ended, in nanoseconds since the epoch; by default now.
    observed_ns: int = keyword_field(default=0, repr=False, kw_only=True)
    # When the traceback on its standard error began; 0 if unknown.
    stderr_traceback_ns: int = keyword_field(default=0, repr=False, kw_only=True)
    # Its position among all failures, from 0; -1 if that is not decided yet.
    place: int = keyword_field(default=-1, repr=False, kw_only=True)
    # Ranks that may have failed first instead, if this is the first failure.
    rivals: tuple[int, ...] = keyword_field(default=(), repr=False, kw_only=True)
    # The time of the exception in the error file; 0 if unknown.
    recorded_ns: int = post_init_field(init=False, repr=False)
    # Whether an unreadable error file is reported in `detail` instead of raised.
    tolerant: bool = keyword_field(default=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        self.recorded_ns = 0
        self.observed_ns = self.observed_ns or time.time_ns()
        self.host = self.host or os.uname().nodename  # `getfqdn` could wait for a name server.
        self.error_file_data = {"message": "<NONE>"}
        self.message = ""
        self.timestamp = self.observed_ns // 1_000_000_000
        if os.path.isfile(self.error_file):
            self._read()
        else:
            self.error_file = NOT_AVAILABLE
        if self.message:
            return
        if self.exitcode < 0:
            self.message = (
                f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
            )
        else:
            self.message = f"{self.ending()}, and no error file with the reason"
            self.error_file_data["errorTraits"] = {
                "category": "system_terminated_error",
                "retryability": "False",
            }

    def _read(self) -> None:
        """Read the error file; fields that it does not contain keep their defaults."""
        try:
            data = read_error_file(self.error_file)
            message = data["message"]
            if not isinstance(message, (str, dict)):
                raise KeyError("message")
        except (OSError, ValueError, KeyError, MemoryError) as e:
            if not self.tolerant:
                raise
            reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
            if isinstance(e, KeyError):
                reason = "it has no message"
            problem = f"the error file {self.error_file} could not be read: {reason}"
            self.detail = f"{self.detail}; {problem}" if self.detail else problem
            return
        self.error_file_data = data
        self.message = message
        if isinstance(message, str):
            stamp = _seconds(data.get("timestamp"))
            self.timestamp = stamp or 0
        else:
            extra = _extra_info(message)
            stamp = _seconds(extra.get("timestamp"))
            self.timestamp = self.timestamp if stamp is None else stamp
            precise = _as_int(extra.get("timestamp_ns"))
            if precise is not None and precise > 0:
                self.recorded_ns = min(precise, self.observed_ns)
                return
        if stamp:
            # TorchElastic writes whole seconds; the exception was no later than their end.
            self.recorded_ns = min((stamp + 1) * 1_000_000_000 - 1, self.observed_ns)

    def signal_name(self) -> str:
        return _signal_name(-self.exitcode) if self.exitcode < 0 else NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Return the local time of the failure as `YYYY-MM-DD_HH:MM:SS`."""
        # Error files of the simple form need not have a time; then show the time of the exit.
        seconds = self.timestamp or self.observed_ns // 1_000_000_000
        return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(seconds))

    def traceback_ns(self) -> int:
        """Return when it began to report a reason, or a later time if unsure; 0 if it reported none."""
        times = [moment for moment in (self.recorded_ns, self.stderr_traceback_ns) if moment]
        return min(*times, self.observed_ns) if times else 0

    def happened_ns(self) -> int:
        """Return when it failed, or a later time if unsure, in nanoseconds since the epoch."""
        return self.traceback_ns() or self.observed_ns

    def failed_after(self, moment_ns: int) -> bool:
        """Return whether the worker failed after a moment, such as the start of the stop.

        A worker may record its exception and exit much later, after the stop that its peers' deaths
        caused. Its failure is then not a consequence of that stop.
        """
        return self.happened_ns() > moment_ns

    def died_suddenly(self) -> bool:
        """Return whether a signal ended the worker before it could report a reason."""
        return self.signal_name() in _SUDDEN and not self.recorded_ns

    def trace(self) -> FailureTrace:
        """Return which kind of reason the failure shows."""
        if self.died_suddenly() and not self.stopped:
            aborted = self.signal_name() == "SIGABRT"
            by_peer = aborted and peer_blame.abort_blames_peer(self.stderr_tail)
            return FailureTrace.PEER if by_peer else FailureTrace.KILLED
        if self.detail:
            return FailureTrace.OWN  # The agent knows why.
        traceback = self.traceback_text()
        reason = peer_blame.first_exception(traceback) if traceback else self.recorded_message()
        if reason:
            return FailureTrace.PEER if peer_blame.blames_peer(reason) else FailureTrace.OWN
        if self.stopped:
            return FailureTrace.STOPPED
        by_peer = self.signal_name() == "SIGPIPE" or peer_blame.tail_blames_peer(self.stderr_tail)
        return FailureTrace.PEER if by_peer else FailureTrace.SILENT

    def failed_by_itself(self) -> bool:
        """Return whether it may have failed for a reason other than the stop of its group."""
        return not self.consequence or self.trace() is not FailureTrace.STOPPED

    def only_stopped(self) -> bool:
        """Return whether nothing but the stop of its group ended the worker."""
        return self.stopped and self.consequence

    def recorded_message(self) -> str:
        message: Any = self.error_file_data.get("message")
        if isinstance(message, dict):
            message = message.get("message")
        return message if isinstance(message, str) and message != "<NONE>" else ""

    def recorded_traceback(self) -> str:
        callstack = _extra_info(self.message).get("py_callstack")
        return callstack.strip("\n") if isinstance(callstack, str) else ""

    def handler_message(self) -> str:
        """Return what the error handler adds to the message of a worker that a signal ended, if anything.

        Only the node of the worker asks its handler, which may read the worker's files.
        """
        if self.exitcode >= 0 or self.host != os.uname().nodename:
            return ""
        message = self.message if isinstance(self.message, str) else self.recorded_message()
        enriched = enriched_signal_message(message, self.error_file)
        return enriched.removeprefix(message).strip("\n")

    def traceback_text(self) -> str:
        """Return the traceback from the error file, or else the last one on standard error."""
        return self.recorded_traceback() or tracebacks.last_traceback(self.stderr_tail)

    def ending(self) -> str:
        code = self.exitcode
        if code >= 0:
            inside = _signal_name(code - 128) if code > 128 else NOT_AVAILABLE
            if inside == NOT_AVAILABLE:
                return f"exit code {code}"
            return f"exit code {code}, which usually means that a child process died of {inside}"
        if self.detail and code == -9:
            return "killed by SIGKILL"  # The known reason makes a guess superfluous.
        if self.stopped and code == -9:
            return "killed by SIGKILL (did not exit in time after the stop signal)"
        verb = "terminated" if self.signal_name() == "SIGTERM" else "killed"
        return f"{verb} by {signals.describe_signal(-code)}"

    def summary(self) -> str:
        """Return one line: how it ended, and the reason if known."""
        why = self.detail or self.recorded_message()
        if not why and self.exitcode > 0:
            why = tracebacks.exception_line(tracebacks.last_traceback(self.stderr_tail))
        first_line = why.strip().partition("\n")[0]
        return f"{self.ending()}: {first_line}" if first_line else self.ending()


def failure_of(
    exited: WorkerExit, *, stop_began_ns: int, traceback_before_stop: bool = False, **known: Any
) -> ProcessFailure:
    """Return the failure of a worker that exited in this way; `known` has the values of further fields.

    `traceback_before_stop`: whether its standard error had a traceback when the stop began.
    """
    failure = ProcessFailure(
        local_rank=exited.rank,
        pid=exited.pid,
        exitcode=exited.exitcode,
        detail=exited.detail,
        order=exited.order,
        observed_ns=exited.when_ns,
        tolerant=True,
        **known,
    )
    failure.stopped = exited.after_stop and exited.exitcode < 0 and not exited.stray_signal
    # If a worker recorded or printed an exception before the stop began, its failure is not a
    # consequence of the stop, however late it exited. The same applies if a stray signal killed it.
    failure.consequence = (
        exited.after_stop
        and not exited.stray_signal
        and not traceback_before_stop
        and failure.failed_after(stop_began_ns)
    )
    return failure


class ChildFailedError(Exception):
    """Workers failed. `failures` has them by global rank; `str(error)` is the whole report.

    The agent may set `log_dir`, `report_file` (the same report as JSON), `restarts` ("after 3 of 3
    restarts") and `many_nodes` (other nodes may have more failures). The report then shows these facts.
    """

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        if not failures:
            raise ValueError(f"ChildFailedError for {name!r} needs at least one failure")
        super().__init__(name, failures)
        self.name = name
        self.failures = failures
        self.log_dir = ""
        self.report_file = ""
        self.restarts = ""
        self.many_nodes = False

    def __str__(self) -> str:
        return self.format_msg()

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the rank and the failure of the worker that failed first."""
        return self.in_order()[0]

    def in_order(self) -> list[tuple[int, ProcessFailure]]:
        """Return all failures from the first to the last, consequences at the end."""
        judged = [item for item in self.failures.items() if item[1].place >= 0]
        if judged:
            unjudged = [item for item in self.failures.items() if item[1].place < 0]
            unjudged.sort(key=lambda item: item[1].order)
            return sorted(judged, key=lambda item: item[1].place) + unjudged
        return [(one.rank, self.failures[one.rank]) for one in self._find_first().order]

    def rivals(self) -> list[int]:
        """Return the ranks that may have failed first instead, in order."""
        _rank, first = self.get_first_failure()
        return sorted(
            first.rivals if first.place >= 0 else [one.rank for one in self._find_first().rivals]
        )

    def _find_first(self) -> Blame:
        later = self._later_exit_times()
        return blame(
            [
                Suspect(
                    rank,
                    failure.trace(),
                    min(failure.observed_ns, later[failure.order]),
                    failure.traceback_ns(),
                    failure.order,
                    failure.consequence,
                )
                for rank, failure in self.failures.items()
            ]
        )

    def _later_exit_times(self) -> dict[int, int]:
        """Return, for each position, the earliest time of a later exit.

        The agent saw an exit no later than the next one, even if the times of the failures disagree
        (they may have been collected in another order).
        """
        seen: dict[int, int] = {}
        for failure in self.failures.values():
            seen[failure.order] = min(failure.observed_ns, seen.get(failure.order, 1 << 63))
        later: dict[int, int] = {}
        bound = 1 << 63
        for order in sorted(seen, reverse=True):
            later[order] = bound
            bound = min(bound, seen[order])
        return later

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Return the report as text, with lines drawn by the two characters."""
        return format_report(self, boarder_delim, section_delim)

    def for_terminal(self, red: Callable[[str], str]) -> str:
        """Return the report as text; `red` colours each line about the root cause."""
        return format_report(self, red=red)


def exit_status(error: ChildFailedError) -> int:
    """Return the launcher's exit code: the first failure's code, 128+n for signal n, never 0.

    If the stop's signal ended a worker that had already raised, the code is 1, which Python uses for
    an exception.
    """
    first = error.get_first_failure()[1]
    if first.stopped:
        return 1
    code = first.exitcode
    status = 128 - code if code < 0 else code
    return status if 0 < status < 256 else 1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return NOT_AVAILABLE


def _extra_info(message: object) -> dict[str, Any]:
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return extra if isinstance(extra, dict) else {}


def _as_int(value: object) -> int | None:
    """Return a number, or a text of one, as an int; None for anything else."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return int(value)
    except (ValueError, OverflowError):
        pass
    try:
        return int(float(value))
    except (ValueError, OverflowError):
        return None


def _seconds(value: object) -> int | None:
    """Return a time in whole seconds that a calendar can show, or None."""
    seconds = _as_int(value)
    return seconds if seconds is not None and 0 <= seconds <= _TIMESTAMP_S_MAX else None
