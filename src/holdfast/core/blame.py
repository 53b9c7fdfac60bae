"""Which worker failed first, if several failed within moments: a pure decision.

When a worker fails, its peers lose their connections to it and fail too, and their exits may be observed
before its own. The evidence, from the strongest to the weakest:

1.  If a worker ended only because its group was stopped, it is not the cause, unless this is true of all.
2.  An error about a peer (a reset connection, a collective that timed out) is a consequence of an error
    that is not about a peer, in whatever order they were observed. But a failure much later than an error
    cannot be its cause.
3.  The kernel needs time to tear down a process. So a killed worker may have failed up to 250 ms before its
    exit was observed, and a worker that exited without an error up to 50 ms.
4.  Otherwise the times decide: when a worker's traceback began, or when it exited if it has none.

Times are nanoseconds on the clock of one observer; an unknown time is 0. If failures are too close to
tell their order, all candidates are listed (`Blame.rivals`).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from holdfast.core.values import Value

if TYPE_CHECKING:
    from collections.abc import Sequence

KILLED_NOTICE_NS_MAX = 250_000_000
"""The exit of a killed worker is observed only after the kernel has torn it down. Until then its peers
may report broken connections, and even exit. With a higher value, a worker that was killed longer after a
failure can still be blamed for it."""
EXIT_NS_MAX = 50_000_000
"""The same for a worker that exits without an error: its connections close while it is torn down. If two
workers exit within this time, either may have caused the other's failure."""
PEER_ERROR_NS_MAX = 2_000_000_000
"""A worker that failed this long after another worker's error about a peer is not its cause."""
CLOSE_NS = 3_000_000
"""If two events on one node are closer than this, their order is uncertain. Between nodes the latency of
messages is added."""


class FailureTrace(Enum):
    """What a worker's exit and output show about the reason for its failure."""

    KILLED = "killed"
    """A signal that Holdfast did not send killed it."""
    OWN = "own"
    """Its traceback shows an error of its own."""
    SILENT = "silent"
    """It exited without a traceback."""
    PEER = "peer"
    """Its traceback shows that a peer was gone or did not respond."""
    STOPPED = "stopped"
    """The stop of its group ended it before it wrote a traceback."""


class Suspect(Value):
    """A worker that failed."""

    rank: int
    trace: FailureTrace
    ended_ns: int
    traceback_ns: int = 0
    """When its traceback began; 0 if there is none."""
    order: int = 0
    """Its position in the order in which exits were observed."""
    stopped: bool = False
    """Whether it failed after the stop of its group began."""

    @property
    def moment_ns(self) -> int:
        """The time by which it had failed."""
        return self.traceback_ns or self.ended_ns

    @property
    def earliest_ns(self) -> int:
        """The earliest time at which it may have failed."""
        if self.trace is FailureTrace.KILLED:
            return self.moment_ns - KILLED_NOTICE_NS_MAX
        return self.moment_ns - (CLOSE_NS if self.traceback_ns else EXIT_NS_MAX)


class Blame(Value):
    """All suspects, the first failure first, and the others that may have been first."""

    order: tuple[Suspect, ...]
    rivals: tuple[Suspect, ...] = ()

    @property
    def first(self) -> Suspect:
        return self.order[0]


def blame(suspects: Sequence[Suspect], close_ns: int = CLOSE_NS) -> Blame:
    """Decide which suspect failed first. The order of events within `close_ns` is uncertain."""
    ordered = sorted(suspects, key=lambda one: (one.stopped, one.moment_ns, one.order))
    contenders = _contenders(ordered, close_ns)
    rivals: list[Suspect] = []
    first = min(contenders, key=lambda one: (one.moment_ns, one.order))
    reached = [one for one in contenders if one.earliest_ns <= first.moment_ns]
    if any(one.trace is FailureTrace.KILLED for one in reached):
        with_reason = [one for one in reached if one.trace is not FailureTrace.SILENT]
        first = min(with_reason, key=lambda one: (one.ended_ns, one.order))
    else:
        rivals = [one for one in contenders if _may_be_earlier(one, first, close_ns)]
    if first.trace is FailureTrace.PEER:  # That peer may be a worker without a traceback.
        limit_ns = first.moment_ns + EXIT_NS_MAX
        silent = [
            one for one in ordered if one.trace in (FailureTrace.SILENT, FailureTrace.STOPPED)
        ]
        rivals += [one for one in silent if one not in rivals and one.ended_ns <= limit_ns]
    rest = (one for one in ordered if one is not first)
    return Blame((first, *rest), tuple(one for one in rivals if one is not first))


def _may_be_earlier(one: Suspect, first: Suspect, close_ns: int) -> bool:
    """Whether a suspect may have failed before the one that seems to be first."""
    have_tracebacks = first.traceback_ns and one.traceback_ns
    close_ns += 0 if have_tracebacks else EXIT_NS_MAX
    return one.moment_ns - first.moment_ns < close_ns


def _contenders(ordered: list[Suspect], close_ns: int) -> list[Suspect]:
    """Return the suspects that may have failed first, judging by their traces."""
    free = [one for one in ordered if not one.stopped]
    if not free:
        free = [one for one in ordered if one.trace is not FailureTrace.STOPPED] or ordered[:1]
    else:
        # A worker that exited just after the stop began may have failed before the others.
        begun_ns = min(one.moment_ns for one in free)
        limit_ns = begun_ns + EXIT_NS_MAX + close_ns
        if all(one.trace is FailureTrace.PEER for one in free):
            # Then a worker's own error counts even if it is later.
            limit_ns += PEER_ERROR_NS_MAX
        first_is_silent = free[0].trace is FailureTrace.SILENT
        free += [
            one
            for one in ordered
            if one.stopped
            and one.moment_ns < limit_ns
            and (
                one.trace is FailureTrace.OWN
                or (
                    first_is_silent
                    and one.trace is FailureTrace.SILENT
                    and one.moment_ns >= begun_ns
                )
            )
        ]
    peer_errors = [one for one in free if one.trace is FailureTrace.PEER]
    if peer_errors:
        limit_ns = min(one.moment_ns for one in peer_errors) + PEER_ERROR_NS_MAX
        # STOPPED: perhaps killed while writing a traceback.
        excluded = (FailureTrace.PEER, FailureTrace.STOPPED)
        causes = [one for one in free if one.trace not in excluded and one.moment_ns <= limit_ns]
        free = causes or peer_errors
    return free
