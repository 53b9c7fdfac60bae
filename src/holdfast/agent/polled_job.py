"""This node's part in a job without a coordinator: the agent polls a `RendezvousHandler`.

The agent decides for its own node. It joins a round before every start, and regroups when the
handler reports waiting nodes.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from holdfast import console, plugins
from holdfast.agent.worker_processes import place_workers
from holdfast.core import supervision
from holdfast.core.ranks import NodeRanks, NodeShape, assign_ranks, identical_ranks
from holdfast.core.supervision import State
from holdfast.printable import quoted
from holdfast.processes.signals import SignalException
from holdfast.rendezvous.handler import RendezvousHandler
from holdfast.rendezvous.rendezvous_errors import RendezvousStateError, naming
from holdfast.store import collectives

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from holdfast.agent.lifecycle_reporter import LifecycleReporter
    from holdfast.agent.spec import Worker, WorkerGroup, WorkerSpec
    from holdfast.core.machine import Effect, Event
    from holdfast.core.protocol import RequestAnswer
    from holdfast.core.supervision import Supervision
    from holdfast.processes.failures.failure import ProcessFailure

    AssignRanks = Callable[[object, int, int], list[Worker]]
    T = TypeVar("T")

ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
TERMINAL_STATE = "torchelastic/agent/terminal_state/"
ROUND = ("store", "rank", "world_size", "bootstrap_store_info")
FIRST_POLL_S = 0.001


class RoundBroken(Exception):
    """A node of the round left before the ranks were exchanged."""


class PolledJob:
    """The rounds of one node, formed by the handler of its specification."""

    membership = None
    last_reason = ""
    members = ()
    """The nodes of the round are not known by name."""
    workers_deadline = None
    """No other node starts workers with the same ranks, so there is no deadline."""

    def __init__(
        self,
        group: WorkerGroup,
        machine: Supervision,
        reporter: LifecycleReporter,
    ) -> None:
        self.group = group
        self.fence = 0
        self.on_answer: Callable[[RequestAnswer], None] | None = None
        self._machine = machine
        self._reporter = reporter
        self._round = 0

    # The job.

    def join(self) -> None:
        pass  # A round is joined before each start.

    # Events.

    def descriptors(self) -> list[int]:
        return []

    def next_deadline(self, now: float) -> float | None:
        if self._machine.state is not State.RUNNING or not self.is_polled:
            return None
        return now + self.group.spec.monitor_interval

    def events(self, now: float) -> list[Event]:
        del now
        return []

    def waiting_nodes(self) -> list[Event]:
        """Return an event if nodes are waiting to join."""
        if self._machine.state is not State.RUNNING or not self.is_polled:
            return []
        waiting = self.nodes_waiting()
        return [supervision.NodesWaiting(waiting)] if waiting > 0 else []

    def cause_of(self, event: Event) -> str:
        del event
        return ""

    # Effects.

    def perform(self, effect: Effect, cause: str, *, defers_threads: bool) -> Event:
        """Join a round, or wait for the other nodes at the end."""
        del cause
        if isinstance(effect, supervision.JoinRound):
            return self._join_round(defers_threads=defers_threads)
        assert isinstance(effect, supervision.EnterBarrier)
        assert effect.limit_s is not None
        self.exit_barrier(effect.limit_s)
        return supervision.BarrierEnded()

    def _join_round(self, *, defers_threads: bool) -> Event:
        """Join the next round, and give the workers their ranks."""
        group = self.group
        self.find_round(lambda: self.next_round(defers_threads=defers_threads))
        assert group.group_rank is not None
        assert group.group_world_size is not None
        joined = supervision.RoundJoined(self._round, group.group_rank, group.group_world_size)
        self._round += 1
        return joined

    def find_round(self, join: Callable[[], None]) -> None:
        """Join rounds until one lasts long enough for its nodes to exchange their ranks."""
        while True:
            try:
                join()
                return
            except RoundBroken:
                console.info("a node left before the round began: rejoining")
            except Exception as problem:
                self._reporter.rendezvous_ended(problem)
                raise

    def next_round(
        self, assign: AssignRanks | None = None, *, defers_threads: bool = False
    ) -> None:
        """Wait for the next round that includes this node; `assign` replaces the exchange of ranks."""
        group, spec = self.group, self.group.spec
        if isinstance(spec.rdzv_handler, RendezvousHandler):
            spec.rdzv_handler.defers_threads = defers_threads
        handler = spec.rdzv_handler
        with naming(handler):
            info = handler.next_rendezvous()
        plugins.require(info, ROUND, handler, "a round")
        if info.world_size > 1:
            plugins.require(info.store, ("set", "get"), handler, "the store of a round")
        group.store = info.store
        group.group_rank = info.rank
        group.group_world_size = info.world_size
        if not self.is_polled:  # There is no other node, so this node chooses the fence.
            self.fence = max(self.fence + 1, int(time.time() * 1000))
        self._reporter.rendezvous_ended()
        store_address = info.bootstrap_store_info
        group.master_addr = spec.master_addr or store_address.master_addr
        group.master_port = spec.master_port or store_address.master_port
        with naming(handler):
            group.workers = (assign or self.exchange_ranks)(info.store, info.rank, info.world_size)

    def exchange_ranks(self, store: object, group_rank: int, group_world_size: int) -> list[Worker]:
        """Return this node's workers with their ranks, which the nodes agree on in the store."""
        begun, spec = time.monotonic(), self.group.spec
        ranks = node_ranks(
            store, group_rank, group_world_size, spec, lambda: self.nodes_waiting() > 0
        )
        self._reporter.ranks_assigned(time.monotonic() - begun)
        return place_workers(
            spec.local_world_size,
            ranks.first_rank,
            ranks.first_role_rank,
            ranks.world_size,
            ranks.role_world_size,
        )

    def assign_ranks(self) -> None:
        pass  # `next_round` has assigned them.

    def workers_stopped(self) -> None:
        pass

    def explain_expiry(self) -> None:
        pass

    def exit_barrier(self, limit_s: float) -> None:
        """Wait until the workers of the other nodes have exited."""
        exit_barrier(self.group, limit_s)

    def start_deferred_services(self) -> None:
        handler: object = self.group.spec.rdzv_handler
        if isinstance(handler, RendezvousHandler):
            handler.serve_now()

    # The end of the job.

    def failures(self, local: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        return local

    def error(self, outcome: supervision.Outcome) -> Exception | None:
        del outcome
        return None

    # Polling.

    @property
    def is_polled(self) -> bool:
        """Whether the agent must poll the handler for waiting nodes."""
        handler: object = self.group.spec.rdzv_handler
        # A handler that derives from another project's base class can only be polled.
        return not isinstance(handler, RendezvousHandler) or handler.polls_membership

    def nodes_waiting(self) -> int:
        handler = self.group.spec.rdzv_handler
        with naming(handler):
            return handler.num_nodes_waiting()


# The exchange of ranks, and the exit barrier, through the store of a round. Keys and values are
# TorchElastic's. A round of one node does not use the store.


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

    Calls `is_broken` every `monitor_interval`; once it returns true, raises `RoundBroken` instead of
    waiting for a node that has left.
    """
    if os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        return identical_ranks(group_rank, group_world_size, spec.local_world_size)
    shape = NodeShape(spec.role, spec.local_world_size)
    if group_world_size == 1:
        return assign_ranks([shape])[0]
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
    try:
        return read(json.loads(value))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RendezvousStateError(
            f"the store of the round has {quoted(repr(value))} at {key!r}",
            hint="another program, or another version of Holdfast, uses the same store",
        ) from None


def _shape(info: dict[str, Any]) -> NodeShape:
    role, size = info["role"], info["local_world_size"]
    if type(role) is not str or type(size) is not int or size < 0:
        raise TypeError
    return NodeShape(role, size)


def _ranks(numbers: list[Any]) -> NodeRanks:
    # A user's own store may have assigned ranks below 0, to a node that is not in the round yet.
    if not all(type(number) is int for number in numbers):
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
    """Return when the keys have values; raise `RoundBroken` if the round breaks first.

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
    """Return whether a store has a working `check`; the default of torch's `Store` only raises."""
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
    store: Any = group.store
    last = f"{TERMINAL_STATE}last_member"
    try:
        if store.add(f"{TERMINAL_STATE}num_members", 1) == group.group_world_size:
            store.set(last, "done")
        collectives.wait_for_keys(store, [last], timeout_s)
    except SignalException:
        raise
    except Exception as problem:  # noqa: BLE001 (stores of different types raise different exceptions)
        console.error(
            f"stopped waiting for the other nodes to finish (limit {timeout_s:g} s): {problem}"
        )
