"""The exchange of ranks, and the exit barrier, through the store of a round.

Keys and values are TorchElastic's. A round of one node does not use the store.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.ranks import NodeRanks, NodeShape, assign_ranks, identical_ranks
from holdfast.printable import quoted
from holdfast.processes.signals import SignalException
from holdfast.rendezvous.rendezvous_errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from holdfast.agent.spec import WorkerGroup, WorkerSpec

    T = TypeVar("T")

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
    """Return the ranks of this node's workers. The first node of the round assigns all ranks.

    Calls `is_broken` every `monitor_interval`; once it is true, raises `RoundBroken` instead of
    waiting for a node that has left.
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
        keys = [f"{ROLE_INFO}{node}" for node in range(group_world_size)]
        infos = _multi_get(store, keys, is_broken, interval)
        # A user's own store may already contain the ranks, but not the node's data.
        nodes = [_decoded(key, info, _shape) for key, info in zip(keys, infos, strict=False)]
        assigned = [
            json.dumps(
                (
                    ranks.first_rank,
                    ranks.world_size,
                    ranks.first_role_rank,
                    ranks.role_world_size,
                )
            )
            for ranks in (assign_ranks(nodes) if nodes else ())
        ]
        _multi_set(store, [f"{ASSIGNED_RANKS}{node}" for node in range(len(nodes))], assigned)
    key = f"{ASSIGNED_RANKS}{group_rank}"
    _await(store, [key], is_broken, interval)
    return _decoded(key, store.get(key), _ranks)


def _decoded(key: str, value: bytes, read: Callable[[Any], T]) -> T:
    """Decode another agent's value; raise `RendezvousStateError` if it is not valid."""
    import json

    try:
        return read(json.loads(value))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RendezvousStateError(
            f"the store of the round has {quoted(repr(value))} at {key!r}",
            hint="another program uses the same store, or another version",
        ) from None


def _shape(info: dict[str, Any]) -> NodeShape:
    role, size = info["role"], info["local_world_size"]
    if type(role) is not str or type(size) is not int or size < 0:
        raise TypeError
    return NodeShape(role, size)


def _ranks(numbers: list[Any]) -> NodeRanks:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError
    return NodeRanks(*numbers)


def _multi_get(
    store: Any, keys: list[str], is_broken: Callable[[], bool], interval_s: float
) -> list[bytes]:
    _await(store, keys, is_broken, interval_s)
    if hasattr(store, "multi_get"):
        values: list[bytes] = store.multi_get(keys)
        return values
    return [store.get(key) for key in keys]


def _multi_set(store: Any, keys: list[str], values: list[str]) -> None:
    if hasattr(store, "multi_set"):
        store.multi_set(keys, values)
        return
    for key, value in zip(keys, values, strict=True):
        store.set(key, value)


def _await(store: Any, keys: list[str], is_broken: Callable[[], bool], interval_s: float) -> None:
    """Return when the keys have values; raise `RoundBroken` if the round breaks before.

    It polls with `check`, at growing intervals, since a blocking `get` could not notice a broken
    round. TorchElastic does not require `check`: without it, the caller's `get` waits.
    """
    if is_broken is _never or not _has_check(store, keys):
        return
    pause, asked_at = FIRST_POLL_S, time.monotonic()
    while not store.check(keys):
        if time.monotonic() - asked_at >= interval_s:
            if is_broken():
                raise RoundBroken
            asked_at = time.monotonic()
        time.sleep(pause)
        pause = min(2 * pause, interval_s)


def _has_check(store: Any, keys: list[str]) -> bool:
    """Whether a store has a working `check`; the one inherited from torch only raises."""
    try:
        store.check(keys)
    except Exception:  # noqa: BLE001 (if the store is lost, the next `get` raises)
        return False
    return True


def exit_barrier(group: WorkerGroup, timeout_s: float) -> None:
    """Wait until every node's workers have finished, so that the store outlives all workers.

    A timeout is logged, and does not change this node's result.
    """
    if group.group_world_size == 1:
        return
    from holdfast.store.collectives import wait_for_keys

    store: Any = group.store
    last = f"{TERMINAL_STATE}last_member"
    try:
        if store.add(f"{TERMINAL_STATE}num_members", 1) == group.group_world_size:
            store.set(last, "done")
        wait_for_keys(store, [last], timeout_s)
    except SignalException:
        raise
    except Exception as problem:  # noqa: BLE001 (each kind of store raises other exceptions)
        console.error(
            f"stopped waiting for the other nodes to finish (limit {timeout_s:g} s): {problem}"
        )
