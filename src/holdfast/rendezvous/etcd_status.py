"""How jobs on etcd are: what a coordinator answers when it is asked, read from what is stored.

It asks nobody and disturbs nobody: one read, of what the leader stored last and of what each node
says of itself, which is newer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.coordinator.summaries import summary_of
from holdfast.core.etcd_calls import Get, Txn
from holdfast.core.etcd_keys import JobRecord, NodeRecord, Places, all_below, unpack
from holdfast.core.rounds import Rounds

if TYPE_CHECKING:
    from holdfast.etcd.blocking import EtcdClient
    from holdfast.wire.messages import JobSummary

DEFAULT_PREFIX = "/torchelastic/p2p"


def read_job(
    client: EtcdClient, run_id: str, prefix: str = DEFAULT_PREFIX
) -> tuple[JobSummary | None, str]:
    """Return a job as a person wants to see it, and the node that leads it.

    None if there is no such job. Raises `EtcdError` if etcd cannot be asked.
    """
    places = Places(prefix, run_id)
    read = Txn((), (Get(places.job), Get(places.leader), all_below(places.nodes)))
    stored, leader, nodes = client.txn(read).results
    record = unpack(JobRecord, stored[0].value) if stored else None
    if record is None:
        return None, ""
    job = record.job
    for one in nodes:
        said = unpack(NodeRecord, one.value)
        known = job.nodes.get(said.status.info.node) if said is not None else None
        if said is None or known is None or known.info.incarnation != said.status.info.incarnation:
            continue
        known.phase, known.generation = said.status.phase, said.status.generation
    summary = summary_of(Rounds(job))
    who = leader[0].value.decode(errors="replace").rpartition(" ")[0] if leader else ""
    return msgspec.structs.replace(summary, history=[job.why] if job.why else []), who
