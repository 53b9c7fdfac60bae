"""A simulated agent: its session and its supervision, joined as the real agent joins them.

It performs the effects of both machines in order and brings the outcomes back as events. Its
workers take their time to start, run, fail and stop. They run until their job's work is done
(`JobTruth.finish_at`), all at about the same time, as the workers of a real job do. Why one fails
is for `sim.faults`.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.coordinated_supervision import (
    CoordinatorLost,
    Rejoin,
    ReportStatus,
    ViewReceived,
)
from holdfast.core.machine import TICK
from holdfast.core.protocol import Ack, Failure, NodeInfo, NodePhase
from holdfast.core.session import (
    Connect,
    Connected,
    DeliverView,
    Disconnect,
    Disconnected,
    GiveUp,
    LoopResumed,
    LoopStuck,
    Rejoined,
    RequestMade,
    Send,
    StatusChanged,
)
from holdfast.core.supervision import (
    Begun,
    Finish,
    KillWorkers,
    SignalReceived,
    StartWorkers,
    StopWorkers,
    WorkerExited,
    WorkersExpired,
    WorkersStarted,
    WorkersStopped,
    WorkersUnhealthy,
)
from simulator.process import Process

if TYPE_CHECKING:
    from random import Random

    from holdfast.core.machine import Effect, Event
    from holdfast.core.protocol import Heartbeat, Request, Status, View
    from holdfast.core.session import SessionEffect, SessionEvent
    from holdfast.core.supervision import Outcome
    from simulator.ledger import Decider, JobTruth, RoundTruth
    from simulator.network import Link
    from simulator.world import World


START_S = (0.05, 0.5)
SLOW_START_S = (1.0, 4.0)
STOP_S = (0.01, 0.3)
SLOW_STOP_S = (1.0, 5.0)
SLOW_SHARE = 0.1
LAST_STEP_S = (0.0, 0.8)
STUCK_S = 5.0  # A loop that does not turn for so long is found to be stuck.


class Workers:
    """The workers of at most one generation."""

    def __init__(self, agent: Agent, count: int, rng: Random) -> None:
        self.there = False
        """Whether any process of a generation is there, starting and stopping ones included."""
        self.running: list[int] = []
        self.generation = -1
        self.done_generation = -1
        """The last generation that was done with success on this node."""
        self._agent = agent
        self._count = count
        self._rng = rng
        self._stopping = False
        self._started_generation = -1
        self._expired = False

    def start(self, generation: int, cause: str) -> None:
        self.there = True
        self._stopping = self._expired = False
        self.generation = generation
        self.running = []
        self._agent.after(self._takes(START_S, SLOW_START_S), self._started, (generation, cause))

    def _started(self, which: tuple[int, str]) -> None:
        generation, cause = which
        if generation != self.generation:
            return
        agent = self._agent
        self._started_generation = generation
        self.running = [] if self._expired else list(range(self._count))
        agent.supervise(WorkersStarted(generation), cause)
        if self._expired:
            self._tell_expired(generation)
            return
        if self._stopping or not agent.alive:
            return
        left_s = max(0.0, agent.job.finish_at - agent.world.now)
        for local_rank in range(self._count):
            low, high = LAST_STEP_S
            takes = left_s + low + (high - low) * self._rng.random()
            agent.after(takes, self._succeeded, (generation, local_rank))

    def _succeeded(self, which: tuple[int, int]) -> None:
        generation, local_rank = which
        if generation != self.generation or local_rank not in self.running:
            return
        self.running.remove(local_rank)
        if not self.running and not self._stopping:
            self.done_generation = generation
            self._agent.world.note(self._agent, f"workers of generation {generation} are done")
        self._agent.supervise(WorkerExited(generation, local_rank, failed=False))

    def fail(self, which: tuple[int, bool, bool]) -> None:
        """Let one worker of a generation fail, or all of them hang."""
        generation, retryable, hangs = which
        if generation != self.generation or not self.running or self._stopping:
            return
        agent = self._agent
        local_rank = self.running[0]
        what = "hang" if hangs else "fail"
        agent.world.note(agent, f"workers {what} (retryable: {retryable})")
        agent.failure = Failure(
            node=agent.node,
            host=agent.host,
            rank=local_rank,
            exitcode=1,
            summary=f"a worker of {agent.node} failed",
            sudden=self._rng.random() < 0.3,
            retryable=retryable,
        )
        agent.world.worker_failed(agent, generation)
        if hangs:
            agent.supervise(WorkersUnhealthy(generation, "no progress", retryable=retryable))
            return
        self.running.remove(local_rank)
        agent.supervise(WorkerExited(generation, local_rank, failed=True, retryable=retryable))

    def expire(self) -> None:
        """Be killed by the keeper, whatever the agent does; it learns of it when it can."""
        self._agent.world.note(self._agent, "workers are killed, as nobody heard of it for long")
        self._agent.world.disturb()
        self.there = False
        self.running = []
        self._expired = True
        self._agent.after(0.0, self._tell_expired, self.generation)

    def _tell_expired(self, generation: int) -> None:
        if generation == self.generation == self._started_generation:
            self._agent.supervise(WorkersExpired(generation))

    def stop(self, generation: int, cause: str) -> None:
        self._stopping = True
        takes = self._takes(STOP_S, SLOW_STOP_S) if self.running else STOP_S[0]
        self._agent.after(takes, self._stopped, (generation, cause))

    def kill(self, generation: int, cause: str) -> None:
        self._agent.after(STOP_S[0], self._stopped, (generation, cause))

    def _stopped(self, which: tuple[int, str]) -> None:
        generation, cause = which
        if generation != self.generation or not (self.there or self._expired):
            return  # They were killed before their time was over.
        self.there = self._expired = False
        self.running = []
        self._agent.supervise(WorkersStopped(generation, 0), cause)

    def vanish(self) -> None:
        """Be gone, as after the agent's own end."""
        self.there = False
        self.running = []
        self.generation = -2

    def _takes(self, usual: tuple[float, float], slow: tuple[float, float]) -> float:
        low, high = slow if self._rng.random() < SLOW_SHARE else usual
        return low + (high - low) * self._rng.random()


class Agent(Process):
    """One agent process, from its start to its end."""

    def __init__(self, world: World, job: JobTruth, node: str, host: str, rng: Random) -> None:
        super().__init__(world, node, rng)
        self.job = job
        self.node = node
        self.host = host
        self.address = f"10.0.0.{host}"
        self.link: Link | None = None
        self.cut_in = self.cut_out = False
        self.reached_since = -inf
        """When it was last cut off, if it is not any more."""
        self.apart: frozenset[Decider] = frozenset()
        """The coordinators to which there is no way, while there is one to others."""
        self.lag_s = 0.0
        self.bandwidth = 0.0
        """Bytes a second of its link, in each direction; 0: they take no time."""
        self.report_bytes = 0
        """How long its failure reports are; 0: a few words."""
        self.outcome: Outcome | None = None
        self.view: View | None = None
        self.round: RoundTruth | None = None
        """The round of its newest view as a member."""
        self.failure: Failure | None = None
        self.left = False
        self.joined_at = world.now
        """When it began, as whatever incarnation it is now."""
        self.wedged_at: float | None = None
        """Since when its loop does not turn, though its connection is served."""
        self._is_stuck = False
        self._unseen: list[tuple[Event, str]] = []
        self.superseded = False
        """Another agent was given its node id."""
        self._rng = rng
        world_size = rng.choice((1, 1, 2, 3))
        self.info = NodeInfo(
            node=node,
            incarnation=world.new_incarnation(self),
            role=rng.choice(("default", "default", "default", "reader")),
            local_world_size=world_size,
            host=host,
            label=f"rack-{rng.randrange(3)}",
            ports=(20_000, 20_001),
            self_fencing=job.self_fencing,
            yields=job.yields,
        )
        self.session = world.machines.session(
            self.clock,
            run_id=job.run_id,
            info=self.info,
            settings=job.settings,
            timeouts=msgspec.structs.replace(world.timeouts, needs_answers=job.self_fencing),
            draw=rng.random,
        )
        self.supervision = world.machines.supervision(
            local_world_size=world_size, max_restarts=job.settings.max_restarts
        )
        self.supervision.story.node = node
        self.workers = Workers(self, world_size, rng)

    @property
    def healthy(self) -> bool:
        """Whether it can do its part: it is there, goes on, and is reached."""
        is_held_up = self.paused or self.wedged_at is not None
        return self.alive and not (is_held_up or self.cut_off or self.left)

    @property
    def cut_off(self) -> bool:
        """Whether it cannot be heard, or cannot hear, though it goes on."""
        return self.cut_in or self.cut_out

    @property
    def stop_at(self) -> float | None:
        """When its workers must be gone, by its own clock."""
        return self.session.stop_at

    def see_deadline(self) -> None:
        """Let the keeper do what is due; before the agent can do anything."""
        if self.workers.there and (at := self.stop_at) is not None and self.clock >= at:
            self.workers.expire()

    # What happens to it.

    def begin(self, _arg: object = None) -> None:
        self.world.note(self, "starts (host {0.host}, {0.job.run_id})", self)
        self.supervise(Begun())
        self.arm(self.session.next_deadline(self.clock))

    def receive(self, parcel: tuple[Link, Ack | View]) -> None:
        """Take in a message of the coordinator; one by a link it has given up is refused."""
        link, message = parcel
        if self.paused:
            self._backlog.append((self.receive, parcel))
            return
        if self.link is not link:
            self.world.network.close_from_agent(link)
            return
        self.see_deadline()
        world = self.world
        world.steps += 1
        effects = self.session.handle(self.offset + world.now * self.rate, message)
        if effects:
            self._perform(effects)

    def tick(self) -> None:
        self.see_deadline()
        now = self.offset + self.world.now * self.rate
        effects = self.session.handle(now, TICK)
        if effects:
            self._perform(effects)
        if self.alive:
            self.arm(self.session.next_deadline(now))

    def link_opened(self, link: Link) -> None:
        """Take note that the link asked for is there; or that the other side is gone already."""
        if not link.coordinator.alive:
            self.link_failed("connection reset")
            return
        self.link = link
        self._session_event(Connected(place=link.coordinator.place))

    def link_failed(self, why: str) -> None:
        self._session_event(Disconnected(why))

    def link_lost(self, link: Link) -> None:
        """Take note that the other side closed a link."""
        if self.link is link:
            self.link = None
            self._session_event(Disconnected("connection reset"))

    def signalled(self, signum: int) -> None:
        self.left = True
        self.world.note(self, f"gets signal {signum}")
        self.supervise(SignalReceived(signum))

    @property
    def unanswered(self) -> Request | None:
        """What was asked for through it, and is not answered."""
        return self.session.status.request

    def ask(self, request: Request) -> None:
        """Pass on what somebody asks of the job through this node."""
        self.world.note(self, "is asked: {0}", request)
        self._session_event(RequestMade(request))

    def wedge(self) -> None:
        """Let its loop stand still, as behind a file system that does not answer."""
        self.wedged_at = self.world.now
        self.world.note(self, "is wedged: its loop does not turn")
        self.after(STUCK_S, self._find_stuck, self.wedged_at)
        self.world.agent_wedged(self)

    def _find_stuck(self, wedged_at: float) -> None:
        if self.wedged_at == wedged_at:
            self._is_stuck = True
            self._session_event(LoopStuck("its loop does not turn"))

    def unwedge(self, _arg: object = None) -> None:
        """Let its loop turn again, and see what has come meanwhile."""
        if self.wedged_at is None or not self.alive:
            return
        self.wedged_at = None
        self.world.note(self, "turns again")
        if self._is_stuck:
            self._is_stuck = False
            self._session_event(LoopResumed())
        unseen, self._unseen = self._unseen, []
        for event, cause in unseen:
            if self.alive:
                self.supervise(event, cause)

    def die(self, *, host_too: bool) -> None:
        """End without a word, and the workers with it."""
        self.world.note(self, "is gone, and its host with it" if host_too else "is killed")
        self.host_up = not host_too
        self._end()

    # The two machines.

    def _session_event(self, event: SessionEvent, cause: str = "") -> None:
        self.see_deadline()
        now = self.clock
        effects = self.session.handle(now, event, cause)
        if effects:
            self._perform(effects)
        if self.alive and type(event) is Disconnected:  # All else only puts its deadlines off.
            self.arm(self.session.next_deadline(now))

    def _perform(self, effects: list[SessionEffect]) -> None:
        cause = self.session.story.last
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                self._send(effect.message)  # type: ignore[union-attr]
            elif isinstance(effect, DeliverView):
                view = effect.view
                self.world.view_received(self, view)
                self.view = view
                self.supervise(ViewReceived(view), cause)
            elif isinstance(effect, Connect):
                self._open()
            elif isinstance(effect, Disconnect):
                self._drop()
            elif isinstance(effect, GiveUp):
                self.supervise(CoordinatorLost(effect.why), cause)
            if not self.alive:
                return

    # The link.

    def decider(self, _view: View) -> Decider:
        """Return who made a view that was just received."""
        assert self.link is not None
        return self.link.coordinator

    def _send(self, message: Status | Heartbeat) -> None:
        if self.link is not None:
            self.world.network.send_up(self.link, message)

    def _open(self) -> None:
        self.world.network.open(self)

    def _drop(self) -> None:
        if self.link is not None:
            self.world.network.close_from_agent(self.link)
            self.link = None

    # The workers' machine.

    def supervise(self, event: Event, cause: str = "") -> None:
        """Give the workers' machine an event, and do what it asks for."""
        if self.wedged_at is not None:
            if isinstance(event, ViewReceived):  # Only the newest is kept.
                kept = [one for one in self._unseen if not isinstance(one[0], ViewReceived)]
                self._unseen = [(event, cause), *kept]
            else:
                self._unseen.append((event, cause))
            return
        supervision = self.supervision
        effects = supervision.handle(self.clock, event, cause)
        supervision.check()
        cause = supervision.story.last
        for effect in effects:
            self._do(effect, cause)

    def _do(self, effect: Effect, cause: str) -> None:
        world = self.world
        if isinstance(effect, ReportStatus):
            self._session_event(self._status_change(effect), cause)
        elif isinstance(effect, StartWorkers):
            self.failure = None
            world.workers_starting(self, effect.generation)
            self.workers.start(effect.generation, cause)
        elif isinstance(effect, StopWorkers):
            world.workers_stopping(self, effect)
            self.workers.stop(effect.generation, cause)
        elif isinstance(effect, KillWorkers):
            self.workers.kill(effect.generation, cause)
        elif isinstance(effect, Rejoin):
            incarnation = world.new_incarnation(self)
            self.joined_at = world.now
            self.info = msgspec.structs.replace(self.info, incarnation=incarnation)
            self._session_event(Rejoined(incarnation), cause)
        elif isinstance(effect, Finish):
            self.outcome = effect.outcome
            world.note(self, "ends: {0.value}", effect.outcome)
            self._depart()

    def _status_change(self, effect: ReportStatus) -> StatusChanged:
        """Return what is reported, with the failure and, once all workers are gone, its report."""
        if effect.phase is not NodePhase.FAILED:
            return StatusChanged(effect.phase, effect.generation, clear=effect.clear)
        report = b"" if self.workers.there else f"report of {self.node}".encode()
        if report:
            report = report.ljust(self.report_bytes, b".")
        return StatusChanged(effect.phase, effect.generation, self.failure, report, effect.clear)

    def _depart(self) -> None:
        self._end()
        self.world.agent_ended(self)

    def _end(self) -> None:
        self.alive = False
        self.workers.vanish()
        self._drop()
