"""What a node brings to a job that lies in a backend: who it is, and what all must agree on.

Values alone, and the refusal of those that no job can be run with; `dynamic` uses them.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import TYPE_CHECKING

from holdfast import messages
from holdfast.core.news import JobSettings, NodeInfo
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.rendezvous.timeouts import RendezvousSettings

_local_ids = itertools.count()


def this_node(local_addr: str | None, *, node_id: str = "", label: str = "") -> NodeInfo:
    """Describe this node. Without an address it is known by the name its host gives itself."""
    host = os.uname().nodename
    address = local_addr or host
    if not local_addr:
        messages.info(f"other nodes know this one as {host}; --local-addr gives it an address")
    name = node_id or f"{address}_{os.getpid()}_{next(_local_ids)}"
    return NodeInfo(node=name, incarnation=0, host=host, label=label, address=address)


def job_settings_of(
    settings: RendezvousSettings, *, spares: int = 0, order: str = "stable"
) -> JobSettings:
    """Return what all nodes of the job must agree on. How many restarts there are, `enter` adds."""
    return JobSettings(
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        spares=spares,
        settle_s=settings.timeout.last_call.total_seconds(),
        order=order,
    )


def check_settings(settings: RendezvousSettings) -> None:
    """Refuse what no job can be run with."""
    if not settings.run_id:
        raise UsageError("--rdzv-id: the id of the job is empty")
    if settings.min_nodes < 1 or settings.max_nodes < settings.min_nodes:
        raise UsageError(
            f"--nnodes: {settings.min_nodes}:{settings.max_nodes} is no range of nodes; accepted: "
            "MIN:MAX with MIN from 1 and MAX not below it"
        )
    if settings.keep_alive_interval <= timedelta(0) or settings.keep_alive_max_attempt < 1:
        raise UsageError(
            "--rdzv-conf: keep_alive_interval must be above 0 and keep_alive_max_attempt from 1"
        )
