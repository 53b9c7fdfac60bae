"""This node's part in a job with a coordinator (or an etcd leader).

`CoordinatedJob` connects the agent's loop to its `Membership`. It turns messages into events of the
machine, sends the machine's reports, and prints the progress of the job. It decides nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.agent.worker_processes import place_workers
from holdfast.core import supervision
from holdfast.core.limits import RIVALS_MAX
from holdfast.core.phases import JobOutcome, NodePhase, NodeRole
from holdfast.core.protocol import Failure, View
from holdfast.core.supervision import State
from holdfast.errors import JobStopped
from holdfast.membership.interface import JoinRefused, ProtectionChanged
from holdfast.net.listening import require_descriptors
from holdfast.numa.affinity import format_ranges
from holdfast.observe.lifecycle import protection_text
from holdfast.processes.failures import failure_report
from holdfast.processes.failures.failure import ChildFailedError, ProcessFailure
from holdfast.processes.keeper.deadline import WorkersDeadline
from holdfast.rendezvous.rendezvous_errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.agent.lifecycle_reporter import LifecycleReporter
    from holdfast.agent.spec import WorkerGroup
    from holdfast.core.machine import Effect, Event
    from holdfast.core.protocol import RequestAnswer
    from holdfast.core.supervision import CoordinatedSupervision
    from holdfast.membership.interface import Membership
    from holdfast.rendezvous.membership_handler import MembershipHandler


SUMMARY_CHARS_MAX = 500
MEMBERS_PRINTED = 8
# An agent needs at most this many file descriptors: in total for its connections, the coordinator and the
# workers' store; then for each worker.
JOB_DESCRIPTORS = 20
WORKER_DESCRIPTORS = 3


class CoordinatedJob:
    """The job during one run. It only reads the machine, which belongs to the agent's loop."""

    is_polled = False

    def __init__(
        self,
        handler: MembershipHandler,
        group: WorkerGroup,
        machine: CoordinatedSupervision,
        reporter: LifecycleReporter,
        failures: Callable[[], dict[int, ProcessFailure]],
    ) -> None:
        """`failures` returns the known failures of this node's workers."""
        self.group = group
        self.fence = 0
        self.membership: Membership | None = None
        self.workers_deadline: WorkersDeadline | None = None
        self.on_answer: Callable[[RequestAnswer], None] | None = None
        self._handler = handler
        self._machine = machine
        self._reporter = reporter
        self._failures = failures
        self._is_needed = False
        self._loss = ""
        self._first_view: View | None = None
        self._wait_notice = ""
        self._repeats_notice = False
        """Whether to print a notice each time the missing nodes change."""
        self._shown: View | None = None
        self._is_standby = False

    @property
    def _joined(self) -> Membership:
        assert self.membership is not None, "the job was not joined"
        return self.membership

    # The job.

    def join(self) -> None:
        """Enter the job with this node's role, number of workers and restart budget."""
        spec = self.group.spec
        require_descriptors(JOB_DESCRIPTORS + WORKER_DESCRIPTORS * spec.local_world_size)
        membership = self.membership = self._handler.enter(
            role=spec.role,
            local_world_size=spec.local_world_size,
            max_restarts=spec.max_restarts,
        )
        self.workers_deadline = WorkersDeadline(membership.presence_fd)
        membership.watch_stop_deadline(self.workers_deadline.renew)
        self._first_view = membership.view  # None, unless this agent runs again.

    # Events.

    def descriptors(self) -> list[int]:
        """Return the descriptors that are readable while `events` has something."""
        return [self._joined.fileno()]

    def next_deadline(self, now: float) -> float | None:
        del now
        return None  # The machine limits all waits.

    def events(self, now: float) -> list[Event]:
        """Return the events that have arrived."""
        del now
        events: list[Event] = []
        # Other nodes need the coordinator; their workers need the store.
        is_needed = self._joined.hosting or self._handler.serves_workers
        if is_needed is not self._is_needed:
            self._is_needed = is_needed
            events.append(supervision.NeededByOthers(is_needed))
        if self._first_view is not None:
            events.append(supervision.ViewReceived(self._first_view))
            self._first_view = None
        for message in self._joined.take():
            match message:
                case supervision.ViewReceived(view):
                    if view.role is NodeRole.MEMBER:
                        # Workers of other nodes may start before this node's, so serve them now.
                        self._handler.serve_workers(view)
                    if view.answered is not None and self.on_answer is not None:
                        self.on_answer(view.answered)
                    self._show(view)
                    events.append(message)
                case supervision.CoordinatorLost():
                    self._loss = self._handler.describe_loss(message)
                    events.append(message)
                case ProtectionChanged(missing):
                    self._show_protection(missing)
                case JoinRefused(why):
                    raise RendezvousConnectionError(self._handler.describe_refusal(why))
        self._repeats_notice = self._repeats_notice and self._machine.state is State.JOINING
        if self._repeats_notice and not events:
            self._notice_missing()
        return events

    def waiting_nodes(self) -> list[Event]:
        return []  # The coordinator counts them.

    def cause_of(self, event: Event) -> str:
        """Return the id of the message that caused an event."""
        if not isinstance(event, supervision.ViewReceived):
            return ""
        return event.view.id

    # Effects.

    def perform(self, effect: Effect, cause: str, *, defers_threads: bool = False) -> None:
        """Send a report to the coordinator, or a notice to the user."""
        del defers_threads
        membership = self._joined
        match effect:
            case supervision.ReportStatus(NodePhase.FAILED, generation, clear, ends_job):
                failure, report = self._describe_failure(is_complete=ends_job)
                problem = membership.problem()
                if problem:
                    console.error(
                        f"{failure.summary}; cannot report it: {problem} "
                        "(the job may restart or end)"
                    )
                membership.report(
                    NodePhase.FAILED, generation, failure, report, clear=clear, cause=cause
                )
            case supervision.ReportStatus(phase, generation, clear):
                membership.report(phase, generation, clear=clear, cause=cause)
            case supervision.Rejoin():
                membership.rejoin(cause=cause)
                self._machine.story.node = membership.node
            case supervision.ReportWait(limit_s, has_ended):
                self._notice_wait(limit_s, has_ended=has_ended)

    def assign_ranks(self) -> None:
        """Give the workers the ranks of the newest view."""
        view, group = self._machine.view, self.group
        assert view is not None
        info = self._handler.info_of(view)
        spec = group.spec
        group.store = info.store
        group.group_rank, group.group_world_size = view.rank, view.size
        store_address = info.bootstrap_store_info
        group.master_addr = spec.master_addr or store_address.master_addr
        group.master_port = spec.master_port or store_address.master_port
        group.workers = place_workers(
            spec.local_world_size,
            view.first_rank,
            view.first_role_rank,
            view.world_size,
            view.role_world_size,
        )
        self.fence = view.fence
        self._reporter.rendezvous_ended()
        self._reporter.ranks_assigned()

    def workers_stopped(self) -> None:
        """Stop the timer that limits how long workers may run without contact to the coordinator."""
        if self.workers_deadline is not None:
            self.workers_deadline.end()

    def start_deferred_services(self) -> None:
        self._handler.serve_now()

    def _describe_failure(self, *, is_complete: bool) -> tuple[Failure, bytes]:
        """Return a summary of this node's first failure, and the full report if that is needed."""
        node = self._handler.node_id
        failures = self._failures()
        retryable = self._machine.retryable
        unhealthy = self._machine.unhealthy
        if unhealthy or not failures:
            summary = (unhealthy or "the workers are not healthy")[:SUMMARY_CHARS_MAX]
            sudden = bool(unhealthy)  # Failures of other nodes are consequences of it.
            return Failure(node=node, summary=summary, sudden=sudden, retryable=retryable), b""
        error = ChildFailedError("", failures)
        rank, first = error.get_first_failure()
        now_ns, traceback_ns = time.time_ns(), first.traceback_ns()
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
            traceback_ago_s=max(1e-9, (now_ns - traceback_ns) / 1e9) if traceback_ns else 0.0,
            rivals=tuple(error.rivals()[:RIVALS_MAX]),
        )
        return short, failure_report.pack(failures) if is_complete else b""

    # The end of the job.

    def failures(self, local: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """Return the known failures of the whole job: its first, then this node's."""
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
            first = failure_report.unpack(view.report) if view.report else {}
        except failure_report.BadReport as problem:
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
            one.consequence = True  # Of the failure on another node, which stopped all workers.
            one.order += len(first)
        if callable(self.group.spec.entrypoint):  # As in `FunctionGroup.result`.
            local = {rank: one for rank, one in local.items() if not one.only_stopped()}
        next(iter(first.values())).rivals = failure.rivals
        return {**local, **first}

    def error(self, outcome: supervision.Outcome) -> Exception | None:
        """Return the error that replaces this node's result; None if there is a result."""
        if outcome is supervision.Outcome.COORDINATOR_LOST:
            return RendezvousConnectionError(self._loss)
        if outcome is supervision.Outcome.JOIN_TIMED_OUT:
            return RendezvousTimeoutError(self._handler.describe_timeout(self._joined))
        view = self._machine.view
        over = view is not None and view.role is NodeRole.CLOSED
        if outcome is supervision.Outcome.SUCCEEDED and self._loss and not over:
            console.warning(
                f"{self._loss}; this node's workers succeeded, but the result of the job on other "
                "nodes is unknown"
            )
        refused = outcome is supervision.Outcome.REFUSED
        if view is not None and view.role is NodeRole.CLOSED:
            if view.stopped_by and not refused:
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

    def explain_expiry(self) -> None:
        """Report why the keeper killed the workers."""
        why = self._joined.problem() or "this agent was not running"
        console.error(
            f"{why}: the keeper killed the workers before other nodes could replace them (on_lost)"
        )

    @property
    def last_reason(self) -> str:
        """Why the coordinator last changed the round or the generation."""
        view = self._machine.view
        return view.why if view is not None else ""

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes of the round by rank; empty if there are too many for a view."""
        view = self._machine.view
        return tuple(one.node for one in view.members) if view is not None else ()

    # Lines on the console.

    def _show(self, view: View) -> None:
        last, self._shown = self._shown, view
        if (view.role is NodeRole.STANDBY) is not self._is_standby:
            self._is_standby = not self._is_standby
            self._reporter.standby_changed(is_standby=self._is_standby)
        if last is not None and view.request and view.request != last.request:
            self._reporter.requested(view.request, view.request_text)
        if view.slow and (last is None or last.slow != view.slow):
            console.notice(f"generation {view.generation} cannot start yet: {view.slow}")
        if view.wait_reason and (last is None or last.wait_reason != view.wait_reason):
            console.notice(view.wait_reason)
        if last is not None and (last.role, last.generation) == (view.role, view.generation):
            if view.request != last.request:
                console.notice(view.request_text)
            return
        self._wait_notice = ""
        was_member = last is not None and last.role is NodeRole.MEMBER
        leaves = self._machine.signum != 0
        match view.role:
            case NodeRole.MEMBER if not leaves:
                restart = ""
                if last is not None and was_member and view.restarts > last.restarts:
                    restart = f"; restart {view.restarts} of {self.group.spec.max_restarts}"
                console.notice(
                    f"generation {view.generation}: node {view.rank} of {view.size}, "
                    f"round {view.round} ({view.why}{restart})"
                )
                is_new = last is None or last.round_key != view.round_key
                if is_new and view.rank == 0 and view.size > 1 and view.members:
                    console.notice(_members_text(view))
            case NodeRole.STANDBY if view.drained:
                console.notice(f"this node is drained: {view.why}")
            case NodeRole.STANDBY if last is None or last.role is not NodeRole.STANDBY:
                console.notice("the round is full: standing by to replace a node")
            case NodeRole.FENCED if view.new_id:
                console.notice(f"{view.why}; this node joins as {view.new_id}")
            case NodeRole.FENCED if not leaves:
                console.warning(f"fenced: {view.why}; stopping the workers and rejoining")
            case NodeRole.WAITING if was_member:
                console.notice(
                    f"the round is broken ({view.why}): waiting for nodes, {_joined_text(view)}"
                )
            case NodeRole.CLOSED if view.outcome is JobOutcome.SUCCEEDED and last is not None:
                never_ran = self._machine.generation < 0
                if never_ran or not was_member:
                    what = "; this node ran no workers" if never_ran else ""
                    console.notice(f"the job {view.run_id!r} is over: {view.why}{what}")
            case NodeRole.CLOSED if view.outcome is JobOutcome.FAILED and last is not None:
                console.notice(f"the job failed: {view.why}")
            case NodeRole.CLOSED if view.outcome is JobOutcome.STOPPED and last is not None:
                console.notice(view.why)

    def _show_protection(self, missing: str) -> None:
        if self._shown is not None and self._shown.role is NodeRole.CLOSED:
            return  # Machines leave because the job is over.
        self._reporter.protection_changed(missing)
        (console.warning if missing else console.notice)(f"--ha: {protection_text(missing)}")

    def _notice_wait(self, limit_s: float | None, *, has_ended: bool) -> None:
        """Print what this node waits for."""
        if has_ended:
            console.error(f"stopped waiting for the other nodes to finish (limit {limit_s:g} s)")
        elif self._machine.state is State.LEAVING:
            self._notice_once(
                "this node's workers have finished; waiting for the workers of the other nodes "
                + ("(which need this node)" if limit_s is None else f"(limit {limit_s:g} s)")
            )
        else:
            self._repeats_notice = True
            self._notice_missing()

    def _notice_missing(self) -> None:
        """Print why no round forms; a standby does not wait for one."""
        membership, view = self._joined, self._machine.view
        if view is not None and view.role is not NodeRole.WAITING:
            return
        view = membership.view
        if view is None or membership.problem():
            problem = membership.problem() or f"no response from {self._handler.endpoint} yet"
            if not self._wait_notice:  # `problem` contains the time, so it changes on every call.
                self._notice_once(f"waiting: {problem}")
            return
        if view.wait_reason:
            self._wait_notice = view.wait_reason  # It was printed when the view arrived.
            return
        joined = _joined_text(view)
        more = f" ({view.why})" if view.present >= view.needed and view.why else ""
        self._notice_once(f"waiting for nodes at {self._handler.endpoint}: {joined}{more}")

    def _notice_once(self, text: str) -> None:
        if text != self._wait_notice:
            self._wait_notice = text
            console.notice(text)


def _joined_text(view: View) -> str:
    if view.present > view.needed:
        return f"{view.present} joined, {view.needed} needed"
    return f"{view.present} of {view.needed} joined"


def _members_text(view: View) -> str:
    """Return which node has which ranks."""
    ends = [*(one.first_rank for one in view.members[1:]), view.world_size]
    ranks = [range(one.first_rank, end) for one, end in zip(view.members, ends, strict=True)]
    each = [
        f"{format_ranges(mine)} on {one.node}"
        for one, mine in zip(view.members[:MEMBERS_PRINTED], ranks, strict=False)
    ]
    more = len(view.members) - len(each)
    return f"round {view.round}: ranks {', '.join(each)}{f' and {more} more nodes' if more else ''}"
