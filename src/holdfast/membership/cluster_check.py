"""Checks that an etcd cluster is the one that a job with `--ha` started with.

The job's own machines run the cluster (`etcd.cluster_member`). It serves one job and stores that job's run id.
It lives no longer than the job. If an agent finds another cluster in its place, it does not continue there,
because the new cluster does not know the job's earlier decisions.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.coordinator.connections import ConnectFailed
from holdfast.core.etcd.calls import Get, Problem, ProblemKind, Txn, TxnDone
from holdfast.etcd.cluster_list import OPEN, RECORD, read_record

if TYPE_CHECKING:
    from holdfast.core.etcd.calls import Answer
    from holdfast.core.etcd.etcd_session import EtcdSession
    from holdfast.etcd.async_client import AsyncEtcdClient
    from holdfast.etcd.cluster_list import ClusterRecord

READ_AGAIN_S = 0.05
OTHER_PORTS = "choose other ports: --ha HOST:PORT,..."


class ClusterCheck:
    """Accepts only the cluster that it found first, and only if it serves this job."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._record: ClusterRecord | None = None

    async def check(self, etcd: AsyncEtcdClient, session: EtcdSession, limit_s: float) -> None:
        """Raise `ConnectFailed` unless this is the job's cluster; each call may take `limit_s`."""
        answer = await _read(etcd, limit_s)
        if isinstance(answer, Problem):
            permanent = answer.kind in (ProblemKind.DENIED, ProblemKind.REFUSED)
            raise ConnectFailed(etcd.describe(answer.why), permanent=permanent)
        assert isinstance(answer, TxnDone)
        found, opened = answer.results
        if not found or not opened:
            raise ConnectFailed("the cluster has just started, and waits for its other members")
        try:
            record = read_record(found[0].value)
        except ValueError as problem:
            raise ConnectFailed(str(problem), permanent=True) from None
        if record.run_id != self._run_id:
            why = f"it is the cluster of the job {record.run_id!r}; {OTHER_PORTS}"
            raise ConnectFailed(why, permanent=True)
        if self._record is None:
            self._record = record
            # Each new cluster starts its revisions at 1, but fences must keep growing.
            session.leadership.fence_base = record.at_ms
        elif self._record != record:
            why = "it lost most of its machines and its data, and was created again"
            raise ConnectFailed(why, permanent=True)


async def _read(etcd: AsyncEtcdClient, limit_s: float) -> Answer:
    """Read the record of the cluster. A member writes it and, a little later, opens the cluster to the nodes."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while True:
        answer = await etcd.call(Txn((), (Get(RECORD), Get(OPEN))), limit_s=limit_s)
        found = not isinstance(answer, TxnDone) or all(answer.results)
        if found or loop.time() > deadline:
            return answer
        await asyncio.sleep(READ_AGAIN_S)
