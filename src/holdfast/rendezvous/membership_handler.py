"""The rendezvous handler of all backends with a `Membership`: `MembershipHandler`.

Holdfast's agents `enter` the job and follow the views that the membership delivers. An agent that knows
only TorchElastic's interface requests a round (`next_rendezvous`) and polls whether it must request
another (`num_nodes_waiting`); it counts restarts itself. A `JobAccess` creates the membership; coordinator, etcd
and shared state have one each.

A polling agent checks its membership only while its workers run, not while it waits for other nodes. If another
node left during such a wait, the agent would wait forever. So `next_rendezvous` returns a round only when all
of its members have arrived.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.phases import NodePhase, NodeRole, RefusalReason
from holdfast.core.supervision import CoordinatorLost
from holdfast.membership.interface import JoinRefused
from holdfast.rendezvous.handler import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from holdfast.rendezvous.job_access import ANNOUNCE_S, JobAccess, JoinRequest
from holdfast.rendezvous.rendezvous_errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from holdfast.rendezvous.worker_store import PORTS, WorkerStore
from holdfast.wire.wire_limits import STORE_KEYS_MAX

if TYPE_CHECKING:
    from holdfast.core.protocol import View
    from holdfast.membership.interface import Membership

POLL_S = (0.005, 0.1)  # The first and the longest pause while a wait for keys polls the store.
POLL_S_PER_NODE = 0.001  # All nodes together poll at most a thousand times a second.
EVENT_WAIT_S = 1.0  # How long one wait for an event lasts; then other conditions are checked.
ALL_ARRIVED = "all"


class RoundOver(Exception):
    """The round ended during a wait; the text says why."""


class MembershipHandler(RendezvousHandler):
    """A node's rendezvous, in which a coordinator, a leader or common rules decide for all nodes.

    They form rounds, count restarts and end the job. Holdfast's agents call `enter` once and follow the
    views that the membership delivers; the methods of `RendezvousHandler` are for other agents.
    """

    has_membership = True
    polls_membership = False
    announce = staticmethod(console.info)
    """Prints the node's progress."""
    round: View | None = None
    """The view with which the node's current round started."""

    def __init__(self, access: JobAccess) -> None:
        self.access = access
        self._worker_store: WorkerStore | None = None
        self._membership: Membership | None = None
        self._was_standby = False
        self._has_left = True  # Whether the leave is stored, or none is needed.
        self._clear = (0, 0)  # The term and `Status.clear` of the last report.

    # For agents that follow views.

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent of the first node serves the workers' store, instead of the worker of rank 0."""
        return not self.access.workers_serve

    @property
    def node_id(self) -> str:
        """This node's id in the job."""
        return self._membership.node if self._membership is not None else self.access.name.id

    @property
    def serves_workers(self) -> bool:
        """Whether this process serves the store that workers of the job depend on."""
        return self._worker_store is not None and self._worker_store.is_serving

    @property
    def store_alarm(self) -> int:
        """A descriptor that is readable once the workers' store has failed here."""
        return self._worker_store.fileno() if self._worker_store is not None else -1

    def take_store_failure(self) -> str:
        """Return why this node's workers' store failed; empty if it did not, or if this was already returned."""
        return self._worker_store.take_failure() if self._worker_store is not None else ""

    @property
    def endpoint(self) -> str:
        """The endpoint, as a user writes it."""
        return self.access.endpoint

    @property
    def join_timeout_s(self) -> float:
        """How long a node waits for a round with enough nodes."""
        return self.access.join_timeout_s

    def enter(
        self, *, role: str = "default", local_world_size: int = 1, max_restarts: int = 0
    ) -> Membership:
        """Join the job with this role and size; later calls return the same membership."""
        if self._membership is None:
            settings = self.access.job_settings(max_restarts)
            self._worker_store = WorkerStore(
                ports=PORTS,
                served=self.use_agent_store,
                address=self.access.store_address,
                access=settings.store.value,
            )
            try:
                store = self._worker_store
                self._membership = self.access.connect(
                    JoinRequest(role, local_world_size, settings, store.numbers, store.secret)
                )
                store.token, store.on_new_ports = self.access.job_token, self._membership.hold_ports
            except BaseException:
                self._worker_store.close()
                raise
        return self._membership

    def serve_workers(self, view: View) -> None:
        """Once the workers may start, serve their store, or attest this host to it."""
        assert self._worker_store is not None
        self._worker_store.follow(view)

    def info_of(self, view: View) -> RendezvousInfo:
        """Return a member's view as TorchElastic's `RendezvousInfo`."""
        assert self._membership is not None
        self.serve_workers(view)
        store = self._membership.store(self.access.scope_of(view))
        return RendezvousInfo(store, view.rank, view.size, self.store_address(view))

    def store_address(self, view: View) -> RendezvousStoreInfo:
        """Return the address of the store for this node's workers."""
        assert self._worker_store is not None
        where = view.master_addr, view.master_port
        return RendezvousStoreInfo(*self._worker_store.store_address(view.generation, *where))

    # Messages, one line each.

    def describe_timeout(self, membership: Membership) -> str:
        """Return how many nodes joined, or the problem if there never was a view."""
        limit, view = f"{self.join_timeout_s:g} s", membership.view
        if view is not None and view.wait_reason:
            return f"{self.endpoint}: {view.wait_reason} (join_timeout: {limit})"
        if view is not None:
            here = f"{view.present} of {view.needed} nodes"
            return f"{here} joined at {self.endpoint} within {limit} (join_timeout)"
        problem = membership.problem() or f"no response from {self.access.authority_at}"
        return f"{problem} (join_timeout: {limit})"

    def describe_loss(self, lost: CoordinatorLost) -> str:
        """Return the unreachable side, how long it has been unreachable, and the reason."""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - lost.unreachable_s))
        why = f": {lost.why}" if lost.why else ""
        return f"{self.access.authority_at} has been unreachable since {since} ({lost.unreachable_s:.0f} s){why}"

    def describe_refusal(self, why: str, reason: RefusalReason | None = None) -> str:
        """Return why this node cannot join the job."""
        if reason is RefusalReason.REPLACED and self.access.given_id:
            why = f"{why}; was another node started with {self.access.given_id}?"
        return f"{self.access.refused_by}: {why}"

    # TorchElastic's interface.

    def get_backend(self) -> str:
        """Return the name of the backend, as in `--rdzv-backend`."""
        return self.access.backend

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self.access.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node and all other members have arrived in a new round."""
        membership = self._enter_polled()
        while True:
            view = self._next_round(membership)
            info = self.info_of(view)
            try:
                self._await_members(membership, view)
            except RoundOver as over:
                console.info(f"generation {view.generation} did not start: {over}")
                continue
            self.announce(
                f"generation {view.generation}: node {view.rank} of {view.size}, round "
                f"{view.round} ({view.why})"
            )
            return info

    def is_closed(self) -> bool:
        """Return whether the job has ended, as far as this node knows."""
        view = self._newest_view()
        return view is not None and view.role is NodeRole.CLOSED

    def set_closed(self) -> None:
        """End the job for all nodes."""
        membership = self._enter_polled()
        membership.report(NodePhase.CLOSING, self._generation)
        limit_s = self.access.close_timeout_s
        if limit_s is None:
            return
        deadline = time.monotonic() + limit_s
        while not self.is_closed():
            view = membership.view
            if view is not None and view.role is NodeRole.REFUSED:
                raise RendezvousConnectionError(self.describe_refusal(view.why, view.refusal))
            if time.monotonic() >= deadline:
                raise RendezvousTimeoutError(
                    f"the job {self.get_run_id()!r} could not be closed within {limit_s:g} s: "
                    f"{membership.problem() or 'no response'}"
                )
            self._wait_for_event(membership, deadline)

    def num_nodes_waiting(self) -> int:
        """Return a number above 0 if the workers must restart in another round, or the job has ended.

        They must restart if a node has joined and the settle time is over, if a node was lost or requested a
        restart, or if the other nodes continued without this one.
        """
        view = self._newest_view()
        if view is None or self.round is None or not self.why_over(self.round):
            return 0
        return max(1, view.present - self.round.size)

    def shutdown(self) -> bool:
        """Leave the job, which continues without this node, and release all resources."""
        membership, self._membership = self._membership, None
        self.round, self._was_standby = None, False
        try:
            if membership is not None:
                self._has_left = membership.leave(self.access.leave_timeout_s)
                membership.close()
            if self._worker_store is not None:
                self._worker_store.close()
                self._worker_store = None
        finally:
            self.access.close()
            if membership is not None:
                self.access.free_name(membership.node)
        return True

    # Waiting for a round.

    def _enter_polled(self) -> Membership:
        self.access.is_polled = True
        return self.enter()

    @property
    def _generation(self) -> int:
        return self.round.generation if self.round is not None else -1

    def _next_round(self, membership: Membership) -> View:
        """Wait for a round that is new to this node, and report that it runs."""
        self._clear = (self.round.term if self.round is not None else 0, self._generation + 1)
        membership.report(NodePhase.READY, self._generation, clear=self._generation + 1)
        deadline = time.monotonic() + self.join_timeout_s
        while (view := membership.view) is None or not self._is_new(membership, view):
            if not self._was_standby and time.monotonic() >= deadline:
                error = RendezvousTimeoutError(
                    self.describe_timeout(membership),
                    hint="join_timeout in --rdzv-conf sets this limit",
                )
                membership.report(NodePhase.LEAVING, self._generation)
                raise error
            self._wait_for_event(membership, None if self._was_standby else deadline)
        self.round = view
        membership.report(NodePhase.RUNNING, view.generation)
        return view

    def _is_new(self, membership: Membership, view: View) -> bool:
        match view.role:
            case NodeRole.MEMBER:
                self._was_standby = False
                if view.generation > self._generation and not view.start:
                    self._report_clear(membership, view.term, view.generation)
                    return False
                return view.generation > self._generation
            case NodeRole.WAITING:
                self._report_clear(membership, view.term, view.generation + 1)
            case NodeRole.STANDBY:
                if not self._was_standby:
                    self.announce("the round is full: standing by to replace a node")
                self._was_standby = True
                self._report_clear(membership, view.term, view.generation + 1)
            case NodeRole.FENCED:
                membership.rejoin()
            case NodeRole.REFUSED:
                raise RendezvousConnectionError(self.describe_refusal(view.why, view.refusal))
            case NodeRole.CLOSED if self._was_standby:
                raise RendezvousGracefulExitError(
                    f"the job {view.run_id!r} is over: {view.why}; this node was a standby and is no "
                    "longer needed"
                )
            case NodeRole.CLOSED:
                raise RendezvousClosedError(
                    f"the job {view.run_id!r} is over: {view.why}",
                    hint="a new job needs another --rdzv-id",
                )
        return False

    def _report_clear(self, membership: Membership, term: int, generation: int) -> None:
        """Report that no workers of earlier generations run here."""
        if (term, generation) > self._clear:
            self._clear = (term, generation)
            membership.report(NodePhase.READY, self._generation, clear=generation)

    def _await_members(self, membership: Membership, view: View) -> None:
        """Wait until every member of a round has arrived; raise `RoundOver` if the round ends.

        The first node waits for the keys of all others, then sets `ALL_ARRIVED`, for which the others wait.
        """
        if view.size == 1:
            return
        store = self.access.arrivals(membership, f"arrivals/{self.access.scope_of(view)}")
        awaited = [[ALL_ARRIVED]]
        if view.rank == 0:
            ranks = [str(rank) for rank in range(1, view.size)]
            starts = range(0, len(ranks), STORE_KEYS_MAX)
            awaited = [ranks[at : at + STORE_KEYS_MAX] for at in starts]
        deadline = time.monotonic() + self.join_timeout_s
        announce_at, problem = 0.0, ""
        pause_s, pause_s_max = POLL_S
        pause_s_max = max(pause_s_max, POLL_S_PER_NODE * view.size)
        while awaited:
            over = self.why_over(view)
            if over:
                raise RoundOver(over)
            now = time.monotonic()
            if now >= deadline:
                raise RendezvousTimeoutError(
                    f"not all {view.size} nodes of round {view.round} arrived within "
                    f"{self.join_timeout_s:g} s (join_timeout){problem}: running nodes must "
                    "stop their workers first, and all nodes must use the same kind of agent"
                )
            try:
                if now >= announce_at:
                    store.set(str(view.rank), "")
                    announce_at = now + ANNOUNCE_S
                if store.check(awaited[0]):
                    if view.rank == 0 and len(awaited) == 1:
                        store.set(ALL_ARRIVED, "")
                    del awaited[0]
                    continue
            except (OSError, RuntimeError) as error:  # The errors of stores, including torch's.
                problem = f", and the store failed: {error}"
                announce_at = 0.0
            time.sleep(pause_s)
            pause_s = min(pause_s_max, pause_s * 1.2)

    def why_over(self, round_: View) -> str:
        """Return why a round of this node has ended; empty while it lasts."""
        view = self._newest_view()
        if view is None:
            return ""
        lasts = view.role is NodeRole.MEMBER and view.generation == round_.generation
        return "" if lasts else view.why or f"this node is {view.role.value} now"

    # Events.

    def _newest_view(self) -> View | None:
        if self._membership is None:
            return None
        self._take(self._membership)
        return self._membership.view

    def _wait_for_event(self, membership: Membership, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(membership.fileno(), select.POLLIN)
        rest_s = (
            EVENT_WAIT_S if deadline is None else min(EVENT_WAIT_S, deadline - time.monotonic())
        )
        poll.poll(max(1, int(rest_s * 1000)))
        self._take(membership)

    def _take(self, membership: Membership) -> None:
        for event in membership.take():
            match event:
                case CoordinatorLost():
                    raise RendezvousConnectionError(self.describe_loss(event))
                case JoinRefused(why):
                    raise self.access.error_of(membership, self.describe_refusal(why))
        self.access.check(membership)
