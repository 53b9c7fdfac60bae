"""This node's part in a job without a coordinator: the agent polls a `RendezvousHandler`.

The agent decides for its own node. It joins a round before every start, and regroups when the
handler counts waiting nodes. `PolledJob` has the methods of `CoordinatedJob`, as the agent's loop
uses them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.agent import rank_exchange
from holdfast.agent.spec import place_workers
from holdfast.core import supervision
from holdfast.core.supervision import State
from holdfast.rendezvous.handler import RendezvousHandler

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.agent.lifecycle_reporter import LifecycleReporter
    from holdfast.agent.spec import Worker, WorkerGroup
    from holdfast.core.machine import Effect, Event
    from holdfast.core.protocol import RequestAnswer
    from holdfast.core.supervision import Supervision
    from holdfast.processes.failures.failure import ProcessFailure

    AssignRanks = Callable[[object, int, int], list[Worker]]


class PolledJob:
    """The rounds of one node, formed by the handler of its specification."""

    connection = None
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
        *,
        exit_barrier_s: float,
    ) -> None:
        self.group = group
        self.fence = 0
        self.on_answer: Callable[[RequestAnswer], None] | None = None
        self._machine = machine
        self._reporter = reporter
        self._exit_barrier_s = exit_barrier_s
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

    def perform(self, effect: Effect, cause: str) -> None:
        raise NotImplementedError(f"{effect} is for a job with a coordinator (cause {cause})")

    def join_round(self, *, is_attended: bool) -> Event:
        """Join the next round, and give the workers their ranks."""
        group = self.group
        self.find_round(lambda: self.next_round(is_attended=is_attended))
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
            except rank_exchange.RoundBroken:
                console.info("a node left before the round began: rejoining")
            except Exception as problem:
                self._reporter.rendezvous_ended(problem)
                raise

    def next_round(self, assign: AssignRanks | None = None, *, is_attended: bool = False) -> None:
        """Wait for the next round with this node; `assign` replaces the exchange of ranks."""
        group, spec = self.group, self.group.spec
        if isinstance(spec.rdzv_handler, RendezvousHandler):
            spec.rdzv_handler.is_attended = is_attended
        info = spec.rdzv_handler.next_rendezvous()
        group.store = info.store
        group.group_rank = info.rank
        group.group_world_size = info.world_size
        if not self.is_polled:  # There is no other node, so this node chooses the fence.
            self.fence = max(self.fence + 1, int(time.time() * 1000))
        self._reporter.rendezvous_ended()
        meeting_point = info.bootstrap_store_info
        group.master_addr = spec.master_addr or meeting_point.master_addr
        group.master_port = spec.master_port or meeting_point.master_port
        group.workers = (assign or self.exchange_ranks)(info.store, info.rank, info.world_size)

    def exchange_ranks(self, store: object, group_rank: int, group_world_size: int) -> list[Worker]:
        """Return this node's workers with their ranks, which the nodes agree on in the store."""
        begun, spec = time.monotonic(), self.group.spec
        ranks = rank_exchange.node_ranks(
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
        pass  # `join_round` has done so.

    def workers_stopped(self) -> None:
        pass

    def explain_expiry(self) -> None:
        pass

    def exit_barrier(self) -> None:
        """Wait until the workers of the other nodes have exited."""
        rank_exchange.exit_barrier(self.group, self._exit_barrier_s)

    def settle(self) -> None:
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
        return self.group.spec.rdzv_handler.num_nodes_waiting()
