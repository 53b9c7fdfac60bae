"""One simulated run: the event queue, the jobs and agents, the checkers, and the log.

All random numbers come from generators with the run's seed, and nothing depends on hash order or a real
clock: the same arguments give the same run, step by step, on any machine. `digest` is a hash of the times
of all events, to compare two runs.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.core.coordinator_machine import CoordinatorMachine
from holdfast.core.etcd.cluster import ClusterMember
from holdfast.core.etcd.etcd_session import EtcdSession
from holdfast.core.job_settings import JobSettings
from holdfast.core.machine import Step
from holdfast.core.phases import NodeRole
from holdfast.core.ranks import RankOrder
from holdfast.core.rounds import JobPhase, Rounds
from holdfast.core.session import Session, SessionTimeouts
from holdfast.core.shared_state import SharedStateSession
from holdfast.core.supervision import CoordinatedSupervision
from holdfast.core.values import Value
from holdfast.wire.frames import OutgoingParts
from simulator.backend_driver import SimBackendDriver
from simulator.checkers import (
    HOOKS,
    BudgetKept,
    Checker,
    ClosedIsFinal,
    CountersNeverDecrease,
    DrainedRests,
    EarlierCoordinatorIgnored,
    FencedStaysOut,
    FlappingDamped,
    GenerationGrows,
    JobEnds,
    LiveNodeKeepsId,
    LossIsNotCharged,
    NoNeedlessRestart,
    NoOlderWorkers,
    OneGenerationPerNode,
    OneRound,
    RanksAreUnique,
    RanksStable,
    RecordContinued,
    RequestAppliedOnce,
    RequestsAnswered,
    RoundForms,
    RoundFormsInTime,
    SameRound,
    SizeInBounds,
    SlowIsNotLost,
    StarvedIsNotLost,
    StuckNodeIsLost,
)
from simulator.etcd_driver import EtcdDriver
from simulator.faults import FaultInjector
from simulator.ledger import JobTruth, Ledger
from simulator.members_driver import MembersDriver
from simulator.simulated_coordinator import Coordinator
from simulator.simulated_network import Network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.core.protocol import Request, Status, View
    from holdfast.core.rounds import Job
    from holdfast.core.supervision import StopWorkers
    from simulator.agent import Agent
    from simulator.faults import Profile
    from simulator.ledger import Decider, RoundTruth


LOG_LINES_MAX = 1_000


class RunLog:
    """The last lines of a run, or all of them: events of the world, and the machines' steps.

    Lines are stored unformatted, which is fast, and formatted only when they are read.
    """

    def __init__(self, *, lines_max: int | None = LOG_LINES_MAX) -> None:
        self._lines: deque[tuple[float, object, str, object]] = deque(maxlen=lines_max)

    def note(self, now: float, who: object, what: str, about: object = None) -> None:
        """Add a line about an action of `who`; `about` replaces `{0}` in `what`."""
        self._lines.append((now, who, what, about))

    def lines(self) -> Iterator[str]:
        for now, who, what, about in self._lines:
            if isinstance(who, Step):
                yield f"{now:10.4f} s  {who}"
            else:
                text = what.format(about) if about is not None else what
                yield f"{now:10.4f} s  {who!s:<16}  {text}"


YIELDING_SHARE = 0.3  # The share of jobs whose nodes yield to agents with the same id.
SETTLED_S = 30.0  # How long after the last fault all jobs must run again.
END_S = 40.0  # How long after the end of the work all agents must have exited.
NODES_BEYOND = 2  # How many nodes more than requested a job may have.
ANOTHER_JOB_S = 20.0  # If a job ends this long before the faults do, another job starts.
RANK_ORDERS = (RankOrder.STABLE,) * 3 + (RankOrder.HOST, RankOrder.LABEL)
DIGEST_MASK = (1 << 61) - 1

JOB_LINE = (
    "{0[0]} is {0[2].phase.value}, round {0[2].round[1]}, generation {0[2].generation}, "
    "restarts {0[2].restarts}: {0[1]}"
)

CHECKERS: tuple[type[Checker], ...] = (
    OneRound,
    RanksAreUnique,
    SizeInBounds,
    SameRound,
    GenerationGrows,
    CountersNeverDecrease,
    RanksStable,
    OneGenerationPerNode,
    NoOlderWorkers,
    RecordContinued,
    BudgetKept,
    LossIsNotCharged,
    ClosedIsFinal,
    LiveNodeKeepsId,
    FencedStaysOut,
    EarlierCoordinatorIgnored,
    NoNeedlessRestart,
    StuckNodeIsLost,
    SlowIsNotLost,
    StarvedIsNotLost,
    FlappingDamped,
    RoundFormsInTime,
    RequestAppliedOnce,
    DrainedRests,
    RequestsAnswered,
    RoundForms,
    JobEnds,
)


def seeded(seed: int | str) -> Random:
    """Return a generator whose numbers are reproducible."""
    return Random(seed)  # noqa: S311 (reproducible on purpose)


class Machines(Value):
    """The machines under test; a test may replace them by broken ones."""

    coordinator: type[CoordinatorMachine] = CoordinatorMachine
    rounds: type[Rounds] = Rounds
    session: type[Session] = Session
    supervision: type[CoordinatedSupervision] = CoordinatedSupervision
    etcd_session: type[EtcdSession] = EtcdSession
    shared_state: type[SharedStateSession] = SharedStateSession
    cluster_member: type[ClusterMember] = ClusterMember
    parts: type[OutgoingParts] = OutgoingParts


class SimDriver(Protocol):
    """The process that decides for the jobs of a world, or the store of their states."""

    @property
    def alive(self) -> bool: ...
    @property
    def paused(self) -> bool: ...
    @property
    def host_up(self) -> bool: ...
    @property
    def keeps_state(self) -> bool:
        """Whether decisions survive the process that made them and all nodes that know them."""

    def job(self, run_id: str) -> Job | None:
        """Return the current state of a job, if it is known."""

    def knows_end_of(self, job: JobTruth) -> bool:
        """Return whether late nodes can learn that a job is over."""

    def new_agent(self, job: JobTruth, node: str, host: str, rng: Random) -> Agent:
        """Return an agent that uses this driver."""

    def cut(self, agent: Agent) -> None:
        """Handle the disconnection of an agent."""

    def die(self, *, host_too: bool) -> None: ...

    def restart_as(self, number: int, rng: Random) -> SimDriver:
        """Return the driver that starts at the endpoint after this one died."""

    def pause(self) -> None: ...

    def resume(self, _arg: object = None) -> None: ...


DRIVERS: dict[str, Callable[[World, Random], SimDriver]] = {
    "coordinator": lambda world, rng: Coordinator(world, 1, rng),
    "etcd": EtcdDriver,
    "backend": SimBackendDriver,
}


class World:
    """A run, from its start to its end."""

    def __init__(
        self,
        seed: int,
        *,
        nodes: int,
        seconds: float,
        profile: Profile,
        machines: Machines,
        log: RunLog,
        checkers: Sequence[type[Checker]] = CHECKERS,
        driver: str = "coordinator",
    ) -> None:
        self.driver = driver
        self.now = 0.0
        self.steps = 0
        self.digest = seed
        self.machines, self.profile = machines, profile
        self.timeouts = SessionTimeouts(unreachable_s=30.0)
        self.log = log
        self.ledger = Ledger()
        self.jobs: dict[str, JobTruth] = {}
        self.requests: dict[str, Request] = {}
        """All requests of the run, by id."""
        self.disturbed_at = 0.0
        self.coordinator_gone_at = 0.0
        self.agents_started = self.coordinators_started = 0
        self.faults_until_s = max(5.0, seconds - SETTLED_S - END_S)
        self.stopped = False
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self.size = self._nodes = nodes
        self._rng = seeded(f"{seed}/{profile.name}/world")
        self._manners = seeded(f"{seed}/{profile.name}/manners")
        self.network = Network(self, seeded(f"{seed}/{profile.name}/network"))
        fault_rng = seeded(f"{seed}/{profile.name}/chaos")
        self.faults = FaultInjector(self, profile, fault_rng, self.faults_until_s)
        self._watch([checker(self) for checker in checkers])
        self.coordinators_started += 1
        rng = seeded(self._rng.getrandbits(64))
        make = MembersDriver if driver == "etcd" and profile.has_members else DRIVERS[driver]
        self.coordinator: SimDriver = make(self, rng)
        self.replaced: list[Coordinator] = []
        """Coordinators that were alive when another one took over, and may still be."""

    def _watch(self, checkers: list[Checker]) -> None:
        """Collect the checkers' hooks; only overridden hooks are called."""
        self._hooks: dict[str, list[Callable[..., None]]] = {
            hook: [
                getattr(one, hook)
                for one in checkers
                if getattr(type(one), hook) is not getattr(Checker, hook)
            ]
            for hook in HOOKS
        }

    # Time.

    def schedule(self, at: float, what: Callable[[Any], None], arg: Any) -> None:
        self._count += 1
        heappush(self._heap, (at, self._count, what, arg))

    def begin(self) -> None:
        count = 2 if self._nodes >= 4 and self._rng.random() < 0.25 else 1
        for _ in range(count):
            self.start_job(self._nodes // count)
        self.faults.begin()
        self.schedule(self.faults_until_s, self.faults.end, None)

    def run(self, until_s: float) -> bool:
        """Run all events up to a time; return whether more events follow."""
        heap, digest = self._heap, self.digest
        while heap and not self.stopped:
            if heap[0][0] > until_s:
                self.now = until_s
                self.digest = digest
                return True
            at, _, what, arg = heappop(heap)
            self.now = at
            digest = (digest * 31 + hash(at)) & DIGEST_MASK
            what(arg)
        self.digest = digest
        return False

    # Jobs, agents and coordinators.

    def start_job(self, nodes: int) -> None:
        rng = self._rng
        max_nodes = max(1, nodes - rng.choice((0, 0, 1, 2)))
        min_nodes = max(1, rng.choice((max_nodes, max_nodes - 1, max_nodes // 2, 1)))
        settings = JobSettings(
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            max_restarts=rng.choice((0, 1, 3, 10, 1000, 1000)),
            spares=rng.choice((0, 0, 0, 1)),
            settle_s=rng.choice((1.0, 1.0, 0.2)),
            order=rng.choice(RANK_ORDERS),
        )
        finish_at = self.faults_until_s + SETTLED_S + 3.0 * rng.random()
        if rng.random() < 0.25:
            finish_at = self.now + (self.faults_until_s - self.now) * (0.2 + 0.8 * rng.random())
        self_fencing = self.driver == "etcd" or rng.random() < 0.5
        name = f"job-{len(self.jobs) + 1}"
        yields = self._manners.random() < YIELDING_SHARE
        job = JobTruth(name, settings, finish_at, self_fencing=self_fencing, yields=yields)
        self.jobs[job.run_id] = job
        self.note(job.run_id, "begins: {0}", settings)
        for _ in range(nodes):
            if self.faults.joins_at_start(job):
                self.start_agent(job, delay_s=rng.random() * 2.0)
        if finish_at >= self.faults_until_s + SETTLED_S:
            self._at_settled(job)
        over_at = max(finish_at, self.faults_until_s) + END_S
        for hook in self._hooks["over"]:
            self.schedule(over_at, hook, job)
        self.schedule(over_at, self._stop_if_last, job)

    def _stop_if_last(self, job: JobTruth) -> None:
        job.over = True
        self.stopped = all(each.over for each in self.jobs.values())

    def _at_settled(self, job: JobTruth) -> None:
        for hook in self._hooks["settled"]:
            self.schedule(self.faults_until_s + SETTLED_S, hook, job)

    def keep_busy(self) -> None:
        """Start another job if all are over and there is enough time."""
        over = all(job.closed_by or not job.living for job in self.jobs.values())
        if over and self.now < self.faults_until_s - ANOTHER_JOB_S:
            self.start_job(self._nodes)

    def job_of(self, run_id: str) -> JobTruth:
        return self.jobs[run_id]

    def has_room(self, job: JobTruth) -> bool:
        """Return whether another node may join a job, even one that is known to be over.

        If no process knows that the job is over, a new node would start another job with its run id.
        """
        if job.closed_by and not self.coordinator.knows_end_of(job):
            return False
        return len(job.living) < self._nodes + NODES_BEYOND

    def start_agent(
        self,
        job: JobTruth,
        node: str | None = None,
        host: str | None = None,
        *,
        delay_s: float = 0.0,
    ) -> None:
        """Start an agent, with the given node id and host, or with new ones."""
        if not self.has_room(job):
            return
        self.agents_started += 1
        rng = seeded(self._rng.getrandbits(64))
        number = str(self.agents_started)
        agent = self.coordinator.new_agent(job, node or f"n{number}", host or number, rng)
        self.faults.configure(agent)
        self.disturb()
        job.agents.append(agent)
        agent.after(delay_s, agent.begin)

    def new_incarnation(self, agent: Agent) -> int:
        """Return a new incarnation number for an agent."""
        incarnation = self._rng.getrandbits(48)
        self.ledger.agent_of[incarnation] = agent
        return incarnation

    def kill_coordinator(self, *, host_too: bool) -> None:
        self.coordinator_gone_at = self.now
        if host_too:
            self.disturb()  # Connection attempts hang, so nodes may reconnect too late.
        self.coordinator.die(host_too=host_too)

    def start_coordinator(self, _arg: object = None) -> None:
        """Start the successor of a dead coordinator at the endpoint."""
        if self.coordinator.alive:
            return
        self.coordinators_started += 1
        rng = seeded(self._rng.getrandbits(64))
        self.coordinator = self.coordinator.restart_as(self.coordinators_started, rng)
        for hook in self._hooks["coordinator_returned"]:
            hook()

    def take_over(self, _arg: object = None) -> None:
        """Let an operator start a coordinator at another endpoint, even if the earlier one is alive."""
        before = self.coordinator
        assert isinstance(before, Coordinator)
        self.disturb()  # Earlier events are handled only now, and nodes may reconnect too late.
        self.coordinators_started += 1
        rng = seeded(self._rng.getrandbits(64))
        if before.alive:
            self.replaced.append(before)
        number, endpoint_index = self.coordinators_started, before.endpoint_index + 1
        self.coordinator = Coordinator(
            self, number, rng, keeps_state=False, endpoint_index=endpoint_index
        )
        for hook in self._hooks["coordinator_returned"]:
            hook()

    def restart_replaced(self, old: Coordinator) -> Coordinator:
        """Restart a replaced coordinator at its endpoint, and return it."""
        old.die(host_too=False)
        self.coordinators_started += 1
        rng = seeded(self._rng.getrandbits(64))
        self.replaced.append(old.restart_as(self.coordinators_started, rng))
        return self.replaced[-1]

    def disturb(self) -> None:
        """Note a disturbance that may cause a restart."""
        self.disturbed_at = self.now

    # Observations.

    def note(self, who: object, what: str, about: object = None) -> None:
        self.log.note(self.now, who, what, about)

    def record(self, step: Step) -> None:
        self.log.note(self.now, step, "")

    def round_of_view(self, agent: Agent, view: View) -> RoundTruth | None:
        """Return the round of a view that an agent just received."""
        decider = agent.decider(view)
        return self.ledger.round_of(decider, view.run_id, view.round_term, view.round)

    def decided(self, coordinator: Decider, job: Job | None, status: Status | None) -> None:
        """Record the new state of a job, if it has changed."""
        if job is None:
            return
        decision = self.ledger.decide(coordinator, job, status)
        if decision is not None:
            before = decision.before
            if decision.after.phase is JobPhase.CLOSED and (
                before is None or before.phase is not JobPhase.CLOSED
            ):
                self.job_of(job.run_id).closed_by.add(coordinator.number)
            self.note(coordinator, JOB_LINE, (job.run_id, job.why, decision.after))
            for hook in self._hooks["decided"]:
                hook(decision)

    def view_sent(self, coordinator: Decider, view: View) -> None:
        for hook in self._hooks["view_sent"]:
            hook(coordinator, view)

    def view_received(self, agent: Agent, view: View) -> None:
        for hook in self._hooks["view_received"]:
            hook(agent, view)
        if view.role is NodeRole.MEMBER:
            agent.round = self.round_of_view(agent, view)

    def workers_starting(self, agent: Agent, generation: int) -> None:
        for hook in self._hooks["workers_starting"]:
            hook(agent, generation)

    def workers_stopping(self, agent: Agent, effect: StopWorkers) -> None:
        for hook in self._hooks["workers_stopping"]:
            hook(agent, effect)

    def worker_failed(self, agent: Agent, generation: int) -> None:
        self.disturb()
        agent.job.failed_generations.add((agent.info.incarnation, generation))
        for hook in self._hooks["worker_failed"]:
            hook(agent, generation)

    def agent_wedged(self, agent: Agent) -> None:
        for hook in self._hooks["agent_wedged"]:
            hook(agent)

    def agent_ended(self, agent: Agent) -> None:
        """Record that an agent exited by itself. If all have exited after the faults, the run ends."""
        self.disturb()
        for hook in self._hooks["agent_ended"]:
            hook(agent)
        if self.now > self.faults_until_s:
            self.stopped = not any(one.alive for each in self.jobs.values() for one in each.agents)
            if self.stopped:
                for each in self.jobs.values():
                    for hook in self._hooks["over"]:
                        hook(each)
