"""Rules that are wrong on purpose, each in one way, to show that the checkers can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.core import rounds
from holdfast.core.coordinated_supervision import CoordinatedSupervision
from holdfast.core.coordinator_machine import CoordinatorMachine
from holdfast.core.etcd.calls import KeyValue
from holdfast.core.etcd.election import Election
from holdfast.core.etcd.etcd_session import EtcdSession
from holdfast.core.etcd.keys import pack
from holdfast.core.etcd.leader import Leadership
from holdfast.core.etcd.witness import WatchState, Witness
from holdfast.core.protocol import (
    Ack,
    JobOutcome,
    NodeRole,
    Request,
    Status,
    View,
)
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
from holdfast.core.supervision import StopReason
from holdfast.wire.parts import OutgoingParts

if TYPE_CHECKING:
    from holdfast.core.etcd.calls import Change, Compare, TxnDone
    from holdfast.core.etcd.election import ElectionEffect
    from holdfast.core.etcd.keys import JobRecord
    from holdfast.core.etcd.leader import LeaderEffect
    from holdfast.core.etcd.witness import WitnessEffect, _Watch
    from holdfast.core.machine import Effect
    from holdfast.core.protocol import NodeInfo, Status
    from holdfast.core.rounds import Node
    from holdfast.core.session import SessionEffect as CoordinatorSessionEffect


class FreeRestarts(Rounds):
    """A worker's failure is not charged."""

    def _worker_failed(self, node: Node, report: bytes) -> list[View]:
        views = super()._worker_failed(node, report)
        if self.job.phase is not JobPhase.CLOSED:
            self.job.restarts -= 1
        return views


class LossesCost(Rounds):
    """A lost node is charged like a failure."""

    def _remove_lost(self, lost: tuple[NodeLost, ...]) -> list[View]:
        views = super()._remove_lost(lost)
        if views and self.job.restarts < self._settings.max_restarts:
            self.job.restarts += 1
        return views


class StartsAtOnce(Rounds):
    """A generation starts while the last one is still being stopped elsewhere."""

    def _release_generation(self) -> bool:
        self._with_workers.clear()
        return super()._release_generation()


class DoneAgain(Rounds):
    """A request that is repeated is done again."""

    def _request(self, request: Request) -> list[View]:
        self.job.answers = {one: a for one, a in self.job.answers.items() if one != request.id}
        return super()._request(request)


class DrainsInName(Rounds):
    """A drained node is taken into the next generation all the same."""

    def _begin_generation(self, why: str) -> None:
        drained, self.job.exclusions = self.job.exclusions, {}
        missing = [n.info for name, n in self.job.nodes.items() if name in drained]
        room = self._settings.max_nodes - len(self.job.members)
        known = {info.node for info in self.job.members}
        self.job.members += [info for info in missing if info.node not in known][:room]
        self.job.exclusions = drained
        super()._begin_generation(why)


class UndrainsInName(Rounds):
    """A node that is undrained is granted that, and nothing comes of it."""

    def _undrain(self, nodes: list[str], why: str) -> list[View]:
        return []


class SaysNothing(Rounds):
    """What is asked for through a node is done, and the node is not told."""

    def _decide_requests(self) -> list[View]:
        views = super()._decide_requests()
        return [msgspec.structs.replace(view, answered=None) for view in views]

    def _send(self, node: Node, *, new_revision: bool = False) -> View:
        return msgspec.structs.replace(
            super()._send(node, new_revision=new_revision), answered=None
        )


class RestartsCost(Rounds):
    """A restart that somebody asked for is charged."""

    def _request(self, request: Request) -> list[View]:
        before = self.job.generation
        views = super()._request(request)
        if self.job.generation > before and self.job.restarts < self._settings.max_restarts:
            self.job.restarts += 1
        return views


class StopsUnasked(Rounds):
    """A node that cannot be spared is drained by ending the job."""

    def _request(self, request: Request) -> list[View]:
        views = super()._request(request)
        answer = self.job.answers.get(request.id)
        if answer is not None and answer.refusal == RequestRefusal.TOO_FEW_NODES.value:
            return [*views, *self._close(JobOutcome.STOPPED, answer.why)]
        return views


class NeverExpires(Session):
    """A node that is cut off, or stopped, lets its workers run, where it must not."""

    stop_at = None


class LostKeepsItsRank(Rounds):
    """The round goes on with a member that is gone."""

    def _remove(self, known: Node, why: str, *, superseded: bool = False) -> bool:
        super()._remove(known, why, superseded=superseded)
        return False


class AnybodyTakesOver(Rounds):
    """Whoever comes under the name of a node takes its place, whether or not it is alive."""

    def _contend(self, status: Status, known: Node) -> list[View]:
        broken = self._remove(known, "another came", superseded=True)
        return self._join(status, "another came" if broken else "")


class SameGenerationAgain(Rounds):
    """A regroup reuses the generation of the round before."""

    def _form(self, why: str) -> list[View]:
        if self.job.round >= 0:
            self.job.generation -= 1
        return super()._form(why)


class FencesBeginAnew(Rounds):
    """Every coordinator counts its own generations, whatever nodes heard of."""

    _begun = 0

    def _begin_generation(self, why: str) -> None:
        super()._begin_generation(why)
        self._begun += 1
        self.job.fence = self._begun


class ForgetsItsMemory(CoordinatorMachine):
    """What an earlier coordinator stored is not read."""

    def __init__(self, now: float, **more: Any) -> None:
        super().__init__(now, **{**more, "saved_jobs": None})


class AllPlacesAreAlike(Session):
    """A node connects to a coordinator that another one replaced."""

    place = property(lambda _: 0, lambda *_: None)


class RoundChangesUnseen(Rounds):
    """The members of a round change, and its number does not: two rounds at once."""

    def _form(self, why: str) -> list[View]:
        if self.job.round > 0:
            self.job.round -= 1
        return super()._form(why)


class FencedComesBack(Rounds):
    """What became of an incarnation is forgotten at once."""

    def _retire(self, info: NodeInfo, why: str, *, superseded: bool = False) -> None:
        pass


class AdoptsAnIncompleteRound(Rounds):
    """A coordinator that came back does not wait for all of a round."""

    def _note_claim(self, node: Node, status: Status) -> list[View]:
        views = super()._note_claim(node, status)
        job = self.job
        if job.phase is not JobPhase.RECOVERING or len(job.nodes) < self._settings.min_nodes:
            return views
        back = rounds.claimants(job)
        job.members = [one.info for one in back]
        job.round_term, job.round, _key = back[0].claim
        job.phase = JobPhase.ACTIVE
        job.waiting = False
        self.rank_table = rounds.RankTable(job)
        self._record_change("some are back")
        return self._send_all()

    def check(self) -> None:
        pass


class NeverAdopts(Rounds):
    """A coordinator that came back begins anew instead of carrying a round on."""

    def _note_claim(self, node: Node, status: Status) -> list[View]:
        return super()._note_claim(node, msgspec.structs.replace(status, size=status.size + 1))


class OldViewsCount(Session):
    """A view that comes late takes the place of a newer one."""

    def _viewed(self, at: float, view: View) -> list[CoordinatorSessionEffect]:
        self._term = self._revision = 0
        return super()._viewed(at, view)


class StartsBesideTheOld(CoordinatedSupervision):
    """The workers of the last generation are not stopped before the next are started."""

    def _stop(self, reason: StopReason, signum: int = 0) -> list[Effect]:
        view = self.view
        if reason is StopReason.COORDINATOR and view is not None and view.role is NodeRole.MEMBER:
            return self._start(view)
        return super()._stop(reason, signum)


class JoinersAreLeftOut(Rounds):
    """Nodes that come to a running round wait for ever."""

    def _review(self, newcomer: Node) -> list[View]:
        views = super()._review(newcomer)
        if self.job.phase is JobPhase.ACTIVE:
            self.job.waiting = False
        return views


class StuckIsNoMatter(Rounds):
    """A node whose loop does not turn stays in the round."""

    def _update(self, known: Node, status: Status) -> list[View]:
        return super()._update(known, msgspec.structs.replace(status, stuck=""))


class EveryReturnIsWelcome(Rounds):
    """However often nodes came and went, they are let in at once."""

    def _take_over_record(self, node: Node) -> None:
        pass


class SettlesForEver(EveryReturnIsWelcome):
    """Every node that comes begins the wait for more anew, and none is held back for its returns."""

    def _settle(self, *, is_first: bool) -> None:
        super()._settle(is_first=True)


class ClosedOpensAgain(Rounds):
    """A node that comes late opens a closed job."""

    def _status(self, status: Status) -> list[View]:
        known = self._known(status.info.node, status.info.incarnation)
        if self.job.phase is JobPhase.CLOSED and known is None:
            self.job.phase, self.job.outcome = JobPhase.FORMING, None
        return super()._status(status)


class OneIsEnough(Rounds):
    """The job succeeds with the first node that is done."""

    def _update(self, known: Node, status: Status) -> list[View]:
        views = super()._update(known, status)
        if self.job.succeeded and self.job.phase is JobPhase.ACTIVE:
            return self._close(JobOutcome.SUCCEEDED, "one is enough")
        return views


class NeverDone(Rounds):
    """The job goes on when all are done."""

    def _close(self, outcome: JobOutcome, why: str) -> list[View]:
        return [] if outcome is JobOutcome.SUCCEEDED else super()._close(outcome, why)


class RanksTurnedRound(Rounds):
    """Every round has the order of the one before, backwards."""

    def _begin_generation(self, why: str) -> None:
        self.job.members = self.job.members[::-1]
        super()._begin_generation(why)


class RankZeroForTwo(Rounds):
    """Two nodes get the same rank."""

    def _send(self, node: Node, *, new_revision: bool = False) -> View:
        view = super()._send(node, new_revision=new_revision)
        return msgspec.structs.replace(view, rank=view.rank // 2 if view.rank > 0 else view.rank)


class SizeIsGuessed(Rounds):
    """Nodes get how many are there instead of how many are in the round."""

    def _send(self, node: Node, *, new_revision: bool = False) -> View:
        view = super()._send(node, new_revision=new_revision)
        return msgspec.structs.replace(view, size=view.present if view.size else 0)


class NoMaximum(Rounds):
    """All that are there are taken."""

    def _size(self, here: int) -> int:
        return here

    def check(self) -> None:
        pass


class SentWhole(OutgoingParts):
    """However large a message is, it is sent in one piece, and heartbeats queue behind it."""

    def send(self, frame: bytes, kind: str = "") -> bytes:
        return frame


class NobodyIsEverLost(CoordinatorMachine):
    """Silence and closed links are of no consequence."""

    def _tick(self, now: float) -> list[Any]:
        self._liveness.expired(now)
        return super()._tick(now)


class HoldsNoFailure(CoordinatorMachine):
    """A failure is decided before the other members have responded."""

    def _hold(self, now: float, _rounds: Rounds, status: Status) -> list[View | Ack]:
        return self._status(now, status, "", status.id)


class DeposedLeadersWrite(EtcdSession):
    """A leader writes whatever it decided, though another leads."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.leadership.__class__ = Unfenced


class Unfenced(Leadership):
    def _fence(self) -> tuple[Compare, ...]:
        return ()


class NobodyIsToldAgain(EtcdSession):
    """Whoever takes over assumes that all have got their views."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.leadership.__class__ = Trusting


class Trusting(Leadership):
    def _begin(self, now: float, answer: TxnDone, record: JobRecord | None) -> list[LeaderEffect]:
        job, call, nodes, _views = answer.results
        shown = tuple(
            KeyValue(key=self._keys.view(*peer), value=pack(TOLD))
            for one in nodes
            if (peer := self._keys.peer_of(one.key))
        )
        results = (job, call, nodes, shown)
        return super()._begin(now, msgspec.structs.replace(answer, results=results), record)


TOLD = View(run_id="any", node="any", incarnation=0, term=0, revision=2**50, role=NodeRole.WAITING)


class NobodyLeadsAgain(EtcdSession):
    """A leader that is gone has no successor among those who were there."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.leadership.election.__class__ = NotInterested


class NotInterested(Election):
    def _leader_changed(self, change: Change) -> list[ElectionEffect]:
        return []


class SilenceIsRefusal(EtcdSession):
    """An agent that does not answer, after its connection broke, is taken for ended."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.witness.__class__ = Impatient


class Impatient(Witness):
    def _unknown(self, now: float, watch: _Watch) -> list[WitnessEffect]:
        is_checked = watch.state is WatchState.CHECKING
        return self._refused(now, watch) if is_checked else super()._unknown(now, watch)


class AnyRefusalCounts(EtcdSession):
    """An agent is taken for ended because some host refuses where it was never seen."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.witness.__class__ = Gullible


class Gullible(Witness):
    def _refused(self, now: float, watch: _Watch) -> list[WitnessEffect]:
        watch.state = WatchState.CHECKING
        return super()._refused(now, watch)


class ConflictsAreIgnored(SharedStateSession):
    """A node takes what it offered for stored, though another was faster."""

    def _handle(self, now: float, event: SessionEvent) -> list[SessionEffect]:
        return super()._handle(now, StateWritten() if isinstance(event, WriteConflict) else event)


class StandstillIsLife(SharedStateSession):
    """A counter that stands still is of no consequence."""

    def _apply(self, now: float, rounds: Rounds) -> bool:
        self._peers._lost.clear()
        return super()._apply(now, rounds)


class OldStatesCount(SharedStateSession):
    """The view of a state that is older than one already seen takes its place."""

    def _deliver(self, view: View) -> list[SessionEffect]:
        self._newest = (0, 0)
        return super()._deliver(view)
