"""A simulated agent: its session and its supervision, connected as in a real agent.

It performs the effects of both machines in order and reports the outcomes as events. Its workers take time
to start and stop. They run until the work of their job is done (`JobTruth.finish_at`), all at about the
same time, like the workers of a real job. `simulator.faults` makes workers fail.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.machine import TICK
from holdfast.core.phases import NodePhase
from holdfast.core.protocol import Ack, Failure, NodeInfo
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
    CoordinatorLost,
    Finish,
    KillWorkers,
    Rejoin,
    ReportStatus,
    SignalReceived,
    StartWorkers,
    StopWorkers,
    SupervisionSettings,
    ViewReceived,
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
    from simulator.simulated_network import Link
    from simulator.world import World


START_S = (0.05, 0.5)
SLOW_START_S = (1.0, 4.0)
STOP_S = (0.01, 0.3)
SLOW_STOP_S = (1.0, 5.0)
SLOW_SHARE = 0.1
LAST_STEP_S = (0.0, 0.8)
STUCK_S = 5.0  # The time after which a loop that does not respond counts as stuck.


class SimWorkers:
    """The workers of at most one generation."""

    def __init__(self, agent: Agent, count: int, rng: Random) -> None:
        self.exist = False
        """Whether any worker process exists, including those that start or stop."""
        self.running: list[int] = []
        self.generation = -1
        self.done_generation = -1
        """The last generation whose workers all succeeded on this node."""
        self._agent = agent
        self._count = count
        self._rng = rng
        self._stopping = False
        self._started_generation = -1
        self._expired = False

    def start(self, generation: int, cause: str) -> None:
        self.exist = True
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
            self._report_expired(generation)
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
        """Let the keeper kill the workers. The agent learns of this once it can run."""
        self._agent.world.note(self._agent, "the keeper kills the workers at the stop deadline")
        self._agent.world.disturb()
        self.exist = False
        self.running = []
        self._expired = True
        self._agent.after(0.0, self._report_expired, self.generation)

    def _report_expired(self, generation: int) -> None:
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
        if generation != self.generation or not (self.exist or self._expired):
            return  # They were killed before the stop was over.
        self.exist = self._expired = False
        self.running = []
        self._agent.supervise(WorkersStopped(generation, 0), cause)

    def remove_all(self) -> None:
        """Remove all workers, because the agent exits."""
        self.exist = False
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
        """When its last disconnection ended; -inf if it was never disconnected."""
        self.apart: frozenset[Decider] = frozenset()
        """The coordinators that this agent cannot reach, although it may reach others."""
        self.lag_s = 0.0
        self.bandwidth = 0.0
        """The bandwidth of its link in bytes per second, in each direction; 0 for no limit."""
        self.report_bytes = 0
        """The size of its failure reports; 0 for a short text."""
        self.outcome: Outcome | None = None
        self.view: View | None = None
        self.round: RoundTruth | None = None
        """The round of its newest view as a member."""
        self.failure: Failure | None = None
        self.left = False
        self.joined_at = world.now
        """When its current incarnation joined."""
        self.wedged_at: float | None = None
        """When its loop began to hang, while its connection is still served; None if it does not hang."""
        self._is_stuck = False
        self.starved = False
        """Whether it gets little CPU; while it gets none, it is paused."""
        self._unseen: list[tuple[Event, str]] = []
        self.superseded = False
        """Whether another agent was started with its node id."""
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
            SupervisionSettings(exit_barrier_timeout=None),
            local_world_size=world_size,
            max_restarts=job.settings.max_restarts,
        )
        self.supervision.story.node = node
        self.workers = SimWorkers(self, world_size, rng)

    @property
    def healthy(self) -> bool:
        """Whether it is alive, running, connected and not leaving."""
        is_held_up = self.paused or self.wedged_at is not None
        return self.alive and not (is_held_up or self.cut_off or self.left)

    @property
    def cut_off(self) -> bool:
        """Whether it is disconnected in at least one direction."""
        return self.cut_in or self.cut_out

    @property
    def stop_at(self) -> float | None:
        """When its workers must have exited, by its own clock."""
        return self.session.stop_at

    @property
    def stop_extra_s(self) -> float:
        """How much later its workers may exit while it is starved."""
        return self.session.stop_extra_s

    def enforce_deadline(self) -> None:
        """Let the keeper kill the workers at the deadline, before the agent handles an event."""
        extra_s = self.stop_extra_s if self.starved else 0.0
        if self.workers.exist and (at := self.stop_at) is not None and self.clock >= at + extra_s:
            self.workers.expire()

    # Events.

    def begin(self, _arg: object = None) -> None:
        self.world.note(self, "starts (host {0.host}, {0.job.run_id})", self)
        self.supervise(Begun())
        self.arm(self.session.next_deadline(self.clock))

    def receive(self, delivery: tuple[Link, Ack | View]) -> None:
        """Handle a message of the coordinator. If this agent has given up the link, close it instead."""
        link, message = delivery
        if self.paused:
            self._backlog.append((self.receive, delivery))
            return
        if self.link is not link:
            self.world.network.close_from_agent(link)
            return
        self.enforce_deadline()
        world = self.world
        world.steps += 1
        effects = self.session.handle(self.offset + world.now * self.rate, message)
        if effects:
            self._perform(effects)

    def tick(self) -> None:
        self.enforce_deadline()
        now = self.offset + self.world.now * self.rate
        effects = self.session.handle(now, TICK)
        if effects:
            self._perform(effects)
        if self.alive:
            self.arm(self.session.next_deadline(now))

    def link_opened(self, link: Link) -> None:
        """Use a link that opened, unless the coordinator has died meanwhile."""
        if not link.coordinator.alive:
            self.link_failed("connection reset")
            return
        self.link = link
        self._session_event(Connected(endpoint_index=link.coordinator.endpoint_index))

    def link_failed(self, why: str) -> None:
        self._session_event(Disconnected(why))

    def link_lost(self, link: Link) -> None:
        """Handle the loss of a link that the other side closed."""
        if self.link is link:
            self.link = None
            self._session_event(Disconnected("connection reset"))

    def signalled(self, signum: int) -> None:
        self.left = True
        self.world.note(self, f"gets signal {signum}")
        self.supervise(SignalReceived(signum))

    @property
    def unanswered(self) -> Request | None:
        """The unanswered request that was sent through this node."""
        return self.session.status.request

    def send_request(self, request: Request) -> None:
        """Send an operator's request to the job through this node."""
        self.world.note(self, "receives a request: {0}", request)
        self._session_event(RequestMade(request))

    def wedge(self) -> None:
        """Let its loop hang, as in a file system that does not respond."""
        self.wedged_at = self.world.now
        self.world.note(self, "is wedged: its loop hangs")
        self.after(STUCK_S, self._find_stuck, self.wedged_at)
        self.world.agent_wedged(self)

    def _find_stuck(self, wedged_at: float) -> None:
        if self.wedged_at == wedged_at:
            self._is_stuck = True
            self._session_event(LoopStuck("its loop hangs"))

    def unwedge(self, _arg: object = None) -> None:
        """Resume its loop, which handles the events that arrived meanwhile."""
        if self.wedged_at is None or not self.alive:
            return
        self.wedged_at = None
        self.world.note(self, "its loop continues")
        if self._is_stuck:
            self._is_stuck = False
            self._session_event(LoopResumed())
        unseen, self._unseen = self._unseen, []
        for event, cause in unseen:
            if self.alive:
                self.supervise(event, cause)

    def die(self, *, host_too: bool) -> None:
        """Exit without a message, and the workers with it."""
        self.world.note(self, "dies with its host" if host_too else "is killed")
        self.host_up = not host_too
        self._end()

    # The two machines.

    def _session_event(self, event: SessionEvent, cause: str = "") -> None:
        self.enforce_deadline()
        now = self.clock
        effects = self.session.handle(now, event, cause)
        if effects:
            self._perform(effects)
        if self.alive and type(event) is Disconnected:  # Other events only postpone deadlines.
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
        """Return the decider of a view that was just received."""
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

    # The supervision.

    def supervise(self, event: Event, cause: str = "") -> None:
        """Pass an event to the supervision, and perform its effects."""
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
            self._leave_job()

    def _status_change(self, effect: ReportStatus) -> StatusChanged:
        """Return the change to report, with the failure and, once all workers have exited, its report."""
        if effect.phase is not NodePhase.FAILED:
            return StatusChanged(effect.phase, effect.generation, clear=effect.clear)
        report = b"" if self.workers.exist else f"report of {self.node}".encode()
        if report:
            report = report.ljust(self.report_bytes, b".")
        return StatusChanged(effect.phase, effect.generation, self.failure, report, effect.clear)

    def _leave_job(self) -> None:
        self._end()
        self.world.agent_ended(self)

    def _end(self) -> None:
        self.alive = False
        self.workers.remove_all()
        self._drop()
