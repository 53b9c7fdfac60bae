"""What the agents of one round exchange through its store: ranks, and that they are done.

Keys and values are TorchElastic's. A round of one node needs no store at all.
"""

from __future__ import annotations

import os
import time

from holdfast import console
from holdfast.core.ranks import NodeRanks, NodeShape, assign_ranks, identical_ranks
from holdfast.processes.signals import SignalException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.agent.spec import WorkerGroup, WorkerSpec

ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
TERMINAL_STATE = "torchelastic/agent/terminal_state/"


FIRST_POLL_S = 0.001


class RoundBroken(Exception):
    """A node of the round left before the ranks were exchanged."""


def _never() -> bool:
    return False


def node_ranks(
    store: Any,
    group_rank: int,
    group_world_size: int,
    spec: WorkerSpec,
    is_broken: Callable[[], bool] = _never,
) -> NodeRanks:
    """Return the ranks of this node's workers: the first node assigns those of all nodes.

    `is_broken` is asked every `monitor_interval`; once it is true, the wait for a node that will
    never come is over and `RoundBroken` is raised.
    """
    if os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        return identical_ranks(group_rank, group_world_size, spec.local_world_size)
    shape = NodeShape(spec.role, spec.local_world_size)
    if group_world_size == 1:
        return assign_ranks([shape])[0]
    import json

    mine = {"role": shape.role, "rank": group_rank, "local_world_size": shape.local_world_size}
    store.set(f"{ROLE_INFO}{group_rank}", json.dumps(mine))
    interval = spec.monitor_interval
    if group_rank == 0:
        infos = [
            json.loads(_get(store, f"{ROLE_INFO}{node}", is_broken, interval))
            for node in range(group_world_size)
        ]
        nodes = [NodeShape(one["role"], one["local_world_size"]) for one in infos]
        for node, ranks in enumerate(assign_ranks(nodes)):
            values = (
                ranks.first_rank,
                ranks.world_size,
                ranks.first_role_rank,
                ranks.role_world_size,
            )
            store.set(f"{ASSIGNED_RANKS}{node}", json.dumps(values))
    mine_as_text = _get(store, f"{ASSIGNED_RANKS}{group_rank}", is_broken, interval)
    return NodeRanks(*json.loads(mine_as_text))


def _get(store: Any, key: str, is_broken: Callable[[], bool], interval_s: float) -> bytes:
    """Return a value of the store, unless the round breaks before it comes.

    A store can only be asked or waited for, not both, so this asks: soon at first, then ever more
    rarely. A store that cannot be asked is waited for.
    """
    pause, asked_at = FIRST_POLL_S, time.monotonic()
    while is_broken is not _never and hasattr(store, "check") and not store.check([key]):
        if time.monotonic() - asked_at >= interval_s:
            if is_broken():
                raise RoundBroken
            asked_at = time.monotonic()
        time.sleep(pause)
        pause = min(2 * pause, interval_s)
    value: bytes = store.get(key)
    return value


def exit_barrier(group: WorkerGroup, timeout_s: float) -> None:
    """Wait until every node's workers are done, so that none takes the store away too early.

    Nodes that do not arrive in time are logged; this node's own success stands.
    """
    if group.group_world_size == 1:
        return
    from datetime import timedelta

    store: Any = group.store
    last = f"{TERMINAL_STATE}last_member"
    try:
        if store.add(f"{TERMINAL_STATE}num_members", 1) == group.group_world_size:
            store.set(last, "done")
        store.wait([last], timedelta(seconds=timeout_s))
    except SignalException:
        raise
    except Exception as problem:  # noqa: BLE001 (each kind of store fails in a way of its own)
        console.error(
            f"stopped waiting for the other nodes to be done (limit {timeout_s:g} s): {problem}"
        )
