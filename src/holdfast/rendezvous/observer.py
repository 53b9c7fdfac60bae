"""What one node can vouch for in a job whose state is shared: who is silent, and what has lasted.

Every node that looks at the state keeps one of these. It remembers when each other node's counter
last moved and since when the machine has been waiting, both by this node's own clock; and it says
when this node's own counter must move. What a node says of itself is `participant`'s and
`teammate`'s matter. Pure: times are the caller's monotonic clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.job import Job, Node, NodeLost, NodesLost, TimeUp
from holdfast.core.liveness import Liveness

if TYPE_CHECKING:
    from holdfast.core.rounds import Event, Rounds

BEAT_S_PER_NODE = 0.05
"""All nodes together write twenty signs of life a second at most: each write makes others fail."""
BEATS_PER_SILENCE_MIN = 3
"""However many nodes there are, each has so many chances to be heard before it counts as lost. The
price is that in jobs of very many nodes a lost one is noticed later than the settings ask for: by
default above 33 nodes, and after 15 s where there are 100."""

Peer = tuple[str, int]  # Node and incarnation.


class Observer:
    """Turns looks at the state into events that any node may give to the machine."""

    def __init__(self, now: float, node: str, *, interval_s: float, lost_after_s: float) -> None:
        self._node = node
        self._interval_s = interval_s
        self._lost_after_s = lost_after_s
        self._beats: dict[Peer, int] = {}
        self._lost: dict[Peer, str] = {}
        self._liveness: Liveness[Peer] = Liveness(now, silence_s=lost_after_s, grace_s=lost_after_s)
        self._wait: tuple[object, float] = (None, now)
        self._wait_ends: float | None = None
        self._my_beat, self._beat_at, self._beat_s = 0, now, interval_s

    def observe(self, now: float, rounds: Rounds) -> None:
        """Take in how things stand in the state."""
        job = rounds.job
        crowd_s = BEAT_S_PER_NODE * len(job.nodes)
        self._beat_s = max(self._interval_s, crowd_s)
        self._liveness.silence_s = max(self._lost_after_s, BEATS_PER_SILENCE_MIN * crowd_s)
        there = set()
        for node in job.nodes.values():
            if node.info.node == self._node:
                continue
            peer = (node.info.node, node.info.incarnation)
            there.add(peer)
            if self._beats.get(peer) != node.beat:
                self._beats[peer] = node.beat
                self._lost.pop(peer, None)
                self._liveness.heard(peer, now)
        for peer in self._beats.keys() - there:
            del self._beats[peer]
            self._lost.pop(peer, None)
            self._liveness.forget(peer)
        self._lost |= self._liveness.overdue(now)
        wait = rounds.wait
        key = wait and (job.term, job.phase, wait.seq)
        if key != self._wait[0]:
            self._wait = (key, now)
        self._wait_ends = self._wait[1] + wait.delay_s if wait else None

    def judge(self, now: float, rounds: Rounds) -> list[Event]:
        """Return what has come of time, as of the last `observe`; nothing once all is over."""
        job = rounds.job
        events: list[Event] = []
        if job.final:
            return events
        lost = tuple(
            NodeLost(node.info.node, node.info.incarnation, why)
            for node in (job.nodes.values() if self._lost else ())
            if (why := self._lost.get((node.info.node, node.info.incarnation)))
        )
        if lost:
            events.append(NodesLost(lost))
        wait = rounds.wait
        if wait is not None and self._wait_ends is not None and now >= self._wait_ends:
            events.append(TimeUp(wait.seq))
        return events

    def is_beat_due(self, now: float) -> bool:
        """Return whether this node's counter must move, though there is nothing else to store."""
        return now - self._beat_at >= self._beat_s

    def note_own(self, now: float, me: Node) -> None:
        """Take in this node's counter as it is stored."""
        if me.beat != self._my_beat:
            self._my_beat, self._beat_at = me.beat, now

    def next_deadline(self, now: float) -> float:
        """Return when to look again at the latest."""
        times = [self._beat_at + self._beat_s, self._wait_ends, self._liveness.next_deadline(now)]
        return min(one for one in times if one is not None)


def known_as(job: Job, node: str, incarnation: int) -> Node | None:
    """Return a node of the job if it is this incarnation."""
    known = job.nodes.get(node)
    return known if known is not None and known.info.incarnation == incarnation else None
