"""Machines with one broken rule each, to show that the checkers detect violations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.core import rounds
from holdfast.core.coordinator_machine import CoordinatorMachine
from holdfast.core.etcd.calls import KeyValue
from holdfast.core.etcd.election import Election
from holdfast.core.etcd.etcd_session import EtcdSession
from holdfast.core.etcd.keys import pack
from holdfast.core.etcd.leader import Leadership
from holdfast.core.etcd.witness import WatchState, Witness
from holdfast.core.phases import JobOutcome, NodeRole
from holdfast.core.protocol import Ack, Request, Status, View
from holdfast.core.requests import RequestRefusal
from holdfast.core.rounds import JobPhase, NodeLost, Rounds
from holdfast.core.session import Session
from holdfast.core.shared_state import (
    SessionEffect,
    SessionEvent,
    SharedStateSession,
    StateWritten,
    WriteConflict,
)
from holdfast.core.supervision import CoordinatedSupervision, StopReason
from holdfast.wire.frames import OutgoingParts

if TYPE_CHECKING:
    from holdfast.core.etcd.calls import Change, Compare, TxnDone
    from holdfast.core.etcd.election import ElectionEffect
    from holdfast.core.etcd.keys import JobRecord
    from holdfast.core.etcd.leader import LeaderEffect
    from holdfast.core.etcd.witness import WitnessEffect, _Watch
    from holdfast.core.machine import Effect
    from holdfast.core.protocol import NodeInfo, Status
    from holdfast.core.rounds import Node
    from holdfast.core.saved_jobs import SavedJob
    from holdfast.core.session import SessionEffect as CoordinatorSessionEffect


class FailuresNotCharged(Rounds):
    """A worker's failure is not charged."""

    def _worker_failed(self, node: Node, report: bytes) -> list[View]:
        views = super()._worker_failed(node, report)
        if self.job.phase is not JobPhase.CLOSED:
            self.job.restarts -= 1
        return views


class LossesAreCharged(Rounds):
    """A lost node is charged like a failure."""

    def _remove_lost(self, lost: tuple[NodeLost, ...]) -> list[View]:
        views = super()._remove_lost(lost)
        if views and self.job.restarts < self._settings.max_restarts:
            self.job.restarts += 1
        return views


class StartsBeforeOlderWorkersExit(Rounds):
    """A generation starts while workers of the last one are still being stopped on other nodes."""

    def _release_generation(self) -> bool:
        self._with_workers.clear()
        return super()._release_generation()


class ExecutesRequestsTwice(Rounds):
    """A repeated request is executed again."""

    def _request(self, request: Request) -> list[View]:
        self.job.answers = {one: a for one, a in self.job.answers.items() if one != request.id}
        return super()._request(request)


class DrainedNodesRun(Rounds):
    """A drained node is included in the next generation."""

    def _begin_generation(self, why: str) -> None:
        drained, self.job.exclusions = self.job.exclusions, {}
        missing = [n.info for name, n in self.job.nodes.items() if name in drained]
        room = self._settings.max_nodes - len(self.job.members)
        known = {info.node for info in self.job.members}
        self.job.members += [info for info in missing if info.node not in known][:room]
        self.job.exclusions = drained
        super()._begin_generation(why)


class UndrainHasNoEffect(Rounds):
    """A request to undrain a node is granted but has no effect."""

    def _undrain(self, nodes: list[str], why: str) -> list[View]:
        return []


class RequestsUnanswered(Rounds):
    """A request through a node is executed, but the node gets no answer."""

    def _decide_requests(self) -> list[View]:
        views = super()._decide_requests()
        return [msgspec.structs.replace(view, answered=None) for view in views]

    def _send(self, node: Node, *, new_revision: bool = False) -> View:
        return msgspec.structs.replace(
            super()._send(node, new_revision=new_revision), answered=None
        )


class RequestedRestartsAreCharged(Rounds):
    """A restart that an operator requests is charged."""

    def _request(self, request: Request) -> list[View]:
        before = self.job.generation
        views = super()._request(request)
        if self.job.generation > before and self.job.restarts < self._settings.max_restarts:
            self.job.restarts += 1
        return views


class StopsInsteadOfRefusing(Rounds):
    """If a node cannot be drained because the job needs it, the job is stopped."""

    def _request(self, request: Request) -> list[View]:
        views = super()._request(request)
        answer = self.job.answers.get(request.id)
        if answer is not None and answer.refusal == RequestRefusal.TOO_FEW_NODES.value:
            return [*views, *self._close(JobOutcome.STOPPED, answer.why)]
        return views


class NoStopDeadline(Session):
    """A disconnected or stopped node keeps its workers running past the deadline."""

    stop_at = None


class LostNodeKeepsRank(Rounds):
    """The round continues with a lost member."""

    def _remove(self, known: Node, why: str, *, superseded: bool = False) -> bool:
        super()._remove(known, why, superseded=superseded)
        return False


class AnyNodeTakesOverId(Rounds):
    """A node with the id of a connected node replaces it, even if the connected node is alive."""

    def _add_contender(self, status: Status, known: Node) -> list[View]:
        broken = self._remove(known, "another node joined", superseded=True)
        return self._join(status, "another node joined" if broken else "")


class GenerationReused(Rounds):
    """A regroup reuses the generation of the previous round."""

    def _form_round(self, why: str) -> list[View]:
        if self.job.round >= 0:
            self.job.generation -= 1
        return super()._form_round(why)


class FencesRestart(Rounds):
    """Every coordinator counts fences from its own start."""

    _begun = 0

    def _begin_generation(self, why: str) -> None:
        super()._begin_generation(why)
        self._begun += 1
        self.job.fence = self._begun


class IgnoresSavedJobs(CoordinatorMachine):
    """A coordinator ignores the jobs that its predecessor saved."""

    def __init__(self, now: float, **more: Any) -> None:
        super().__init__(now, **{**more, "saved_jobs": None})


class IgnoresRecords(CoordinatorMachine):
    """A coordinator ignores the records of its predecessor."""

    def _keep_saved(self, saved: SavedJob) -> None:
        pass


class ReturnsToReplacedCoordinator(Session):
    """A node connects to a coordinator that was replaced."""

    endpoint_index = property(lambda _: 0, lambda *_: None)


class RoundNumberReused(Rounds):
    """The members of a round change, but its number does not."""

    def _form_round(self, why: str) -> list[View]:
        if self.job.round > 0:
            self.job.round -= 1
        return super()._form_round(why)


class FencedRejoins(Rounds):
    """Removed incarnations are forgotten immediately."""

    def _retire(self, info: NodeInfo, why: str, *, superseded: bool = False) -> None:
        pass


class ResumesIncompleteRound(Rounds):
    """A new coordinator does not wait for all members of a round."""

    def _note_claim(self, node: Node, status: Status) -> list[View]:
        views = super()._note_claim(node, status)
        job = self.job
        if job.phase is not JobPhase.RECOVERING or len(job.nodes) < self._settings.min_nodes:
            return views
        reconnected = rounds.claimants(job)
        job.members = [one.info for one in reconnected]
        job.round_term, job.round, _key = reconnected[0].claim
        job.phase = JobPhase.ACTIVE
        job.waiting = False
        self.rank_table = rounds.RankTable(job)
        self._record_change("some members reconnected")
        return self._send_all()

    def check(self) -> None:
        pass


class NeverResumesRound(Rounds):
    """A new coordinator forms a new round instead of resuming the earlier one."""

    def _note_claim(self, node: Node, status: Status) -> list[View]:
        return super()._note_claim(node, msgspec.structs.replace(status, size=status.size + 1))


class AcceptsOldViews(Session):
    """A late view replaces a newer one."""

    def _viewed(self, at: float, view: View) -> list[CoordinatorSessionEffect]:
        self._term = self._revision = 0
        return super()._viewed(at, view)


class StartsBeforeStopping(CoordinatedSupervision):
    """The workers of the last generation are not stopped before the next ones start."""

    def _stop(self, reason: StopReason, signum: int = 0) -> list[Effect]:
        view = self.view
        if (
            reason is StopReason.GENERATION_CHANGED
            and view is not None
            and view.role is NodeRole.MEMBER
        ):
            return self._start(view)
        return super()._stop(reason, signum)


class JoinersNeverAdmitted(Rounds):
    """Nodes that join a running round wait forever."""

    def _form_or_wait(self, newcomer: Node) -> list[View]:
        views = super()._form_or_wait(newcomer)
        if self.job.phase is JobPhase.ACTIVE:
            self.job.waiting = False
        return views


class IgnoresStuckLoops(Rounds):
    """A node with a stuck loop stays in the round."""

    def _update(self, known: Node, status: Status) -> list[View]:
        return super()._update(known, msgspec.structs.replace(status, stuck=""))


class IgnoresFlapping(Rounds):
    """A flapping node is never excluded."""

    def _take_over_record(self, node: Node) -> None:
        pass


class SettlesForever(IgnoresFlapping):
    """Every node that joins restarts the settle time without a limit, and flapping nodes are not excluded."""

    def _wait_for_more_nodes(self, *, is_first: bool) -> None:
        super()._wait_for_more_nodes(is_first=True)


class ClosedReopens(Rounds):
    """A late node reopens a closed job."""

    def _status(self, status: Status) -> list[View]:
        known = self._known(status.info.node, status.info.incarnation)
        if self.job.phase is JobPhase.CLOSED and known is None:
            self.job.phase, self.job.outcome = JobPhase.FORMING, None
        return super()._status(status)


class OneSuccessSuffices(Rounds):
    """The job succeeds with the first node that succeeds."""

    def _update(self, known: Node, status: Status) -> list[View]:
        views = super()._update(known, status)
        if self.job.succeeded and self.job.phase is JobPhase.ACTIVE:
            return self._close(JobOutcome.SUCCEEDED, "one is enough")
        return views


class NeverSucceeds(Rounds):
    """The job does not close when all nodes have succeeded."""

    def _close(self, outcome: JobOutcome, why: str) -> list[View]:
        return [] if outcome is JobOutcome.SUCCEEDED else super()._close(outcome, why)


class RanksReversed(Rounds):
    """Every round reverses the order of the previous one."""

    def _begin_generation(self, why: str) -> None:
        self.job.members = self.job.members[::-1]
        super()._begin_generation(why)


class DuplicateRanks(Rounds):
    """Two nodes get the same rank."""

    def _send(self, node: Node, *, new_revision: bool = False) -> View:
        view = super()._send(node, new_revision=new_revision)
        return msgspec.structs.replace(view, rank=view.rank // 2 if view.rank > 0 else view.rank)


class WrongSize(Rounds):
    """Views have the number of connected nodes instead of the size of the round."""

    def _send(self, node: Node, *, new_revision: bool = False) -> View:
        view = super()._send(node, new_revision=new_revision)
        return msgspec.structs.replace(view, size=view.present if view.size else 0)


class NoMaximum(Rounds):
    """A round includes all connected nodes."""

    def _size(self, eligible: int) -> int:
        return eligible

    def check(self) -> None:
        pass


class NoParts(OutgoingParts):
    """Large messages are sent in one piece, and heartbeats wait behind them."""

    def send(self, frame: bytes, kind: str = "") -> bytes:
        return frame


class NothingIsLost(CoordinatorMachine):
    """Silence and closed connections have no consequence."""

    def _tick(self, now: float) -> list[Any]:
        self._liveness.expired(now)
        return super()._tick(now)


class ForgetsItsPromise(CoordinatorMachine):
    """It promises to wait for a starved node, and does not."""

    def handle(self, *args: Any, **how: Any) -> list[Any]:
        self._liveness._patience.clear()
        return super().handle(*args, **how)


class DecidesFailureImmediately(CoordinatorMachine):
    """A failure is decided before the other members have responded."""

    def _hold(self, now: float, _rounds: Rounds, status: Status) -> list[View | Ack]:
        return self._status(now, status, "", status.id)


class DeposedLeadersWrite(EtcdSession):
    """A leader's writes succeed even if another node leads."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.leadership.__class__ = Unfenced


class Unfenced(Leadership):
    def _fence(self) -> tuple[Compare, ...]:
        return ()


class MissingViewsNotStored(EtcdSession):
    """A new leader assumes that all views are stored."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.leadership.__class__ = AssumesViewsStored


class AssumesViewsStored(Leadership):
    def _begin(self, now: float, answer: TxnDone, record: JobRecord | None) -> list[LeaderEffect]:
        job, call, nodes, _views = answer.results
        shown = tuple(
            KeyValue(key=self._keys.view(*peer), value=pack(NEWEST_VIEW))
            for one in nodes
            if (peer := self._keys.peer_of(one.key))
        )
        results = (job, call, nodes, shown)
        return super()._begin(now, msgspec.structs.replace(answer, results=results), record)


NEWEST_VIEW = View(
    run_id="any", node="any", incarnation=0, term=0, revision=2**50, role=NodeRole.WAITING
)


class NoSuccessor(EtcdSession):
    """After a leader exits, nodes that were present do not campaign."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.leadership.election.__class__ = NotInterested


class NotInterested(Election):
    def _leader_changed(self, change: Change) -> list[ElectionEffect]:
        return []


class SilenceCountsAsRefusal(EtcdSession):
    """If an agent does not respond after its connection broke, it counts as exited."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.witness.__class__ = CountsSilence


class CountsSilence(Witness):
    def _unknown(self, now: float, watch: _Watch) -> list[WitnessEffect]:
        is_checked = watch.state is WatchState.CHECKING
        return self._refused(now, watch) if is_checked else super()._unknown(now, watch)


class AnyRefusalCounts(EtcdSession):
    """An agent counts as exited if a host refuses at an address at which it was never seen."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.witness.__class__ = AcceptsAnyRefusal


class AcceptsAnyRefusal(Witness):
    def _refused(self, now: float, watch: _Watch) -> list[WitnessEffect]:
        watch.state = WatchState.CHECKING
        return super()._refused(now, watch)


class ConflictsAreIgnored(SharedStateSession):
    """A node treats its write as stored although another node wrote first."""

    def _handle(self, now: float, event: SessionEvent) -> list[SessionEffect]:
        return super()._handle(now, StateWritten() if isinstance(event, WriteConflict) else event)


class IgnoresStalledCounters(SharedStateSession):
    """A counter that does not change has no consequence."""

    def _apply(self, now: float, rounds: Rounds) -> bool:
        self._peers._lost.clear()
        return super()._apply(now, rounds)


class AcceptsOldStates(SharedStateSession):
    """The view of an older state replaces a newer one."""

    def _deliver(self, view: View) -> list[SessionEffect]:
        self._newest = (0, 0)
        return super()._deliver(view)
