"""This node's part in a job that a coordinator (or an etcd leader) decides about.

`CoordinatedJob` stands between an agent and its connection: what arrives there becomes events of
the machine, what the machine reports is sent there, and the console says how the job goes on. It
decides nothing itself.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.agent.spec import place_workers
from holdfast.core import coordinated_supervision, supervision
from holdfast.core.limits import RIVALS_MAX
from holdfast.core.protocol import (
    Failure,
    JobOutcome,
    NodePhase,
    NodeRole,
    View,
)
from holdfast.core.supervision import State
from holdfast.errors import JobStopped
from holdfast.membership.interface import JoinRefused
from holdfast.processes.failures import report as remote_failures
from holdfast.processes.failures.failure import ChildFailedError, ProcessFailure
from holdfast.processes.keeper.deadline import WorkersDeadline
from holdfast.processes.poll import min_of
from holdfast.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.agent.spec import WorkerGroup
    from holdfast.core.coordinated_supervision import CoordinatedSupervision
    from holdfast.core.machine import Effect, Event
    from holdfast.core.protocol import RequestAnswer
    from holdfast.membership.interface import Membership
    from holdfast.membership.loop_heartbeat import LoopHeartbeat
    from holdfast.rendezvous.handler import CoordinatedRendezvousHandler


SUMMARY_CHARS_MAX = 500
WAIT_NOTICE_AFTER_S = 2.0  # A longer wait is worth a line on the console.


class CoordinatedJob:
    """Entered by the agent for one run; the machine belongs to the agent, and is only read here."""

    def __init__(
        self,
        handler: CoordinatedRendezvousHandler,
        group: WorkerGroup,
        machine: CoordinatedSupervision,
        *,
        exit_barrier_s: float,
        failures: Callable[[], dict[int, ProcessFailure]],
        requested: Callable[[str, str], None] = lambda _request, _what: None,
    ) -> None:
        spec = group.spec
        self._requested = requested
        self._handler = handler
        self._group = group
        self._machine = machine
        self._failures = failures
        self._connection = handler.enter(
            role=spec.role,
            local_world_size=spec.local_world_size,
            max_restarts=spec.max_restarts,
        )
        self._exit_barrier_s = exit_barrier_s
        self.workers_deadline = WorkersDeadline(self._connection.presence_fd)
        """When the workers must be gone, as the connection renews it."""
        self._connection.guard(self.workers_deadline.renew)
        self._loss = ""
        self._first_view = self._connection.view  # Of an agent that is run again.
        self._state, self._since = State.IDLE, time.monotonic()
        self._wait_notice = ""
        self._shown: View | None = None
        self._standby_since: float | None = None
        self._standby_s = 0.0
        self.on_answer: Callable[[RequestAnswer], None] | None = None
        """Gets what became of a request that came through this node."""

    @property
    def connection(self) -> Membership:
        """That to whoever decides."""
        return self._connection

    def fileno(self) -> int:
        """Return a descriptor that is readable while `events` has something."""
        return self._connection.fileno()

    @property
    def heartbeat(self) -> LoopHeartbeat:
        """The heartbeat of the agent's loop: this node's heartbeats mean that the loop runs."""
        return self._connection.heartbeat

    # Events.

    def events(self, now: float) -> list[Event]:
        """Take what has arrived, or what waiting has led to."""
        events: list[Event] = []
        if self._first_view is not None:
            events.append(coordinated_supervision.ViewReceived(self._first_view))
            self._first_view = None
        for message in self._connection.take():
            match message:
                case View():
                    if message.role is NodeRole.MEMBER:
                        # At once: this node may have to stop its workers first, others may not.
                        self._handler.serve_workers(message)
                    if message.answered is not None and self.on_answer is not None:
                        self.on_answer(message.answered)
                    self._show(now, message)
                    events.append(coordinated_supervision.ViewReceived(message))
                case coordinated_supervision.CoordinatorLost():
                    self._loss = self._handler.describe_loss(message)
                    events.append(message)
                case JoinRefused(why):
                    raise RendezvousConnectionError(self._handler.describe_refusal(why))
        # A view may be what was waited for; the machine has yet to take it in.
        return events or self._waited(now)

    def _waited(self, now: float) -> list[Event]:
        state = self._machine.state
        if state is not self._state:
            self._state, self._since = state, now
            self._wait_notice = ""
        waited = now - self._since
        if state is State.LEAVING:
            limit = self._barrier_limit()
            if limit is not None and waited >= limit:
                console.error(f"stopped waiting for the other nodes to be done (limit {limit:g} s)")
                return [supervision.BarrierEnded()]
            if waited >= WAIT_NOTICE_AFTER_S:
                self._notice_once(
                    "this node's workers are done; waiting for those of the other nodes "
                    + ("(which need this node)" if limit is None else f"(limit {limit:g} s)")
                )
        if state is State.JOINING and not self._is_standby():
            if waited >= self._handler.join_timeout_s:
                raise RendezvousTimeoutError(self._handler.describe_timeout(self._connection))
            if waited >= WAIT_NOTICE_AFTER_S:
                self._notice_wait()
        return []

    def deadline(self) -> float | None:
        """Return when `events` is due at the latest."""
        state = self._machine.state
        if state is not self._state:
            return 0.0
        limit: float | None
        if state is State.LEAVING:
            limit = self._barrier_limit()
            limit = None if limit is None else self._since + limit
        elif state is State.JOINING and not self._is_standby():
            limit = self._since + self._handler.join_timeout_s
        else:
            return None
        return limit if self._wait_notice else min_of(limit, self._since + WAIT_NOTICE_AFTER_S)

    def _barrier_limit(self) -> float | None:
        """Return how long to wait for the others once done.

        They all need the node that coordinates, and their workers the one that serves their store.
        """
        is_needed = self._connection.hosting or self._handler.serves_workers
        return None if is_needed else self._exit_barrier_s

    def _is_standby(self) -> bool:
        """Whether it waits for no nodes: there is a round, or was."""
        view = self._machine.view
        return view is not None and view.role is not NodeRole.WAITING

    def cause_of(self, event: Event) -> str:
        """Return the id of the message that an event came with."""
        if not isinstance(event, coordinated_supervision.ViewReceived):
            return ""
        return event.view.id

    # Effects.

    def perform(self, effect: Effect, cause: str) -> None:
        """Report to the coordinator what the machine wants reported."""
        match effect:
            case coordinated_supervision.ReportStatus(NodePhase.FAILED, generation, clear):
                failure, report = self._describe_failure()
                problem = self._connection.problem()
                if problem:
                    console.error(
                        f"{failure.summary}; cannot report it: {problem} "
                        "(the job may or may not restart)"
                    )
                self._connection.report(
                    NodePhase.FAILED, generation, failure, report, clear=clear, cause=cause
                )
            case coordinated_supervision.ReportStatus(phase, generation, clear):
                self._connection.report(phase, generation, clear=clear, cause=cause)
            case coordinated_supervision.Rejoin():
                self._connection.rejoin(cause=cause)

    def take_ranks(self) -> int:
        """Give the workers the ranks of the newest view, and return its fence."""
        view, group = self._machine.view, self._group
        assert view is not None
        info = self._handler.info_of(view)
        spec = group.spec
        group.store = info.store
        group.group_rank, group.group_world_size = view.rank, view.size
        meeting_point = info.bootstrap_store_info
        group.master_addr = spec.master_addr or meeting_point.master_addr
        group.master_port = spec.master_port or meeting_point.master_port
        group.workers = place_workers(
            spec.local_world_size,
            view.first_rank,
            view.first_role_rank,
            view.world_size,
            view.role_world_size,
        )
        return view.fence

    def _describe_failure(self) -> tuple[Failure, bytes]:
        """Return this node's first failure in short, and in full if it may be the job's last."""
        node = self._handler.node_id
        failures = self._failures()
        retryable = self._machine.retryable
        unhealthy = self._machine.unhealthy
        if unhealthy or not failures:
            summary = (unhealthy or "the workers are not healthy")[:SUMMARY_CHARS_MAX]
            sudden = bool(unhealthy)  # What failed of it elsewhere is a consequence.
            return Failure(node=node, summary=summary, sudden=sudden, retryable=retryable), b""
        error = ChildFailedError("", failures)
        rank, first = error.get_first_failure()
        now_ns, spoke_ns = time.time_ns(), first.spoke_ns()
        summary = f"rank {rank} (pid {first.pid} on {first.host}) failed: {first.summary()}"
        short = Failure(
            node=node,
            host=first.host,
            rank=rank,
            pid=first.pid,
            exitcode=first.exitcode,
            summary=summary[:SUMMARY_CHARS_MAX],
            sudden=first.died_suddenly(),
            retryable=retryable,
            trace=first.trace(),
            stopped=first.consequence,
            ended_ago_s=max(0.0, (now_ns - first.observed_ns) / 1e9),
            spoke_ago_s=max(1e-9, (now_ns - spoke_ns) / 1e9) if spoke_ns else 0.0,
            rivals=tuple(error.rivals()[:RIVALS_MAX]),
        )
        last = not retryable or self._machine.budget.left == 0
        return short, remote_failures.pack(failures) if last else b""

    # The end of the job.

    def failures(self, local: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """Return the failures of the whole job as far as known: its first, then this node's."""
        view = self._machine.view
        failure = view.failure if view is not None else None
        if view is None or failure is None:
            return local
        if failure.node == self._handler.node_id:
            if failure.rivals:
                for place, (_rank, one) in enumerate(ChildFailedError("", local).in_order()):
                    one.place, one.rivals = place, failure.rivals if place == 0 else ()
            return local
        try:
            first = remote_failures.unpack(view.report) if view.report else {}
        except remote_failures.BadReport as problem:
            console.warning(f"{failure.node} sent {problem}")
            first = {}
        if not first:
            first[failure.rank] = ProcessFailure(
                -1,
                failure.pid,
                failure.exitcode,
                "",
                detail=failure.summary,
                host=failure.host,
                place=0,
            )
        for one in local.values():
            one.consequence = True  # Of the failure elsewhere, for which all were stopped.
            one.order += len(first)
        next(iter(first.values())).rivals = failure.rivals
        return {**local, **first}

    def error(self, outcome: supervision.Outcome) -> Exception | None:
        """Return the error of a node that could not be in the job to its end, if it is one."""
        if outcome is supervision.Outcome.COORDINATOR_LOST:
            return RendezvousConnectionError(self._loss)
        view = self._machine.view
        over = view is not None and view.role is NodeRole.CLOSED
        if outcome is supervision.Outcome.SUCCEEDED and self._loss and not over:
            console.warning(
                f"{self._loss}; this node's workers succeeded, but how the job ended on other "
                "nodes is not known here"
            )
        refused = outcome is supervision.Outcome.REFUSED
        if view is not None and view.role is NodeRole.CLOSED:
            is_asked_for = view.outcome is JobOutcome.STOPPED and view.why == view.asked
            if is_asked_for and not refused:
                return JobStopped(f"the job {view.run_id!r} was stopped: {view.why}")
            if refused or view.outcome is JobOutcome.STOPPED:
                return RendezvousClosedError(
                    f"the job {view.run_id!r} at {self._handler.endpoint} is over: {view.why}",
                    hint="a new job needs another --rdzv-id",
                )
            return None
        if not refused:
            return None
        assert view is not None
        return RendezvousConnectionError(self._handler.describe_refusal(view.why, view.refusal))

    def note_expiry(self, generation: int) -> Event:
        """Tell why the workers are gone, and return that as an event."""
        why = self._connection.problem() or "this agent was not running"
        console.error(
            f"{why}: the workers were killed, before others may take their place (on_lost)"
        )
        return coordinated_supervision.WorkersExpired(generation)

    def standby_s(self, now: float) -> float:
        """Return for how long this node was a standby, drained or not."""
        since = self._standby_since
        return self._standby_s + (now - since if since is not None else 0.0)

    @property
    def last_reason(self) -> str:
        """Why the coordinator last changed the round or the generation."""
        view = self._machine.view
        return view.why if view is not None else ""

    # Lines on the console.

    def _show(self, now: float, view: View) -> None:
        last, self._shown = self._shown, view
        if (view.role is NodeRole.STANDBY) != (self._standby_since is not None):
            self._standby_s = self.standby_s(now)
            self._standby_since = now if view.role is NodeRole.STANDBY else None
        if last is not None and view.request and view.request != last.request:
            self._requested(view.request, view.asked)
        if view.slow and (last is None or last.slow != view.slow):
            console.notice(f"generation {view.generation} cannot start yet: {view.slow}")
        if view.held_back and (last is None or last.held_back != view.held_back):
            console.notice(view.held_back)
        if last is not None and (last.role, last.generation) == (view.role, view.generation):
            if view.request != last.request:
                console.notice(view.asked)
            return
        self._wait_notice = ""
        if last is not None and last.role is NodeRole.STANDBY:
            self._since = now  # Until now there was a round: it only begins to wait for one.
        was_member = last is not None and last.role is NodeRole.MEMBER
        leaves = self._machine.signum != 0
        match view.role:
            case NodeRole.MEMBER if not leaves:
                restart = ""
                if last is not None and was_member and view.restarts > last.restarts:
                    restart = f"; restart {view.restarts} of {self._group.spec.max_restarts}"
                console.notice(
                    f"generation {view.generation}: node {view.rank} of {view.size}, "
                    f"round {view.round} ({view.why}{restart})"
                )
            case NodeRole.STANDBY if view.drained:
                console.notice(f"this node is drained: {view.why}")
            case NodeRole.STANDBY if last is None or last.role is not NodeRole.STANDBY:
                console.notice("the round is full: standing by to replace a node")
            case NodeRole.FENCED if not leaves:
                console.warning(f"fenced: {view.why}; stopping the workers and joining again")
            case NodeRole.WAITING if was_member:
                console.notice(
                    f"the round is broken ({view.why}): waiting for nodes, {view.present} of "
                    f"{view.needed} are here"
                )
            case NodeRole.CLOSED if view.outcome is JobOutcome.FAILED and last is not None:
                console.notice(f"the job failed: {view.why}")
            case NodeRole.CLOSED if view.outcome is JobOutcome.STOPPED and last is not None:
                console.notice(view.why)

    def _notice_wait(self) -> None:
        view = self._connection.view
        if view is None or self._connection.problem():
            problem = self._connection.problem() or f"no word from {self._handler.endpoint} yet"
            if not self._wait_notice:  # It contains the time, so it is new every time.
                self._notice_once(f"waiting: {problem}")
            return
        if view.held_back:
            self._wait_notice = view.held_back  # It was said when it came.
            return
        here = f"{view.present} of {view.needed} are here"
        more = f" ({view.why})" if view.present >= view.needed and view.why else ""
        self._notice_once(f"waiting for nodes at {self._handler.endpoint}: {here}{more}")

    def _notice_once(self, text: str) -> None:
        if text != self._wait_notice:
            self._wait_notice = text
            console.notice(text)
