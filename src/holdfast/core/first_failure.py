"""Which node failed first, according to the failures that the nodes report.

`core.blame` decides between workers; here each failed node is one suspect. Times are compared only if
one clock measured both: `with_local_times` converts the ages in a status to times of the receiver's clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.core.blame import FailureTrace, Suspect, blame
from holdfast.core.limits import RIVALS_MAX

if TYPE_CHECKING:
    from holdfast.core.protocol import Failure, Status

NODES_CLOSE_NS = 10_000_000
"""If the failures of two nodes are closer than this, their order is uncertain."""


def first_of(known: Failure, other: Failure) -> tuple[Failure, bool]:
    """Return which failure of two nodes came first, and whether that is certain."""
    timed = known.ended_ns > 0 and other.ended_ns > 0
    suspects = [
        Suspect(
            rank=order,
            trace=FailureTrace.KILLED
            if one.sudden and one.trace is FailureTrace.SILENT
            else one.trace,
            ended_ns=one.ended_ns if timed else 0,
            traceback_ns=one.traceback_ns if timed else 0,
            order=order,
            stopped=one.stopped,
        )
        for order, one in enumerate((known, other))
    ]
    verdict = blame(suspects, NODES_CLOSE_NS)
    return (known, other)[verdict.first.rank], not verdict.rivals


def with_rivals(failure: Failure, *ranks: int) -> Failure:
    """Return a failure with additional ranks that may have failed first."""
    rivals = sorted({*failure.rivals, *ranks} - {failure.rank})[:RIVALS_MAX]
    return msgspec.structs.replace(failure, rivals=tuple(rivals))


def with_local_times(now: float, status: Status) -> Status:
    """Return a status whose failure has times of the receiver's clock instead of ages."""
    failure = status.failure
    if failure is None:
        return status
    failure = msgspec.structs.replace(
        failure,
        ended_ns=max(1, int((now - failure.ended_ago_s) * 1e9)),
        traceback_ns=max(1, int((now - failure.traceback_ago_s) * 1e9))
        if failure.traceback_ago_s
        else 0,
    )
    return msgspec.structs.replace(status, failure=failure)


def likeliest_first(statuses: list[Status]) -> list[Status]:
    """Return the statuses of failed nodes, the likeliest cause first."""
    best = statuses[0]
    for one in statuses[1:]:
        if best.failure is None or one.failure is None:
            continue
        if first_of(best.failure, one.failure)[0] is one.failure:
            best = one
    return [best, *(one for one in statuses if one is not best)]
