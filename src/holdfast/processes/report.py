"""The failure report as JSON, for programs: everything the text has, and nothing cut.

Version 1 is one object. Every key is always there; a text that is not known is "", a number 0.

======================  ======================================================================
`version`               1; raised when the meaning of a key changes, not when a key is added
`name`                  what was run: script, module, program or function
`run_id`                the id of the job
`generation`            how many times the workers had been started anew when this happened
`max_restarts`          how many times they may be
`exit_status`           what the launcher exits with
`written_at`            when this was written: ISO 8601, UTC
`host`                  where it was written
`log_dir`               where the logs of all workers are
`first`                 the failure that came first
`others`                the other failures, from the first to the last
======================  ======================================================================

and of each failure:

======================  ======================================================================
`rank`, `local_rank`    which worker
`host`, `pid`           where it ran
`exitcode`              its exit code, or minus the number of the signal that ended it
`signal`                the name of that signal
`ending`                how it ended, in words
`time`, `time_ns`       when: ISO 8601, UTC; nanoseconds since the epoch, as exact as is known
`consequence`           whether it came only after the stop of the group began
`detail`                what the agent knows besides
`message`               the message in the error file
`traceback`             the traceback in the error file, or else the last one on stderr
`stderr_tail`           the end of what it wrote to stderr
`error_file`            its error file
`stdout_file`           the log of its stdout
`stderr_file`           the log of its stderr
======================  ======================================================================

It deliberately says nothing of workers that did not fail.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

from holdfast.processes.failures import NOT_AVAILABLE, exit_status
from holdfast.processes.recording import write_whole

if TYPE_CHECKING:
    from holdfast.processes.failures import ChildFailedError, ProcessFailure

VERSION = 1


class FailedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One failed worker; the keys are told of in the module's docstring."""

    rank: int
    local_rank: int
    host: str
    pid: int
    exitcode: int
    signal: str
    ending: str
    time: str
    time_ns: int
    consequence: bool
    detail: str
    message: str
    traceback: str
    stderr_tail: str
    error_file: str
    stdout_file: str
    stderr_file: str

    @classmethod
    def from_failure(cls, rank: int, failure: ProcessFailure) -> FailedWorker:
        """Take over what `failure` knows."""
        return cls(
            rank=rank,
            local_rank=failure.local_rank,
            host=_text(failure.host),
            pid=failure.pid,
            exitcode=failure.exitcode,
            signal=_known(failure.signal_name()),
            ending=failure.ending(),
            time=_iso(failure.happened_ns()),
            time_ns=failure.happened_ns(),
            consequence=failure.consequence,
            detail=_text(failure.detail),
            message=_text(failure.recorded_message()),
            traceback=_text(failure.traceback_text()),
            stderr_tail=_text(failure.stderr_tail),
            error_file=_known(failure.error_file),
            stdout_file=_text(failure.stdout_file),
            stderr_file=_text(failure.stderr_file),
        )


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The failed job; the keys are told of in the module's docstring."""

    version: int = VERSION
    name: str
    run_id: str
    generation: int
    max_restarts: int
    exit_status: int
    written_at: str
    host: str
    log_dir: str
    first: FailedWorker
    others: list[FailedWorker]

    @classmethod
    def from_error(
        cls,
        error: ChildFailedError,
        *,
        run_id: str,
        generation: int,
        max_restarts: int,
        log_dir: str,
    ) -> FailureReport:
        """Make the report on `error` as of now."""
        first, *others = [FailedWorker.from_failure(*item) for item in error.in_order()]
        return cls(
            name=_text(error.name),
            run_id=_text(run_id),
            generation=generation,
            max_restarts=max_restarts,
            exit_status=exit_status(error),
            written_at=_iso(time.time_ns()),
            host=_text(os.uname().nodename),
            log_dir=_text(log_dir),
            first=first,
            others=others,
        )

    def write(self, path: str) -> None:
        """Write the report as indented JSON. A reader sees all of it or none. Raises OSError."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def _iso(moment_ns: int) -> str:
    seconds, rest_ns = divmod(moment_ns, 1_000_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest_ns // 1000:06d}Z"


def _known(value: str) -> str:
    return "" if value == NOT_AVAILABLE else _text(value)


def _text(value: str) -> str:
    """Return `value` so that it can be written as UTF-8: file names and messages may not be."""
    return value.encode("utf-8", "backslashreplace").decode()
