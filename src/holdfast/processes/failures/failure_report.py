"""The failure report as JSON, for programs: everything that the text has, without cuts.

Version 1 is one object. Every key is always present. If a value is unknown, a text is "" and a number 0.

======================  ======================================================================
`version`               1; increases when the meaning of a key changes, not when a key is added
`name`                  what was run: script, module, program or function
`run_id`                the id of the job
`generation`            the generation of the workers that failed
`max_restarts`          the restart budget
`exit_status`           the exit code of the launcher
`written_at`            when this was written: ISO 8601, UTC
`host`                  the host that wrote it
`log_dir`               where the logs of all workers are
`first`                 the first failure
`first_is_one_of`       the ranks that may have failed first, if that is not certain; else empty
`others`                the other failures, from the first to the last
======================  ======================================================================

The keys of a failure:

======================  ======================================================================
`rank`, `local_rank`    which worker
`host`, `pid`           its host and process id
`exitcode`              its exit code, or minus the number of the signal that ended it
`signal`                the name of that signal
`ending`                how it ended, in words
`time`, `time_ns`       when: ISO 8601, UTC; nanoseconds since the epoch, as exact as possible
`consequence`           whether it happened after the stop of the group began
`stopped`               whether the signal of that stop ended it
`detail`                the agent's own information
`message`               the message in the error file
`traceback`             the traceback in the error file, or else the last one on stderr
`stderr_tail`           the end of what it wrote to stderr
`error_file`            its error file
`stdout_file`           the log of its stdout
`stderr_file`           the log of its stderr
======================  ======================================================================

The report does not contain workers that did not fail.
"""

from __future__ import annotations

import os
import time
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.core.bounded import MALFORMED, Count, WorkerRank
from holdfast.core.limits import EXITCODE_MAX, LOCAL_WORLD_SIZE_MAX, PID_MAX
from holdfast.printable import quoted
from holdfast.processes.failures.error_file import write_whole
from holdfast.processes.failures.failure import (
    NOT_AVAILABLE,
    ChildFailedError,
    ProcessFailure,
    exit_status,
)

VERSION = 1


class FailedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One failed worker; the module's docstring explains the keys."""

    rank: WorkerRank
    local_rank: Annotated[int, Meta(ge=-1, lt=LOCAL_WORLD_SIZE_MAX)]
    host: str
    pid: Annotated[int, Meta(ge=-1, le=PID_MAX)]
    exitcode: Annotated[int, Meta(ge=-EXITCODE_MAX, le=EXITCODE_MAX)]
    signal: str
    ending: str
    time: str
    time_ns: Count
    consequence: bool
    detail: str
    message: str
    traceback: str
    stderr_tail: str
    error_file: str
    stdout_file: str
    stderr_file: str
    stopped: bool = False

    @classmethod
    def from_failure(cls, rank: int, failure: ProcessFailure) -> FailedWorker:
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
            stopped=failure.stopped,
        )


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The failed job; the module's docstring explains the keys."""

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
    first_is_one_of: list[int]
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
        first, *others = [FailedWorker.from_failure(*item) for item in error.in_order()]
        rivals = error.rivals()
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
            first_is_one_of=sorted([first.rank, *rivals]) if rivals else [],
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
    """Return `value` without surrogates, which UTF-8 cannot encode; file names may contain them."""
    return value.encode("utf-8", "backslashreplace").decode()


# Reports between nodes: from the node where a worker failed to the console of every other node.
#
# `pack` keeps all parts of the first failure, up to a length, and one line of each other failure.
# `unpack` returns failures that the report shows like local ones, with their host. The packed data
# comes from the network: `unpack` checks and bounds it, and never executes it or opens a file it names.


TRACEBACK_CHARS_MAX = 64_000
STDERR_CHARS_MAX = 32_000
LINE_CHARS_MAX = 2_000
OTHERS_MAX = 64
PACKED_BYTES_MAX = 64 * 1024
"""The limit for a packed report, which slow links must carry to each node in time."""
PART_MAX = 64  # With texts cut to this fraction, any report is below the limit.


class BadReport(Exception):
    """The received data is not a valid report of failures."""


def pack(failures: dict[int, ProcessFailure]) -> bytes:
    """Return a node's failures as bytes, the first one first."""
    ordered = ChildFailedError("", failures).in_order()[: OTHERS_MAX + 1]
    workers = [FailedWorker.from_failure(rank, failure) for rank, failure in ordered]
    part = 1
    while True:
        cut = [_truncated(worker, part, whole=place == 0) for place, worker in enumerate(workers)]
        packed = msgspec.msgpack.encode(cut)
        if len(packed) <= PACKED_BYTES_MAX or part >= PART_MAX:
            return packed
        part *= 2


def unpack(packed: bytes) -> dict[int, ProcessFailure]:
    """Return the failures by global rank; the first one is not a consequence of another."""
    try:
        workers = msgspec.msgpack.decode(packed, type=list[FailedWorker])
    except MALFORMED as problem:
        raise BadReport(f"cannot decode the failure report: {quoted(str(problem))}") from None
    if not workers:
        raise BadReport("the failure report contains no failure")
    return {
        worker.rank: _restored(worker, order)
        for order, worker in enumerate(workers[: OTHERS_MAX + 1])
    }


def _truncated(worker: FailedWorker, part: int, *, whole: bool) -> FailedWorker:
    """Return a worker with its texts cut to the limits divided by `part`."""
    traceback_max, line_max = TRACEBACK_CHARS_MAX // part, LINE_CHARS_MAX // part
    return msgspec.structs.replace(
        worker,
        detail=worker.detail[:line_max],
        message=worker.message[: traceback_max if whole else line_max],
        traceback=worker.traceback[-traceback_max:] if whole else "",
        stderr_tail=worker.stderr_tail[-STDERR_CHARS_MAX // part :] if whole else "",
    )


def _restored(worker: FailedWorker, order: int) -> ProcessFailure:
    failure = ProcessFailure(
        worker.local_rank,
        worker.pid,
        worker.exitcode,
        NOT_AVAILABLE,  # The file is on another host; do not open its path on this host.
        stderr_tail=worker.stderr_tail,
        consequence=worker.consequence and order > 0,
        stopped=worker.stopped,
        detail=worker.detail,
        order=order,
        place=order,
        stdout_file=worker.stdout_file,
        stderr_file=worker.stderr_file,
        host=worker.host,
        observed_ns=max(1, worker.time_ns),
    )
    failure.error_file = worker.error_file or NOT_AVAILABLE
    if worker.message or worker.error_file:
        extra = {"py_callstack": worker.traceback} if worker.traceback else {}
        failure.message = {"message": worker.message, "extraInfo": extra}
        failure.error_file_data = {"message": failure.message}
    return failure
