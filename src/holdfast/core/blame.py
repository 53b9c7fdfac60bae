"""Which worker failed first, when several failed within moments: a pure decision.

One worker fails, its peers notice and fail too, and the first to be seen dead need not be the first
that failed. What there is to go by, from the strongest to the weakest:

1.  What ended only because its group was stopped is no cause, unless it is all there is.
2.  A failure that tells of a peer (a connection that was reset, a collective that timed out) is the
    consequence of one that does not, however they were seen. Only one that came much later than
    the complaint cannot be its reason.
3.  A worker that the kernel took apart while others noticed counts from before they did; one that
    ended without a word, for a shorter while. An exit takes longer the more there is to tear down.
4.  Then the times decide: when each began to say why, or ended, if it said nothing.

Times are nanoseconds on one clock, of one node or of whoever watches several; a time that is not
known is 0. Those that are too close to tell apart are all named (`Blame.rivals`).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from holdfast.core.values import Value

if TYPE_CHECKING:
    from collections.abc import Sequence

KILLED_NOTICE_NS_MAX = 250_000_000
"""A worker killed by the kernel is seen dead only once the kernel has taken it apart; its peers may
have recorded their broken connections before, or even have ended. Raising it blames the killed
worker for what went wrong before."""
EXIT_NS_MAX = 50_000_000
"""The same for one that exits without a word: its connections are closed while it is torn down. So
long before it ended, or after another did, either may have been what the other noticed."""
COMPLAINT_NS_MAX = 2_000_000_000
"""A worker that failed so much later than another complained of its peers was not what it meant."""
CLOSE_NS = 3_000_000
"""What is closer than this on one node may have happened in the other order. Between nodes the
time that messages take comes on top."""


class Trace(Enum):
    """What a failure shows of its reason."""

    KILLED = "killed"
    """A signal that nobody of ours sent ended it."""
    OWN = "own"
    """It told a reason of its own."""
    SILENT = "silent"
    """It ended without a word."""
    PEER = "peer"
    """It told of a peer that was gone, or did not answer."""
    STOPPED = "stopped"
    """The stop of its group ended it before it had said anything."""


class Suspect(Value):
    """A worker that failed."""

    rank: int
    trace: Trace
    ended_ns: int
    spoke_ns: int = 0
    """When it began to say why, if it did."""
    order: int = 0
    """The position in which the exits were seen."""
    stopped: bool = False
    """It failed after the stop of its group began."""

    @property
    def moment_ns(self) -> int:
        """The moment by which it had failed."""
        return self.spoke_ns or self.ended_ns

    @property
    def earliest_ns(self) -> int:
        """The moment at which it may have failed."""
        if self.trace is Trace.KILLED:
            return self.moment_ns - KILLED_NOTICE_NS_MAX
        return self.moment_ns - (CLOSE_NS if self.spoke_ns else EXIT_NS_MAX)


class Blame(Value):
    """All suspects from the first to the last, and those that may just as well have been first."""

    order: tuple[Suspect, ...]
    rivals: tuple[Suspect, ...] = ()

    @property
    def first(self) -> Suspect:
        return self.order[0]


def blame(suspects: Sequence[Suspect], close_ns: int = CLOSE_NS) -> Blame:
    """Decide who failed first; `close_ns` is what cannot be told apart."""
    ordered = sorted(suspects, key=lambda one: (one.stopped, one.moment_ns, one.order))
    contenders = _contenders(ordered, close_ns)
    rivals: list[Suspect] = []
    first = min(contenders, key=lambda one: (one.moment_ns, one.order))
    reached = [one for one in contenders if one.earliest_ns <= first.moment_ns]
    if any(one.trace is Trace.KILLED for one in reached):
        told = [one for one in reached if one.trace is not Trace.SILENT]
        first = min(told, key=lambda one: (one.ended_ns, one.order))
    else:
        rivals = [one for one in contenders if _may_be_earlier(one, first, close_ns)]
    if first.trace is Trace.PEER:  # Of whom does it tell? Perhaps of one that had no time to speak.
        limit_ns = first.moment_ns + EXIT_NS_MAX
        mute = [one for one in ordered if one.trace in (Trace.SILENT, Trace.STOPPED)]
        rivals += [one for one in mute if one not in rivals and one.ended_ns <= limit_ns]
    rest = (one for one in ordered if one is not first)
    return Blame((first, *rest), tuple(one for one in rivals if one is not first))


def _may_be_earlier(one: Suspect, first: Suspect, close_ns: int) -> bool:
    """Whether another may have failed before the one that seems to be first."""
    both_spoke = first.spoke_ns and one.spoke_ns
    close_ns += 0 if both_spoke else EXIT_NS_MAX
    return one.moment_ns - first.moment_ns < close_ns


def _contenders(ordered: list[Suspect], close_ns: int) -> list[Suspect]:
    """Return those that may have been first, by what they show."""
    free = [one for one in ordered if not one.stopped]
    if not free:
        free = [one for one in ordered if one.trace is not Trace.STOPPED] or ordered[:1]
    else:
        # Who was about to end when the stop began may have begun to before the others.
        begun_ns = min(one.moment_ns for one in free)
        limit_ns = begun_ns + EXIT_NS_MAX + close_ns
        if all(one.trace is Trace.PEER for one in free):
            limit_ns += COMPLAINT_NS_MAX  # Then even later words are worth more, if its own.
        quiet = free[0].trace is Trace.SILENT
        free += [
            one
            for one in ordered
            if one.stopped
            and one.moment_ns < limit_ns
            and (
                one.trace is Trace.OWN
                or (quiet and one.trace is Trace.SILENT and one.moment_ns >= begun_ns)
            )
        ]
    complaints = [one for one in free if one.trace is Trace.PEER]
    if complaints:
        limit_ns = min(one.moment_ns for one in complaints) + COMPLAINT_NS_MAX
        mute = (Trace.PEER, Trace.STOPPED)  # Or cut off in the middle of what it had begun to say.
        causes = [one for one in free if one.trace not in mute and one.moment_ns <= limit_ns]
        free = causes or complaints
    return free
