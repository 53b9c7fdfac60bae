"""What a node takes out of etcd when it goes: what is its own, and the last one what was all's.

Nodes may go at the same moment, and each of them would think that another is still there. So each
takes itself out and looks in one transaction: exactly one finds nobody else. That one removes what
the job does not need any more, unless somebody leads by then: a new job may have begun.

What stays is a job that has come to its end, so that late nodes are told of it, on its own lease.
One of which nobody is left, and not even its end, is nothing that a later job should find.
"""

from __future__ import annotations

from holdfast.core.etcd_calls import (
    Answer,
    Compare,
    Delete,
    Field,
    Get,
    Op,
    Revoke,
    Txn,
    TxnDone,
    end_of_prefix,
)
from holdfast.core.etcd_keys import JobRecord, Places, all_below, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.core.etcd_asking import Asking


def leave(
    asking: Asking, places: Places, key: bytes, lease: int, left: Callable[[], list[Any]]
) -> list[Any]:
    """Return the first effects of a node's going; `left` returns the last ones.

    `key` is where the node speaks, empty if it never did. Whatever goes wrong on the way, the
    leases see to the rest.
    """

    def looked(_now: float, answer: Answer) -> list[Any]:
        if not isinstance(answer, TxnDone):
            return revoke([lease])
        nodes, leader, job = answer.results[-3:]
        if nodes or leader:
            return revoke([lease])
        record = unpack(JobRecord, job[0].value) if job else None
        goes_on = record is not None and record.job.outcome is None
        unneeded: list[Op] = [Delete(one, end_of_prefix(one)) for one in shared]
        if goes_on:
            unneeded.append(Delete(places.job))
        fence = (
            Compare(places.leader, Field.CREATE, 0),
            Compare(places.job, Field.MOD, job[0].mod_revision if job else 0),
        )

        def swept(_now: float, answer: Answer) -> list[Any]:
            done = isinstance(answer, TxnDone) and answer.succeeded
            old = [record.lease] if record is not None and goes_on and done else []
            return revoke([*old, lease])

        return [asking.ask(Txn(fence, tuple(unneeded)), swept)]

    def revoke(leases: list[int]) -> list[Any]:
        rest = [one for one in leases if one]
        if not rest:
            return left()
        return [asking.ask(Revoke(rest[0]), lambda _now, _answer: revoke(rest[1:]))]

    shared = (places.views, places.store, places.shared)
    own = [Delete(key), Delete(places.views + key[len(places.nodes) :])] if key else []
    look = (all_below(places.nodes, keys_only=True), Get(places.leader), Get(places.job))
    return [asking.ask(Txn((), (*own, *look)), looked)]
