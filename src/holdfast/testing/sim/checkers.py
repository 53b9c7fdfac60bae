"""The invariants of a simulated run, each a checker: rounds, then jobs and nodes, then progress.

A checker overrides the hooks it needs and looks only at what they hand to it, so that a step
costs the same however long the run is. It keeps its own records; it never asks the machines under
test whether they are right. The invariants of progress have a bound in virtual seconds, counted
from when faults are over or the work is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from holdfast.core.protocol import JobOutcome, NodePhase, NodeRole
from holdfast.core.ranks import RankOrder
from holdfast.core.rounds import RECOVER_S_MAX, JobPhase
from holdfast.core.supervision import Outcome, State, StopReason

if TYPE_CHECKING:
    from holdfast.core.protocol import View
    from holdfast.core.supervision import StopWorkers
    from holdfast.testing.sim.agent import Agent
    from holdfast.testing.sim.ledger import Decider, Decision, JobTruth
    from holdfast.testing.sim.world import World


HOOKS = (
    "decided",
    "view_sent",
    "view_received",
    "workers_starting",
    "workers_stopping",
    "worker_failed",
    "agent_ended",
    "coordinator_returned",
    "settled",
    "over",
)


class Violation(Exception):
    """An invariant does not hold; what, when and where, in one line."""

    def __init__(self, invariant: str, what: str, at_s: float) -> None:
        super().__init__(f"{invariant}: {what} (at {at_s:.3f} s)")
        self.invariant = invariant
        self.what = what
        self.at_s = at_s


class Checker:
    """One invariant; the hooks do nothing unless overridden."""

    def __init__(self, world: World) -> None:
        self.world = world

    def violated(self, what: str) -> NoReturn:
        raise Violation(type(self).__name__, what, self.world.now)

    def decided(self, decision: Decision) -> None:
        """A coordinator changed the state of a job."""

    def view_sent(self, coordinator: Decider, view: View) -> None:
        """A coordinator sends a view."""

    def view_received(self, agent: Agent, view: View) -> None:
        """A node accepted a view; `agent.view` still has the one before."""

    def workers_starting(self, agent: Agent, generation: int) -> None:
        """A node is about to start its workers."""

    def workers_stopping(self, agent: Agent, effect: StopWorkers) -> None:
        """A node is about to stop its workers."""

    def worker_failed(self, agent: Agent, generation: int) -> None:
        """A worker failed, and its agent is about to learn of it."""

    def agent_ended(self, agent: Agent) -> None:
        """An agent ended of its own accord; `agent.outcome` has how."""

    def coordinator_returned(self) -> None:
        """Another coordinator came up on the endpoint."""

    def settled(self, job: JobTruth) -> None:
        """Faults are over for so long that all must run again."""

    def over(self, job: JobTruth) -> None:
        """The work was done for so long that all must have ended."""


class OneRound(Checker):
    """A job has one active round at a time, and a round once formed never changes.

    A coordinator that came back may carry a round on only if it is whole: all members, each of
    the same round and no other.
    """

    def decided(self, decision: Decision) -> None:
        truth = decision.truth
        if truth is None:
            return
        members = [(info.node, info.incarnation) for info in decision.job.members]
        if members != truth.members:
            self.violated(
                f"round {decision.after.round} of {decision.job.run_id} was formed with "
                f"{truth.members} and now has {members}"
            )
        if not decision.adopted:
            return
        for _node, incarnation in members:
            own = self.world.ledger.agent_of[incarnation].round
            if own is not truth:
                self.violated(f"{members} were carried on as one round and never were one")


class RankOnce(Checker):
    """No rank is held twice in a round, and no node has two."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._held: dict[tuple[int, int], dict[int, int]] = {}

    def decided(self, decision: Decision) -> None:
        nodes = [info.node for info in decision.job.members]
        if decision.after.phase is JobPhase.ACTIVE and len(set(nodes)) != len(nodes):
            self.violated(f"a node is twice in {nodes}")

    def view_received(self, agent: Agent, view: View) -> None:
        if view.role is not NodeRole.MEMBER:
            return
        truth = self.world.round_meant(agent, view)
        if truth is None:
            return
        held = self._held.setdefault((truth.number, view.generation), {})
        if held.setdefault(view.rank, view.incarnation) != view.incarnation:
            self.violated(f"rank {view.rank} of generation {view.generation} is held twice")


class SizeInBounds(Checker):
    """A round has between min and max nodes."""

    def decided(self, decision: Decision) -> None:
        settings = self.world.job_of(decision.job.run_id).settings
        if decision.after.phase is JobPhase.ACTIVE:
            size = len(decision.job.members)
            if not settings.min_nodes <= size <= settings.max_nodes:
                self.violated(f"a round of {size}, not {settings.min_nodes}:{settings.max_nodes}")


class SameRound(Checker):
    """All members of a round get the same round in their views, and nobody else does."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._told: dict[tuple[int, int], tuple[object, ...]] = {}

    def view_received(self, agent: Agent, view: View) -> None:
        if view.role is not NodeRole.MEMBER:
            return
        truth = self.world.round_meant(agent, view)
        if truth is None:
            self.violated(f"{agent.node} got a view of round {view.round}, which never was")
        here = truth.members[view.rank] if 0 <= view.rank < len(truth.members) else None
        if here != (view.node, view.incarnation):
            self.violated(f"{view.node} got rank {view.rank}, where {here} is")
        if (view.size, view.world_size) != (len(truth.members), truth.world_size):
            self.violated(f"{view.node} got a view of {view.size} nodes, {view.world_size} workers")
        shared = (view.size, view.world_size, view.master_addr, view.master_port)
        if self._told.setdefault((truth.number, view.generation), shared) != shared:
            self.violated(f"{view.node} got {shared}, which others did not")


class GenerationGrows(Checker):
    """Generations only grow: for the job with every round, for each node with every start."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._round_of: dict[tuple[int, str, int], int] = {}

    def decided(self, decision: Decision) -> None:
        before, after = decision.before, decision.after
        if before is not None:
            if after.generation < before.generation:
                self.violated(f"generation {after.generation} after {before.generation}")
            formed = after.phase is JobPhase.ACTIVE and not decision.adopted
            if formed and after.round != before.round and after.generation == before.generation:
                self.violated(f"round {after.round} reuses generation {after.generation}")
        if decision.truth is not None:
            key = (decision.coordinator.number, decision.job.run_id, after.generation)
            number = decision.truth.number
            if self._round_of.setdefault(key, number) != number:
                self.violated(f"two rounds have generation {after.generation}")

    def view_received(self, agent: Agent, view: View) -> None:
        last = agent.view
        if last is not None and view.role is NodeRole.MEMBER and last.role is NodeRole.MEMBER:
            newer = (view.term, view.revision) > (last.term, last.revision)
            if not newer or view.generation < last.generation:
                self.violated(
                    f"{agent.node} got generation {view.generation} (term {view.term}, "
                    f"revision {view.revision}) after {last.generation} ({last.term}, "
                    f"{last.revision})"
                )


class RanksStable(Checker):
    """Those who stay keep their order, and their ranks too if the round does not shrink."""

    def decided(self, decision: Decision) -> None:
        before, after = decision.before, decision.after
        if before is None or after.phase is not JobPhase.ACTIVE or after.members is before.members:
            return
        if decision.adopted or before.phase is JobPhase.RECOVERING:
            return
        if self.world.job_of(decision.job.run_id).settings.order is not RankOrder.STABLE:
            return
        old = {info.node: rank for rank, info in enumerate(before.members)}
        stayed = [
            (old[info.node], rank) for rank, info in enumerate(after.members) if info.node in old
        ]
        if stayed != sorted(stayed):
            self.violated(f"those who stayed changed their order: {stayed}")
        grown = len(after.members) >= len(before.members)
        if grown and any(was != now for was, now in stayed):
            self.violated(f"ranks changed in a round that has room for all: {stayed}")


STOPPED_AFTER_CLOSE_S = 12.0  # The slowest stop, after the slowest start.


class OneGenerationPerNode(Checker):
    """No worker runs on a node that has started a later generation, and none starts again."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._started: dict[Agent, int] = {}

    def workers_starting(self, agent: Agent, generation: int) -> None:
        if agent.workers.there:
            self.violated(
                f"{agent.node} starts generation {generation} while workers of "
                f"{agent.workers.generation} are there"
            )
        if self._started.get(agent, -1) >= generation:
            self.violated(f"{agent.node} starts generation {generation} again")
        self._started[agent] = generation


class BudgetKept(Checker):
    """A job has no more restarts than it may; each is charged, and nothing else is."""

    def decided(self, decision: Decision) -> None:
        before, after, status = decision.before, decision.after, decision.status
        limit = self.world.job_of(decision.job.run_id).settings.max_restarts
        if after.restarts > limit:
            self.violated(f"{after.restarts} restarts, and {limit} are allowed")
        if before is None or decision.adopted or before.phase is JobPhase.RECOVERING:
            return
        if after.nodes == 0 or before.nodes == 0:
            return  # A job that all have left begins anew.
        charged = after.restarts - before.restarts
        if status is not None and before.round[0] == 0:
            # It learns of what an earlier coordinator charged, and maybe of one failure since.
            failed_since = status.phase is NodePhase.FAILED and after.phase is not JobPhase.CLOSED
            if status.restarts + failed_since >= after.restarts:
                return
        failed = (
            status is not None
            and status.phase is NodePhase.FAILED
            and before.phase is JobPhase.ACTIVE
            and status.generation == before.generation
            and any(info.incarnation == status.info.incarnation for info in before.members)
        )
        if failed and after.phase is JobPhase.CLOSED:
            failed = False  # It was not answered with a restart.
        wanted = 1 if failed else 0  # Also where the next round still has to wait for nodes.
        if charged != wanted:
            self.violated(f"{charged} restarts were charged for {decision.job.why!r}, not {wanted}")


class ClosedIsFinal(Checker):
    """A job is closed for a reason that is true, and stays closed for as long as it is known."""

    def decided(self, decision: Decision) -> None:
        before, after = decision.before, decision.after
        if before is not None and before.phase is JobPhase.CLOSED:
            if after.phase is not JobPhase.CLOSED or after.outcome is not before.outcome:
                self.violated(f"{decision.job.run_id} was closed and is {after.phase.value} again")
            if after.generation != before.generation:
                self.violated(f"{decision.job.run_id} was closed and has a new generation")
        elif after.phase is JobPhase.CLOSED:
            self._closing(decision)

    def _closing(self, decision: Decision) -> None:
        job, truth = decision.job, self.world.job_of(decision.job.run_id)
        if job.outcome is JobOutcome.SUCCEEDED:
            for info in job.members:
                agent = self.world.ledger.agent_of[info.incarnation]
                if agent.workers.done_generation != job.generation:
                    self.violated(f"{job.run_id} succeeded, but {info.node} was not done")
        elif job.outcome is JobOutcome.FAILED:
            if not any(generation == job.generation for _, generation in truth.failed_generations):
                self.violated(f"{job.run_id} failed, but no worker did")
            retryable = job.failure is None or job.failure.retryable
            if retryable and job.restarts < truth.settings.max_restarts:
                self.violated(f"{job.run_id} failed with restarts left")
        else:
            self.violated(f"{job.run_id} was closed and nobody asked for it")

    def view_sent(self, coordinator: Decider, view: View) -> None:
        closed_by = self.world.job_of(view.run_id).closed_by
        if view.role is NodeRole.MEMBER and coordinator.number in closed_by:
            self.violated(f"{view.node} gets a view to run in {view.run_id}, which is closed")

    def view_received(self, agent: Agent, view: View) -> None:
        if view.role is NodeRole.CLOSED and (
            agent.view is None or agent.view.role is not NodeRole.CLOSED
        ):
            agent.after(STOPPED_AFTER_CLOSE_S, self._stopped_by_now, agent)

    def _stopped_by_now(self, agent: Agent) -> None:
        if agent.workers.there:
            self.violated(f"{agent.node} has workers long after it learned that all is over")


class FencedStaysOut(Checker):
    """An incarnation that the job went on without never comes back and never runs workers."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._out: dict[int, set[int]] = {}
        self._fenced: dict[int, int] = {}  # Incarnations, and the coordinator that decided so.

    def decided(self, decision: Decision) -> None:
        before, after = decision.before, decision.after
        out = self._out.setdefault(decision.coordinator.number, set())
        if before is not None:
            out |= before.incarnations - after.incarnations
        back = out & after.incarnations
        if back:
            nodes = sorted(self.world.ledger.agent_of[one].node for one in back)
            self.violated(f"{', '.join(nodes)} is in the job again after it was out")

    def view_received(self, agent: Agent, view: View) -> None:
        by = agent.decider(view).number
        if view.role in (NodeRole.FENCED, NodeRole.REFUSED):
            self._fenced[view.incarnation] = by
        elif self._fenced.get(view.incarnation, by) != by:
            del self._fenced[view.incarnation]

    def workers_starting(self, agent: Agent, generation: int) -> None:
        if agent.info.incarnation in self._fenced:
            self.violated(f"{agent.node} was fenced and starts generation {generation}")


CALM_BEFORE_S = 15.0  # What is still going on from an earlier disturbance is over by then.


class NoNeedlessRestart(Checker):
    """A coordinator that comes back, and all nodes with it in time, restarts no worker."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._watch_until = 0.0
        self._calm_since = 0.0

    def coordinator_returned(self) -> None:
        world = self.world
        calm = world.coordinator_gone_at - world.disturbed_at > CALM_BEFORE_S
        if calm and not world.network.conditions.rough and not self._misses_a_member():
            self._watch_until = world.now + RECOVER_S_MAX + 2.0
            self._calm_since = world.disturbed_at

    def workers_stopping(self, agent: Agent, effect: StopWorkers) -> None:
        world = self.world
        if effect.reason is not StopReason.COORDINATOR or world.now >= self._watch_until:
            return
        closed = agent.view is not None and agent.view.role is NodeRole.CLOSED
        if world.disturbed_at == self._calm_since and not closed:
            self.violated(f"{agent.node} restarts its workers because the coordinator did")

    def _misses_a_member(self) -> bool:
        """Whether a member died of which nobody knows: an etcd that restarts renews all leases."""
        for job in self.world.jobs.values():
            known = self.world.coordinator.job(job.run_id)
            living = {agent.node for agent in job.living}
            if known is not None and any(info.node not in living for info in known.members):
                return True
        return False


class RoundForms(Checker):
    """With faults over and at least min healthy nodes, all of them run soon.

    Those that may run do: spares are used where nodes are missing.
    """

    def settled(self, job: JobTruth) -> None:
        known = self.world.coordinator.job(job.run_id)
        living = job.living
        settings = job.settings
        if len(living) < settings.min_nodes or job.closed_by:
            return
        if known is None or known.phase is not JobPhase.ACTIVE:
            phase = "unknown" if known is None else known.phase.value
            self.violated(f"{job.run_id} is {phase} though {len(living)} nodes are there")
        names = {agent.node for agent in living}
        members = [info.node for info in known.members]
        missing = [node for node in members if node not in names]
        if missing:
            self.violated(f"{missing} are in the round of {job.run_id} and gone")
        wanted = min(settings.max_nodes, max(settings.min_nodes, len(names) - settings.spares))
        if len(members) < wanted:
            self.violated(f"{len(members)} nodes of {len(names)} run, {wanted} could")
        generation = known.generation
        for agent in living:
            if agent.node in members:
                running = agent.supervision.state in (State.RUNNING, State.LEAVING)
                if not running or agent.supervision.generation != generation:
                    self.violated(
                        f"{agent.node} is {agent.supervision.state.value} in generation "
                        f"{agent.supervision.generation}, not running in {generation}"
                    )


class JobEnds(Checker):
    """When the work is done, every node ends, and all that ended with the job ended alike."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._ended: dict[tuple[str, int], tuple[Outcome, str]] = {}
        self._closed_to: dict[Agent, int] = {}

    def view_received(self, agent: Agent, view: View) -> None:
        if view.role is NodeRole.CLOSED:
            self._closed_to[agent] = agent.decider(view).number

    def agent_ended(self, agent: Agent) -> None:
        by = self._closed_to.get(agent)
        outcome = agent.outcome
        if by is None or outcome not in (Outcome.SUCCEEDED, Outcome.FAILED):
            return
        first, node = self._ended.setdefault((agent.job.run_id, by), (outcome, agent.node))
        if first is not outcome:
            self.violated(f"{agent.node} ended {outcome.value}, but {node} {first.value}")

    def over(self, job: JobTruth) -> None:
        """See that all have ended, but for those who can no longer learn of it.

        A coordinator that closed a job and died takes the news with it; nodes that had not heard
        of it wait for others (in production, until `join_timeout`).
        """
        if job.closed_by and not self.world.coordinator.knows_end_of(job):
            return
        left = [agent.node for agent in job.agents if agent.alive]
        if left:
            self.violated(f"{left} of {job.run_id} have not ended")
        for agent in job.agents:
            if agent.outcome is Outcome.REFUSED and not job.closed_by and not agent.superseded:
                self.violated(f"{agent.node} was refused")
