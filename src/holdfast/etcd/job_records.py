"""Reads the records of jobs in etcd: their state, their agents' ports, their run ids."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from holdfast.core.etcd.calls import Get, Txn
from holdfast.core.etcd.keys import (
    JobKeys,
    JobRecord,
    NodeRecord,
    get_prefix,
    missing_members,
    read_leader,
    unpack,
    version_refusal,
)
from holdfast.core.rounds import Rounds
from holdfast.errors import HoldfastError
from holdfast.wire.messages import summary_of

if TYPE_CHECKING:
    from holdfast.core.protocol import ControlPort
    from holdfast.etcd.sync_client import EtcdClient
    from holdfast.wire.messages import JobSummary

DEFAULT_PREFIX = "/torchelastic/p2p"


def read_job(
    client: EtcdClient, run_id: str, prefix: str = DEFAULT_PREFIX
) -> tuple[JobSummary | None, str]:
    """Return the summary of a job and its leader; None if there is no such job.

    One transaction reads the job as the leader last stored it and each node's status, which is newer. Raises
    `EtcdError`.
    """
    keys = JobKeys(prefix, run_id)
    gets = (Get(keys.job), Get(keys.leader), get_prefix(keys.nodes), Get(keys.missing_members))
    stored, leader, nodes, missing = client.txn(Txn((), gets)).results
    record = unpack(JobRecord, stored[0].value) if stored else None
    if record is None:
        return None, ""
    job = record.job
    for one in nodes:
        node = unpack(NodeRecord, one.value)
        known = job.nodes.get(node.status.info.node) if node is not None else None
        if node is None or known is None or known.info.incarnation != node.status.info.incarnation:
            continue
        known.phase, known.generation = node.status.phase, node.status.generation
    summary = summary_of(Rounds(job))
    who = read_leader(leader[0].value)[0] if leader else ""
    return msgspec.structs.replace(
        summary,
        history=[job.why] if job.why else [],
        missing=missing_members(missing[0].value) if missing else "",
    ), who


def read_ports(
    client: EtcdClient, run_id: str, prefix: str = DEFAULT_PREFIX
) -> list[tuple[str, str, ControlPort | None]]:
    """Return node, address and control port of each agent of a job, the leader's first.

    Raises `EtcdError`, and `HoldfastError` if another version of Holdfast runs the job.
    """
    keys = JobKeys(prefix, run_id)
    leader, nodes = client.txn(Txn((), (Get(keys.leader), get_prefix(keys.nodes)))).results
    who = read_leader(leader[0].value)[0] if leader else ""
    found = [record for one in nodes if (record := unpack(NodeRecord, one.value)) is not None]
    if not found:
        for one in (*leader, *nodes):
            other = version_refusal(one.value)
            if other:
                raise HoldfastError(f"cannot read the job {run_id!r}: {other}")
    found.sort(key=lambda record: record.status.info.node != who)
    return [(one.status.info.node, one.status.info.address, one.control) for one in found]


def read_run_ids(
    client: EtcdClient, prefix: str = DEFAULT_PREFIX, *, running: bool = False
) -> list[str]:
    """Return the run ids of all jobs below a prefix; with `running`, only of jobs with nodes.

    Raises `EtcdError`.
    """
    kind = b"nodes" if running else b"job"
    root = f"{prefix.rstrip('/')}/".encode()
    [found] = client.txn(Txn((), (get_prefix(root, keys_only=True),))).results
    names = {
        unquote(name.decode(errors="replace"))
        for one in found
        for name, _, rest in [one.key[len(root) :].partition(b"/")]
        if rest.partition(b"/")[0] == kind
    }
    return sorted(names)
