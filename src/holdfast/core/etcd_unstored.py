"""What a leader has decided and etcd does not have yet: `Unstored`.

It is written in portions that etcd takes, the job first: what a node is told is never stored before
the decision it comes from. Of several views for one node only the newest is left.
"""

from __future__ import annotations

import msgspec

from holdfast.core.etcd_calls import Delete, Op, Put, Txn
from holdfast.core.etcd_keys import JobRecord, Places, pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.core.job import Job
    from holdfast.core.leading import Lead
    from holdfast.core.news import View
    from holdfast.core.rounds import Event

    Peer = tuple[str, int]

OPS_MAX = 100  # Operations in one transaction; etcd takes 128 unless told otherwise.
WRITE_BYTES_MAX = 1_000_000  # In one transaction; etcd takes 1.5 MiB unless told otherwise.


class Written(msgspec.Struct, frozen=True):
    """A transaction of the leader's, and what it stands for."""

    txn: Txn
    lead: Lead
    decisions: list[tuple[Event, Job]]
    views: list[View]


class Unstored:
    """The decisions of one leader that wait to be stored."""

    def __init__(self, places: Places, lead: Lead, lease: int, ops_max: int = OPS_MAX) -> None:
        self._places = places
        self._lead = lead
        self._lease = lease
        self._call = lead.call
        self._ops_max = ops_max
        self._views: dict[Peer, View] = {}
        self._unneeded: dict[bytes, None] = {}  # Keys to delete.

    def tell(self, view: View) -> None:
        """Have a node told something."""
        peer = (view.node, view.incarnation)
        self._views[peer] = view
        # It may be back with its view not yet taken away; etcd refuses both for one key at once.
        self._unneeded.pop(self._places.view(*peer), None)

    def forget(self, node: str, incarnation: int) -> None:
        """Take away what an incarnation that is gone was told, or was to be."""
        self._views.pop((node, incarnation), None)
        self.remove(self._places.view(node, incarnation))

    def remove(self, key: bytes) -> None:
        """Have a key deleted."""
        self._unneeded[key] = None

    @property
    def is_urgent(self) -> bool:
        """Whether anything is to be stored that somebody waits for, or must not be lost."""
        return self._lead.is_changed or self._lead.call != self._call or bool(self._views)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do at all."""
        return not self.is_urgent and not self._unneeded

    def take(self) -> tuple[list[Op], list[View]]:
        """Return the next portion: operations for one transaction, and the views among them."""
        lead, places, ops, size = self._lead, self._places, list[Op](), 0
        if lead.is_changed:
            record = pack(JobRecord(lead.job, self._lease))
            ops.append(Put(places.job, record, self._lease))
            size += len(record)
            lead.is_changed = False
        if lead.call != self._call:
            ops.append(Put(places.call, str(lead.call).encode(), self._lease))
            self._call = lead.call
        views: list[View] = []
        while self._views and len(ops) < self._ops_max:
            peer, view = next(iter(self._views.items()))
            record = pack(view)
            if ops and size + len(record) > WRITE_BYTES_MAX:
                break
            del self._views[peer]
            views.append(view)
            ops.append(Put(places.view(*peer), record, self._lease))
            size += len(record)
        while self._unneeded and len(ops) < self._ops_max:
            ops.append(Delete(self._unneeded.popitem()[0]))
        return ops, views
