"""What whoever comes to lead a job finds, and who of it still lives: `inherit`, `TakeoverCall`.

A leader seldom dies alone: a rack goes, or a whole job is killed to be started again. Then the
leases of the others end a little before or after the leader's, and whoever leads next would count
the dead in: form a round with them, or go on with a job of which nobody is left. So the nodes that
the job knows are asked for a sign first, by a roll call (`core.leading`), and nothing is decided
before each has given it or is gone. Where all live that is a round trip; else the rest of a lease.

Who leads on, after a session that was lost, knows already and asks for nothing.
"""

from __future__ import annotations

from holdfast.core.etcd_calls import Change, KeyValue, Op, Put
from holdfast.core.etcd_keys import JobRecord, NodeRecord, Places, unpack
from holdfast.core.job import Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    Peer = tuple[str, int]


def inherit(
    record: JobRecord | None, alive: set[Peer], term: int, run_id: str, lease_s: float
) -> Job:
    """Return the job to go on with; one of which nobody is left, and not even its end, is none.

    Its nodes may still be there: all leases end if etcd or all machines were stopped for long.
    They say which round they were in, and the job is made anew of that.
    """
    if record is not None:
        job = record.job
        known = ((node.info.node, node.info.incarnation) for node in job.nodes.values())
        if job.outcome is not None or any(peer in alive for peer in known):
            job.term = max(term, job.term + 1)
            return job
    return Job(run_id=run_id, term=term, silence_s=lease_s)


class TakeoverCall:
    """The roll call of one node's newest term as a leader."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._term = self._number = 0
        self._awaited: set[Peer] = set()

    def waits(
        self,
        term: int,
        record: JobRecord | None,
        nodes: tuple[KeyValue, ...],
        call: int,
        own: int,
    ) -> bool:
        """Look at what was read; return whether there is anybody to wait for.

        `call` is the number that is stored, and `own` the incarnation of the leader itself.
        """
        self._awaited = set()
        if record is None or record.job.outcome is not None or record.job.term >= term:
            return False
        heard: dict[Peer, int] = {}
        for one in nodes:
            peer, said = self._places.whose(one.key), unpack(NodeRecord, one.value)
            if peer is not None and said is not None:
                heard[peer] = said.call
        if self._term != term:  # The number may be gone where some have heard it.
            self._term, self._number = term, max([call, *heard.values()]) + 1
        known = {(node.info.node, node.info.incarnation) for node in record.job.nodes.values()}
        self._awaited = {
            peer for peer in known & heard.keys() if peer[1] != own and heard[peer] < self._number
        }
        return bool(self._awaited)

    def unsaid(self, call: int, lease: int) -> tuple[Op, ...]:
        """Return what is to be stored so that the nodes hear the call, unless that is so."""
        if call >= self._number:
            return ()
        return (Put(self._places.call, str(self._number).encode(), lease),)

    def is_answered(self, changes: tuple[Change, ...]) -> bool:
        """Take in what nodes said, or that they are gone; return whether all are accounted for."""
        for change in changes:
            peer = self._places.whose(change.key)
            said = unpack(NodeRecord, change.value) if change.value is not None else None
            if peer is not None and (said is None or said.call >= self._number):
                self._awaited.discard(peer)
        return not self._awaited
