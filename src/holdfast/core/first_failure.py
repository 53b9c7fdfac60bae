"""Which node failed first, by what each node reports of its failure.

`core.blame` decides among workers; here each failed node is one suspect. Times are compared only if
both failures are dated by one clock: `dated` turns the ages that a status reports into times of the
clock that received it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.core.blame import Suspect, Trace, blame
from holdfast.core.limits import RIVALS_MAX

if TYPE_CHECKING:
    from holdfast.core.protocol import Failure, Status

NODES_CLOSE_NS = 10_000_000
"""Failures of two nodes that are this close may have happened in the other order."""


def first_of(known: Failure, other: Failure) -> tuple[Failure, bool]:
    """Return which failure of two nodes came first, and whether that is certain."""
    timed = known.ended_ns > 0 and other.ended_ns > 0
    suspects = [
        Suspect(
            rank=order,
            trace=Trace.KILLED if one.sudden and one.trace is Trace.SILENT else one.trace,
            ended_ns=one.ended_ns if timed else 0,
            spoke_ns=one.spoke_ns if timed else 0,
            order=order,
            stopped=one.stopped,
        )
        for order, one in enumerate((known, other))
    ]
    verdict = blame(suspects, NODES_CLOSE_NS)
    return (known, other)[verdict.first.rank], not verdict.rivals


def with_rivals(failure: Failure, *ranks: int) -> Failure:
    """Return a failure with more ranks that may have failed before it."""
    rivals = sorted({*failure.rivals, *ranks} - {failure.rank})[:RIVALS_MAX]
    return msgspec.structs.replace(failure, rivals=tuple(rivals))


def dated(now: float, status: Status) -> Status:
    """Return a status whose failure has its times by the clock that received it."""
    failure = status.failure
    if failure is None:
        return status
    failure = msgspec.structs.replace(
        failure,
        ended_ns=max(1, int((now - failure.ended_ago_s) * 1e9)),
        spoke_ns=max(1, int((now - failure.spoke_ago_s) * 1e9)) if failure.spoke_ago_s else 0,
    )
    return msgspec.structs.replace(status, failure=failure)


def likeliest_first(statuses: list[Status]) -> list[Status]:
    """Return the statuses of failed nodes, the likeliest cause before the others."""
    best = statuses[0]
    for one in statuses[1:]:
        if best.failure is None or one.failure is None:
            continue
        if first_of(best.failure, one.failure)[0] is one.failure:
            best = one
    return [best, *(one for one in statuses if one is not best)]
