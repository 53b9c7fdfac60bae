"""The invariants of a simulated run. Each is a checker: of rounds, of jobs and nodes, or of progress.

A checker overrides the hooks it needs and reads only their arguments, so that the cost of a step does
not grow with the run. It keeps its own records and does not rely on those of the machines under test.
An invariant of progress has a bound in virtual seconds, counted from the end of the faults or the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from holdfast.core.phases import JobOutcome, NodePhase, NodeRole
from holdfast.core.ranks import RankOrder
from holdfast.core.requests import Action
from holdfast.core.rounds import RECOVER_S_MAX, JobPhase, is_eligible
from holdfast.core.supervision import Outcome, State, StopReason
from simulator.simulated_coordinator import Coordinator

if TYPE_CHECKING:
    from holdfast.core.protocol import View
    from holdfast.core.rounds import Job
    from holdfast.core.supervision import StopWorkers
    from simulator.agent import Agent
    from simulator.ledger import Decider, Decision, JobTruth
    from simulator.world import World


HOOKS = (
    "decided",
    "view_sent",
    "view_received",
    "workers_starting",
    "workers_stopping",
    "worker_failed",
    "agent_ended",
    "agent_wedged",
    "coordinator_returned",
    "settled",
    "over",
)


class Violation(Exception):
    """An invariant does not hold. The message has one line: the invariant, what happened, and when."""

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
        """A node accepted a view; `agent.view` is still the previous one."""

    def workers_starting(self, agent: Agent, generation: int) -> None:
        """A node is about to start its workers."""

    def workers_stopping(self, agent: Agent, effect: StopWorkers) -> None:
        """A node is about to stop its workers."""

    def worker_failed(self, agent: Agent, generation: int) -> None:
        """A worker failed, and its agent is about to learn of it."""

    def agent_ended(self, agent: Agent) -> None:
        """An agent exited by itself; `agent.outcome` says why."""

    def agent_wedged(self, agent: Agent) -> None:
        """An agent's loop is stuck from now on."""

    def coordinator_returned(self) -> None:
        """Another coordinator started at the endpoint."""

    def settled(self, job: JobTruth) -> None:
        """Faults ended long enough ago that every job must run again."""

    def over(self, job: JobTruth) -> None:
        """The work ended long enough ago that every agent must have ended."""


class OneRound(Checker):
    """A job has one active round at a time, and a formed round never changes.

    A coordinator that recovers may resume a round only if it is complete: all members returned,
    each from that round.
    """

    def decided(self, decision: Decision) -> None:
        truth = decision.truth
        if truth is None or decision.coordinator in self.world.replaced:
            return  # A replaced coordinator decides from outdated statuses.
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
                self.violated(f"{members} were resumed as one round but never formed one")


class RanksAreUnique(Checker):
    """In a round no two nodes have the same rank, and no node has two ranks."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._held: dict[tuple[int, int], dict[int, int]] = {}

    def decided(self, decision: Decision) -> None:
        nodes = [info.node for info in decision.job.members]
        if decision.after.phase is JobPhase.ACTIVE and len(set(nodes)) != len(nodes):
            self.violated(f"a node appears twice in {nodes}")

    def view_received(self, agent: Agent, view: View) -> None:
        if view.role is not NodeRole.MEMBER:
            return
        truth = self.world.round_of_view(agent, view)
        if truth is None:
            return
        held = self._held.setdefault((truth.number, view.generation), {})
        if held.setdefault(view.rank, view.incarnation) != view.incarnation:
            self.violated(f"two nodes have rank {view.rank} of generation {view.generation}")


class SizeInBounds(Checker):
    """A round has between min and max nodes."""

    def decided(self, decision: Decision) -> None:
        settings = self.world.job_of(decision.job.run_id).settings
        if decision.after.phase is JobPhase.ACTIVE:
            size = len(decision.job.members)
            if not settings.min_nodes <= size <= settings.max_nodes:
                self.violated(f"a round of {size}, not {settings.min_nodes}:{settings.max_nodes}")


class SameRound(Checker):
    """The views of all members of a round describe the same round; no other node gets such a view."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._views: dict[tuple[int, int], tuple[object, ...]] = {}

    def view_received(self, agent: Agent, view: View) -> None:
        if view.role is not NodeRole.MEMBER:
            return
        truth = self.world.round_of_view(agent, view)
        if truth is None:
            self.violated(f"{agent.node} got a view of round {view.round}, which never existed")
        holder = truth.members[view.rank] if 0 <= view.rank < len(truth.members) else None
        if holder != (view.node, view.incarnation):
            self.violated(f"{view.node} got rank {view.rank}, which belongs to {holder}")
        if (view.size, view.world_size) != (len(truth.members), truth.world_size):
            self.violated(f"{view.node} got a view of {view.size} nodes, {view.world_size} workers")
        names = [one.node for one in view.members]
        if names and names != [node for node, _incarnation in truth.members]:
            self.violated(f"{view.node} got a view of {names}, not of {truth.members}")
        shared = (view.size, view.world_size, view.master_addr, view.master_port, view.members)
        if self._views.setdefault((truth.number, view.generation), shared) != shared:
            self.violated(f"{view.node} got {shared}, but other members did not")


class GenerationGrows(Checker):
    """Generations only increase: for the job with every round, for each node with every start."""

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


class CountersNeverDecrease(Checker):
    """For each run id, under any coordinator, every new generation has a higher fence than all earlier ones.

    If decisions survive their decider, generation, term and restarts never decrease. Otherwise they never
    fall below the values that a node of the job received. If all nodes leave, the restarts are reset.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._newest: dict[str, tuple[int, int, int]] = {}
        self._restarts: dict[str, int] = {}

    def decided(self, decision: Decision) -> None:
        run_id, before, after = decision.job.run_id, decision.before, decision.after
        term, generation, fence = self._newest.get(run_id, (0, -1, 0))
        started = before is not None and after.generation > before.generation
        if decision.coordinator in self.world.replaced:
            return  # Its decisions reach only nodes that its successor cannot reach.
        # If a store has lost its state and has no nodes, its next fence is from the clock of another host.
        counts = started and not decision.adopted and self.world.driver != "backend"
        if counts and after.phase is JobPhase.ACTIVE and after.fence <= fence:
            self.violated(f"{run_id} has fence {after.fence} after {fence}")
        if self.world.coordinator.keeps_state:
            if after.term < term or after.generation < generation:
                self.violated(
                    f"{run_id} is in generation {after.generation}, term {after.term} after "
                    f"{generation}, {term}"
                )
            self._check_restarts(run_id, decision)
        newest = max(term, after.term), max(generation, after.generation), max(fence, after.fence)
        self._newest[run_id] = newest

    def _check_restarts(self, run_id: str, decision: Decision) -> None:
        after = decision.after
        if after.nodes == 0 or after.restarts > self._restarts.get(run_id, 0):
            self._restarts[run_id] = after.restarts
        elif after.restarts < self._restarts.get(run_id, 0):
            self.violated(f"{run_id} has {after.restarts} restarts after {self._restarts[run_id]}")

    def view_received(self, agent: Agent, view: View) -> None:
        last = agent.view
        if last is None or view.role is not NodeRole.MEMBER:
            return
        if (view.generation, view.fence) < (last.generation, last.fence):
            self.violated(
                f"{agent.node} got generation {view.generation}, fence {view.fence} after "
                f"{last.generation}, {last.fence}"
            )

    def agent_ended(self, agent: Agent) -> None:
        if not agent.job.living:
            self._restarts.pop(agent.job.run_id, None)


class RanksStable(Checker):
    """Surviving members keep their order, and their ranks too if the round does not shrink."""

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
            self.violated(f"the order of the remaining members changed: {stayed}")
        grown = len(after.members) >= len(before.members)
        if grown and any(was != now for was, now in stayed):
            self.violated(f"ranks changed in a round that has room for all: {stayed}")


STOPPED_AFTER_CLOSE_S = 12.0  # The slowest stop, after the slowest start.
RECENTLY_CUT_OFF_S = (
    6.0  # The silence after which a node is lost, plus the difference between clocks.
)


class OneGenerationPerNode(Checker):
    """A node starts a generation only after older workers have exited, and at most once."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._started: dict[Agent, int] = {}

    def workers_starting(self, agent: Agent, generation: int) -> None:
        if agent.workers.exist:
            self.violated(
                f"{agent.node} starts generation {generation} while workers of "
                f"{agent.workers.generation} still run"
            )
        if self._started.get(agent, -1) >= generation:
            self.violated(f"{agent.node} starts generation {generation} again")
        self._started[agent] = generation


class NoOlderWorkers(Checker):
    """No worker starts while a worker of an earlier generation runs on any node.

    This ignores workers of nodes that the coordinator never knew, and workers of replaced coordinators. With
    `on_lost=run` it also ignores workers of lost nodes, even of nodes that had left the job before. It ignores
    those of a stopped node only if the node was disconnected when it was lost, or shortly before: the node
    does not know yet that it is lost. If a generation started beside such workers, its other members may start under
    a later coordinator, even if the node has reconnected to it.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._known: dict[int, set[int]] = {}  # Incarnations, by the coordinator that knows them.
        self._excused: dict[int, set[int]] = {}  # Lost incarnations that may still have workers.
        # Generations of replaced coordinators.
        self._started_by_replaced: set[tuple[str, int]] = set()
        # Incarnations beside whose workers a generation has started, by job and generation.
        self._beside: dict[tuple[str, int], set[int]] = {}

    def decided(self, decision: Decision) -> None:
        before, after = decision.before, decision.after
        if decision.coordinator in self.world.replaced:
            self._started_by_replaced.add((decision.job.run_id, after.generation))
        known = self._known.setdefault(decision.coordinator.number, set())
        known |= after.incarnations
        if before is not None and decision.status is None:
            excused = self._excused.setdefault(decision.coordinator.number, set())
            known_after = after.incarnations | after.departed
            for incarnation in (before.incarnations | before.departed) - known_after:
                agent = self.world.ledger.agent_of[incarnation]
                recently = self.world.now - agent.reached_since < RECENTLY_CUT_OFF_S
                if not agent.job.self_fencing and (not agent.paused or agent.cut_off or recently):
                    excused.add(incarnation)

    def workers_starting(self, agent: Agent, generation: int) -> None:
        assert agent.view is not None
        decider = agent.decider(agent.view)
        if (
            decider in self.world.replaced
            or (agent.job.run_id, generation) in self._started_by_replaced
        ):
            return  # A successor may continue the generation of a replaced coordinator.
        by = decider.number
        known, excused = self._known.get(by, set()), self._excused.get(by, set())
        beside = self._beside.setdefault((agent.job.run_id, generation), set())
        for other in agent.job.agents:
            other.enforce_deadline()
            workers, incarnation = other.workers, other.info.incarnation
            if other is agent or not workers.exist or workers.generation >= generation:
                continue
            if incarnation not in known or incarnation in excused:
                beside.add(incarnation)
            elif incarnation not in beside:
                self.violated(
                    f"{agent.node} starts generation {generation} while workers of generation "
                    f"{workers.generation} still run on {other.node}"
                )


CLOCKS_DIFFER = 0.98  # A clock may be this much faster than another one.


class RecordContinued(Checker):
    """A coordinator that finds the record of a job continues its generations, and waits for the members in it.

    It starts no workers beside those of a recorded member that has yet to reconnect, unless it waited for
    `RECOVER_S_MAX`, or as many nodes as the job can have joined.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._known: dict[int, set[int]] = {}  # Incarnations, by the coordinator that knows them.

    def decided(self, decision: Decision) -> None:
        coordinator, after = decision.coordinator, decision.after
        if isinstance(coordinator, Coordinator):
            self._known.setdefault(coordinator.number, set()).update(after.incarnations)
            found = coordinator.recalled.get(decision.job.run_id)
            if found is not None and after.generation < found[1].generation:
                self.violated(f"generation {after.generation} after {found[1].generation}")

    def workers_starting(self, agent: Agent, generation: int) -> None:
        assert agent.view is not None
        coordinator, job = agent.decider(agent.view), agent.job
        if not isinstance(coordinator, Coordinator) or job.run_id not in coordinator.recalled:
            return
        found_at, saved = coordinator.recalled[job.run_id]
        if self.world.now - found_at >= RECOVER_S_MAX * CLOCKS_DIFFER:
            return
        known = coordinator.job(job.run_id)
        if known is not None and len(known.nodes) >= job.settings.max_nodes:
            return
        for info in saved.members:
            if info.incarnation in self._known[coordinator.number]:
                continue
            other = self.world.ledger.agent_of[info.incarnation]
            other.enforce_deadline()
            is_same = other.info.incarnation == info.incarnation
            if is_same and other.workers.exist and other.workers.generation < generation:
                self.violated(
                    f"{agent.node} starts generation {generation} beside the workers of {other.node}, "
                    "which the record names"
                )


class BudgetKept(Checker):
    """A job stays within its restart budget; every restart is charged, and nothing else is."""

    def decided(self, decision: Decision) -> None:
        before, after, status = decision.before, decision.after, decision.status
        limit = self.world.job_of(decision.job.run_id).settings.max_restarts
        if after.restarts > limit:
            self.violated(f"{after.restarts} restarts, but only {limit} are allowed")
        if before is None or decision.adopted or before.phase is JobPhase.RECOVERING:
            return
        if after.nodes == 0 or before.nodes == 0:
            return  # After all nodes have left, the job's budget is reset.
        charged = after.restarts - before.restarts
        joins = status is not None and status.info.incarnation not in before.incarnations
        if status is not None and (before.round[0] == 0 or joins):
            # The status reports the restarts that an earlier coordinator charged, and at most one new failure.
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
            failed = False  # The failure ended the job without a restart.
        wanted = 1 if failed else 0  # Even if the next round has to wait for nodes.
        if charged != wanted:
            self.violated(f"{charged} restarts were charged for {decision.job.why!r}, not {wanted}")


class LossIsNotCharged(Checker):
    """If workers fail after a member of their round is lost, no restart is charged and no job ends.

    Over a backend no roll call is possible, so this does not hold there.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._excused: dict[tuple[str, int], bool] = {}

    def worker_failed(self, agent: Agent, generation: int) -> None:
        key = (agent.job.run_id, generation)
        self._excused[key] = self._excused.get(key, True) and self._misses_a_member(agent)

    def _misses_a_member(self, agent: Agent) -> bool:
        members = agent.round.members if agent.round is not None else ()
        others = (self.world.ledger.agent_of[incarnation] for _node, incarnation in members)
        return any(
            not other.alive
            and other.outcome is None
            and other.workers.done_generation != agent.workers.generation
            for other in others
        )

    def decided(self, decision: Decision) -> None:
        before, after = decision.before, decision.after
        if before is None or self.world.driver == "backend":
            return
        failed = after.outcome is JobOutcome.FAILED and before.outcome is None
        charged = after.restarts > before.restarts and before.phase is JobPhase.ACTIVE
        excused = self._excused.get((decision.job.run_id, before.generation), False)
        if excused and (failed or charged):
            self.violated(f"{decision.job.why!r} was charged, but a member was lost before")


class ClosedIsFinal(Checker):
    """A job closes only for a valid reason, and stays closed while any coordinator remembers it."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._closed_as: dict[tuple[int, str], tuple[int, int]] = {}  # Term and revision.
        self._stopped: set[str] = set()  # Jobs that a user requested to stop.

    def decided(self, decision: Decision) -> None:
        before, after = decision.before, decision.after
        if before is not None and before.phase is JobPhase.CLOSED:
            if after.phase is not JobPhase.CLOSED or after.outcome is not before.outcome:
                self.violated(f"{decision.job.run_id} was closed and is {after.phase.value} again")
            if after.generation != before.generation:
                self.violated(f"{decision.job.run_id} was closed and has a new generation")
        elif after.phase is JobPhase.CLOSED:
            key = (decision.coordinator.number, decision.job.run_id)
            self._closed_as[key] = (after.term, after.revision)
            self._closing(decision)

    def _closing(self, decision: Decision) -> None:
        if decision.coordinator in self.world.replaced:
            return  # A replaced coordinator decides from outdated statuses.
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
        elif not self._is_requested(job):
            self.violated(f"{job.run_id} was closed without a request")

    def _is_requested(self, job: Job) -> bool:
        request = self.world.requests.get(job.request)
        if request is not None and request.action == Action.STOP.value:
            self._stopped.add(job.run_id)
        return job.run_id in self._stopped  # A later coordinator may not know the request itself.

    def view_sent(self, coordinator: Decider, view: View) -> None:
        closed_as = self._closed_as.get((coordinator.number, view.run_id))
        newer = closed_as is not None and (view.term, view.revision) >= closed_as
        if view.role is NodeRole.MEMBER and newer:  # Several decisions may be sent together.
            self.violated(f"{view.node} gets a view to run in {view.run_id}, which is closed")

    def view_received(self, agent: Agent, view: View) -> None:
        if view.role is NodeRole.CLOSED and (
            agent.view is None or agent.view.role is not NodeRole.CLOSED
        ):
            due = self.world.now + STOPPED_AFTER_CLOSE_S
            agent.after(STOPPED_AFTER_CLOSE_S, self._stopped_by_now, (agent, due))

    def _stopped_by_now(self, about: tuple[Agent, float]) -> None:
        agent, due = about
        if not agent.workers.exist:
            return
        late_s = self.world.now - due
        if late_s > 0.001:  # The agent itself was paused until now.
            again = self.world.now + STOPPED_AFTER_CLOSE_S
            agent.after(STOPPED_AFTER_CLOSE_S, self._stopped_by_now, (agent, again))
        else:
            self.violated(f"{agent.node} has workers long after it learned that the job is over")


class LiveNodeKeepsId(Checker):
    """No node loses its id to another node with the same id, unless it yields."""

    def decided(self, decision: Decision) -> None:
        before, status = decision.before, decision.status
        if before is None or status is None:
            return
        gone = before.incarnations - decision.after.incarnations - {status.info.incarnation}
        for agent in (self.world.ledger.agent_of[one] for one in gone):
            if agent.alive and not agent.left and not agent.info.yields:
                self.violated(f"{agent.node} was removed by {status.info.node}'s status")


class FencedStaysOut(Checker):
    """A fenced incarnation never rejoins and never runs workers."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._out: dict[int, set[int]] = {}
        self._fenced: dict[int, int] = {}  # The coordinator that fenced it, by incarnation.

    def decided(self, decision: Decision) -> None:
        before, after = decision.before, decision.after
        out = self._out.setdefault(decision.coordinator.number, set())
        if before is not None:
            out |= before.incarnations - after.incarnations
        back = out & after.incarnations
        if back:
            nodes = sorted(self.world.ledger.agent_of[one].node for one in back)
            self.violated(f"{', '.join(nodes)} rejoined the job after it was removed")

    def view_received(self, agent: Agent, view: View) -> None:
        by = agent.decider(view).number
        if view.role in (NodeRole.FENCED, NodeRole.REFUSED):
            self._fenced[view.incarnation] = by
        elif self._fenced.get(view.incarnation, by) != by:
            del self._fenced[view.incarnation]

    def workers_starting(self, agent: Agent, generation: int) -> None:
        if agent.info.incarnation in self._fenced:
            self.violated(f"{agent.node} was fenced but starts generation {generation}")


class EarlierCoordinatorIgnored(Checker):
    """A node that obeyed a later coordinator never obeys an earlier one again, even if the later one is dead."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._places: dict[Agent, int] = {}

    def view_received(self, agent: Agent, view: View) -> None:
        endpoint_index = getattr(agent.decider(view), "endpoint_index", 0)
        latest = self._places.get(agent, 0)
        if endpoint_index < latest:
            self.violated(f"{agent.node} obeys endpoint {endpoint_index} after {latest}")
        if endpoint_index:
            self._places[agent] = endpoint_index


UNDISTURBED_S = 15.0  # The effects of an earlier disturbance last at most this long.


class NoNeedlessRestart(Checker):
    """If a coordinator returns and all nodes reconnect in time, no worker restarts."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._watch_until = 0.0
        self._undisturbed_since = 0.0

    def coordinator_returned(self) -> None:
        world = self.world
        undisturbed = world.coordinator_gone_at - world.disturbed_at > UNDISTURBED_S
        if undisturbed and not world.network.conditions.unreliable and not self._misses_a_member():
            self._watch_until = world.now + RECOVER_S_MAX + 2.0
            self._undisturbed_since = world.disturbed_at

    def workers_stopping(self, agent: Agent, effect: StopWorkers) -> None:
        world = self.world
        if effect.reason is not StopReason.GENERATION_CHANGED or world.now >= self._watch_until:
            return
        if agent.job.self_fencing:
            return  # Nodes that have no coordinator for long stop their workers and report this.
        closed = agent.view is not None and agent.view.role is NodeRole.CLOSED
        if world.disturbed_at == self._undisturbed_since and not closed:
            self.violated(f"{agent.node} restarts its workers because the coordinator did")

    def _misses_a_member(self) -> bool:
        """Whether a member has died unnoticed: an etcd that restarts renews all leases."""
        for job in self.world.jobs.values():
            known = self.world.coordinator.job(job.run_id)
            living = {agent.node for agent in job.living}
            if known is not None and any(info.node not in living for info in known.members):
                return True
        return False


WEDGED_S = 7.5  # The time until a loop counts as stuck, plus some time to propagate this.


class StuckNodeIsLost(Checker):
    """A node whose loop is stuck is soon removed from the round, though it is connected."""

    def agent_wedged(self, agent: Agent) -> None:
        world = self.world
        about = (agent, agent.wedged_at, world.disturbed_at)
        world.schedule(world.now + WEDGED_S, self._check_stuck, about)

    def _check_stuck(self, about: tuple[Agent, float, float]) -> None:
        agent, wedged_at, disturbed_at = about
        world = self.world
        undisturbed = world.disturbed_at == disturbed_at and not world.network.conditions.unreliable
        if not (
            undisturbed and agent.alive and agent.wedged_at == wedged_at and world.coordinator.alive
        ):
            return
        job = world.coordinator.job(agent.job.run_id)
        if job is None or job.phase is not JobPhase.ACTIVE or agent.node in job.succeeded:
            return
        if any(info.incarnation == agent.info.incarnation for info in job.members):
            self.violated(f"{agent.node} is in the round, but its loop is stuck")


class SlowIsNotLost(Checker):
    """A healthy, connected node behind a slow link is not removed from the job."""

    def decided(self, decision: Decision) -> None:
        before = decision.before
        if before is None or decision.after.phase is JobPhase.CLOSED:
            return
        for incarnation in before.incarnations - decision.after.incarnations:
            agent = self.world.ledger.agent_of[incarnation]
            is_same = agent.info.incarnation == incarnation and not agent.superseded
            if agent.bandwidth and agent.healthy and is_same and agent.outcome is None:
                self.violated(f"{agent.node} is healthy but was removed: {decision.job.why}")


class StarvedIsNotLost(Checker):
    """A connected node that asked for patience, because it gets little CPU, is not removed from the job."""

    def decided(self, decision: Decision) -> None:
        before = decision.before
        if before is None or decision.after.phase is JobPhase.CLOSED:
            return
        for incarnation in before.incarnations - decision.after.incarnations:
            agent = self.world.ledger.agent_of[incarnation]
            is_same = agent.info.incarnation == incarnation and not agent.superseded
            if agent.starved and is_same and agent.stop_extra_s and not agent.left:
                self.violated(f"{agent.node} is starved but was removed: {decision.job.why}")


class Departures:
    """How many rounds each host broke by leaving."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._times: dict[tuple[str, str], list[float]] = {}

    def note(self, decision: Decision) -> list[tuple[str, str]]:
        """Note a decision; return the jobs and hosts of members that left."""
        before, after, run_id = decision.before, decision.after, decision.job.run_id
        if not after.nodes:  # Without other nodes, a departure disturbs none.
            self._times = {key: at for key, at in self._times.items() if key[0] != run_id}
            return []
        if before is None or before.phase is not JobPhase.ACTIVE:
            return []
        gone = []
        for info in before.members:
            was_in = info.incarnation in before.incarnations
            if was_in and info.incarnation not in after.incarnations:
                gone.append((run_id, info.host))
                self._times.setdefault(gone[-1], []).append(self._world.now)
        return gone

    def of(self, which: tuple[str, str], since: float = 0.0) -> int:
        """Return how often members of a job on a host have left since a time."""
        return sum(at >= since for at in self._times.get(which, ()))


DAMPED_S = 60.0
DEPARTURES_MAX = {"coordinator": 8, "etcd": 22, "backend": 30}
"""Departures within `DAMPED_S`. The first two returns are immediate, the next ones wait 6, 12, 24 and
30 s. If a death is detected only after 5 s, as some are on etcd, further nodes of the same host may join
and die before that."""


class FlappingDamped(Checker):
    """A flapping node of a host breaks a round no more than a few times a minute."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._lives: dict[int, Departures] = {}  # A new coordinator has no history.

    def decided(self, decision: Decision) -> None:
        number = decision.coordinator.number
        departures = self._lives.setdefault(number, Departures(self.world))
        for run_id, host in departures.note(decision):
            times = departures.of((run_id, host), self.world.now - DAMPED_S)
            if times > DEPARTURES_MAX[self.world.driver]:
                self.violated(f"nodes of host {host} left {times} times in {DAMPED_S:g} s")


ATTENDED_S = 2.0  # After a longer time without a decision, the job may have no coordinator.
STARVED_SETTLES = 7
STARVED_S = 3.0


class RoundFormsInTime(Checker):
    """Enough nodes form a round soon, however many others join and leave meanwhile."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        # Term, last check, total.
        self._waits: dict[tuple[int, str], tuple[int, float, float]] = {}

    def decided(self, decision: Decision) -> None:
        now, after, job = self.world.now, decision.after, decision.job
        key = (decision.coordinator.number, job.run_id)
        term, checked_at, waited_s = self._waits.get(key, (-1, now, 0.0))
        settings = self.world.job_of(job.run_id).settings
        agents = (self.world.ledger.agent_of[one] for one in after.incarnations)
        eligible = sum(agent.alive and is_eligible(job, agent.node) for agent in agents)
        if (
            after.phase is not JobPhase.FORMING
            or eligible < settings.min_nodes
            or term != after.term
        ):
            waited_s = 0.0
        elif now - checked_at <= ATTENDED_S:
            waited_s += now - checked_at
        self._waits[key] = (after.term, now, waited_s)
        if waited_s > STARVED_SETTLES * settings.settle_s + STARVED_S:
            self.violated(
                f"{eligible} nodes of {job.run_id} have waited {waited_s:.1f} s for a round"
            )


class RequestAppliedOnce(Checker):
    """Each request is applied once, however often it is repeated."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._done: dict[tuple[int, str], int] = {}  # The generation, by decider and request.

    def decided(self, decision: Decision) -> None:
        before, after, job = decision.before, decision.after, decision.job
        request = self.world.requests.get(job.request)
        if before is None or request is None or job.why != str(request):
            return
        if after.generation > before.generation:
            key = (decision.coordinator.number, request.id)
            if self._done.setdefault(key, after.generation) != after.generation:
                self.violated(f"{request} led to a second generation, {after.generation}")


class DrainedRests(Checker):
    """After a coordinator drains a node, no generation of that coordinator includes the node until it is undrained."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._drained: dict[tuple[int, str], set[str]] = {}
        self._seen: dict[tuple[int, str], set[str]] = {}

    def decided(self, decision: Decision) -> None:
        before, after, job = decision.before, decision.after, decision.job
        key = (decision.coordinator.number, job.run_id)
        drained = self._drained.setdefault(key, set())
        seen = self._seen.setdefault(key, set())
        for one, answer in job.answers.items():
            request = self.world.requests[one]
            if one in seen or answer.refusal:
                continue
            seen.add(one)
            if request.action == Action.DRAIN.value:
                drained.add(request.node)
            elif request.action == Action.UNDRAIN.value:
                drained.discard(request.node)
        begun = before is not None and after.generation > before.generation
        if begun and after.phase is JobPhase.ACTIVE:
            wrong = [info.node for info in after.members if info.node in drained]
            if wrong:
                self.violated(f"{wrong} are drained but in generation {after.generation}")


class RequestsAnswered(Checker):
    """After the faults end, every node gets an answer to its request."""

    def settled(self, job: JobTruth) -> None:
        for agent in job.living:
            request = agent.unanswered
            if request is not None and not job.closed_by:
                self.violated(f"{agent.node} waits for an answer to {request}")


EXCLUDED_S = 35.0  # The longest delay before a flapping node may run again.


class RoundForms(Checker):
    """After the faults end, if at least min nodes are healthy, all of them soon run.

    Up to max nodes run, less the spares; spares replace missing nodes. Only nodes of hosts that flapped
    get more time.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._departures = Departures(world)

    def decided(self, decision: Decision) -> None:
        self._departures.note(decision)

    def _may_be_excluded(self, agent: Agent) -> bool:
        return (
            self.world.now - agent.joined_at < EXCLUDED_S
            and self._departures.of((agent.job.run_id, agent.host)) >= 2
        )

    def settled(self, job: JobTruth) -> None:
        known = self.world.coordinator.job(job.run_id)
        settings = job.settings
        living = [agent for agent in job.living if not self._may_be_excluded(agent)]
        if len(living) < settings.min_nodes or job.closed_by:
            return
        if known is None or known.phase is not JobPhase.ACTIVE:
            phase = "unknown" if known is None else known.phase.value
            self.violated(f"{job.run_id} is {phase} though {len(living)} nodes are alive")
        names = {agent.node for agent in living}
        alive = {agent.node for agent in job.living}
        members = [info.node for info in known.members]
        missing = [node for node in members if node not in alive]
        if missing:
            self.violated(f"{missing} are in the round of {job.run_id} but have exited")
        wanted = min(settings.max_nodes, max(settings.min_nodes, len(names) - settings.spares))
        if len(members) < wanted:
            self.violated(f"{len(members)} nodes of {len(names)} run, but {wanted} could")
        generation = known.generation
        for agent in job.living:
            if agent.node in members:
                running = agent.supervision.state in (State.RUNNING, State.LEAVING)
                if not running or agent.supervision.generation != generation:
                    self.violated(
                        f"{agent.node} is {agent.supervision.state.value} in generation "
                        f"{agent.supervision.generation}, not running in {generation}"
                    )


class JobEnds(Checker):
    """When the work is done, every agent exits, and all agents report the same outcome."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._ended: dict[tuple[str, int], tuple[Outcome, str]] = {}
        self._closed_to: dict[Agent, int] = {}
        self._succeeded: dict[str, int] = {}

    def decided(self, decision: Decision) -> None:
        job = decision.job
        if job.outcome is JobOutcome.SUCCEEDED:
            self._succeeded[job.run_id] = job.generation

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
        """Check that all agents have exited, except those that cannot learn the outcome.

        If a coordinator closes a job and dies, nodes that have not received the outcome wait for other
        nodes (in production, until `join_timeout`).
        """
        if job.closed_by and not self.world.coordinator.knows_end_of(job):
            return
        left = [agent.node for agent in job.agents if agent.alive]
        if left:
            self.violated(f"{left} of {job.run_id} have not exited")
        for agent in job.agents:
            done = agent.workers.done_generation == self._succeeded.get(job.run_id, -2)
            if done and agent.outcome is Outcome.COORDINATOR_LOST:
                self.violated(f"{agent.node} succeeded with the job but does not know it")
            if agent.outcome is Outcome.REFUSED and not job.closed_by and not agent.superseded:
                self.violated(f"{agent.node} was refused")
