"""Failures that travel: from the node where a worker failed to every other node's console.

`pack` keeps the first failure whole but for its length, and of the others one line each. `unpack`
gives back failures that the report shows as if they had happened here, with the host they are of.
What arrives is data from the network: it is checked, bounded, and never run or read as a file.
"""

from __future__ import annotations

import msgspec

from holdfast.processes.failures import NOT_AVAILABLE, ChildFailedError, ProcessFailure
from holdfast.processes.report import FailedWorker

TRACEBACK_CHARS_MAX = 64_000
STDERR_CHARS_MAX = 32_000
LINE_CHARS_MAX = 2_000
OTHERS_MAX = 64


class BadReport(Exception):
    """What arrived is no report of failures."""


def pack(failures: dict[int, ProcessFailure]) -> bytes:
    """Return a node's failures as bytes, the first one first."""
    ordered = ChildFailedError("", failures).in_order()[: OTHERS_MAX + 1]
    workers = [
        _cut(FailedWorker.from_failure(rank, failure), whole=place == 0)
        for place, (rank, failure) in enumerate(ordered)
    ]
    return msgspec.msgpack.encode(workers)


def unpack(packed: bytes) -> dict[int, ProcessFailure]:
    """Return the failures by global rank; the first one is no consequence of any other."""
    try:
        workers = msgspec.msgpack.decode(packed, type=list[FailedWorker])
    except msgspec.MsgspecError as problem:
        raise BadReport(f"a failure report that cannot be read: {problem}") from None
    if not workers:
        raise BadReport("a failure report without a failure")
    return {
        worker.rank: _restored(worker, order)
        for order, worker in enumerate(workers[: OTHERS_MAX + 1])
    }


def _cut(worker: FailedWorker, *, whole: bool) -> FailedWorker:
    traceback_max = TRACEBACK_CHARS_MAX if whole else 0
    return msgspec.structs.replace(
        worker,
        detail=worker.detail[:LINE_CHARS_MAX],
        message=worker.message[: TRACEBACK_CHARS_MAX if whole else LINE_CHARS_MAX],
        traceback=worker.traceback[-traceback_max:] if whole else "",
        stderr_tail=worker.stderr_tail[-STDERR_CHARS_MAX:] if whole else "",
    )


def _restored(worker: FailedWorker, order: int) -> ProcessFailure:
    failure = ProcessFailure(
        worker.local_rank,
        worker.pid,
        worker.exitcode,
        NOT_AVAILABLE,  # The file is another host's, and must not be looked for on this one.
        stderr_tail=worker.stderr_tail,
        consequence=worker.consequence and order > 0,
        detail=worker.detail,
        order=order,
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
