"""Simulated jobs on etcd: agents with etcd sessions, and etcd with the jobs.

Any agent may become the leader of its job; `core.etcd.etcd_session` decides this. An agent that exits by
itself first hands over, like a real agent.

Only stored decisions count: the checkers get a leader's decisions when its transaction is performed, not
when it is sent or answered, because a leader may die in between. A job that restarts after all of its nodes
have left has another `Life`.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from holdfast.core.etcd.calls import (
    Answer,
    Get,
    KeysChanged,
    ReportUnreadable,
    Request,
    RequestAnswered,
    SendRequest,
    StartWatch,
    StopWatch,
    Txn,
    TxnDone,
    WatchEnded,
)
from holdfast.core.etcd.etcd_session import (
    DeliverMessage,
    DropRequested,
    LeaveRequested,
    MessageSubmitted,
    OpenRequested,
    ReportClosed,
    ReportLeft,
    ReportOpened,
)
from holdfast.core.etcd.keys import JobKeys, JobRecord, unpack
from holdfast.core.etcd.witness import ConnectPresence, DropPresence
from holdfast.core.machine import TICK
from holdfast.core.protocol import Status
from holdfast.core.session import Connected, Disconnected
from simulator.agent import Agent
from simulator.etcd_model import SimEtcd
from simulator.etcd_network import EtcdNetwork
from simulator.ledger import Life
from simulator.presences import Presences

if TYPE_CHECKING:
    from holdfast.core.etcd.calls import Answer, Change, Problem
    from holdfast.core.etcd.etcd_session import SessionEffect, SessionEvent
    from holdfast.core.etcd.leader import LeaderWrite, LedJob
    from holdfast.core.etcd.witness import ConnectionEvent
    from holdfast.core.machine import Event
    from holdfast.core.protocol import Heartbeat, View
    from holdfast.core.rounds import Job
    from simulator.ledger import Decider, JobTruth
    from simulator.world import World


PREFIX = "/sim"
LEASE_S = 5.0
LEAVE_S = 2.0
OPS_MAX = 4  # So low that a leader may die between two portions even in a small job.


class EtcdAgent(Agent):
    """One agent process, from its start to its end."""

    def __init__(
        self, world: World, driver: EtcdDriver, job: JobTruth, node: str, host: str, rng: Random
    ) -> None:
        super().__init__(world, job, node, host, rng)
        self._driver = driver
        self._is_leaving = False
        self.is_apart = False
        """Whether other agents cannot reach this one, although etcd can."""
        self.etcd_session = world.machines.etcd_session(
            run_id=job.run_id,
            info=self.info,
            prefix=PREFIX,
            lease_s=LEASE_S,
            presence=driver.presences.show(self),
            strict=True,
            rounds=world.machines.rounds,
        )
        self.etcd_session.address = self.address
        self.etcd_session.leadership.is_observed = True
        self.etcd_session.leadership.ops_max = OPS_MAX

    @property
    def leads(self) -> bool:
        """Whether this agent believes that it is the leader of its job."""
        return self.etcd_session.leadership.led is not None

    # Events.

    def tick(self) -> None:
        """Handle a deadline."""
        self.enforce_deadline()
        now = self.clock
        self._perform_etcd(self.etcd_session.handle(now, TICK))
        if self.alive and not self._is_leaving:
            self._perform(self.session.handle(now, TICK))
            if self.alive:
                self.arm(self.session.next_deadline(now))
        if self.alive:
            self.arm(self.etcd_session.next_deadline(now))

    def answered(self, delivery: tuple[int, Answer]) -> None:
        """Handle an answer of etcd."""
        self._etcd_event(RequestAnswered(*delivery))

    def changed(self, delivery: tuple[int, int, tuple[Change, ...]]) -> None:
        """Handle the changes of a watch."""
        number, _revision, changes = delivery
        self._etcd_event(KeysChanged(number, changes))

    def watch_ended(self, delivery: tuple[int, Problem]) -> None:
        """Handle the end of a watch."""
        self._etcd_event(WatchEnded(*delivery))

    def handle_presence(self, event: ConnectionEvent) -> None:
        """Handle an event of a presence connection."""
        self._etcd_event(event)

    def die(self, *, host_too: bool) -> None:
        """Exit without a message. The keeper kills the workers, unless the host dies too."""
        if host_too:
            super().die(host_too=True)
            return
        self.world.note(self, "is killed")
        self.alive = False
        self.world.schedule(
            self.world.now + self._driver.presences.keeper_s(), self._end_workers, None
        )
        self._driver.presences.end(self)

    def _end_workers(self, _arg: object) -> None:
        self._end()

    def supervise(self, event: Event, cause: str = "") -> None:
        """Pass an event to the supervision, unless this agent is leaving."""
        if not self._is_leaving:
            super().supervise(event, cause)

    # The session.

    def decider(self, view: View) -> Decider:
        """Return the decider of a view."""
        return self._driver.life_of(view)

    def _send(self, message: Status | Heartbeat) -> None:
        self._etcd_event(MessageSubmitted(message))

    def _open(self) -> None:
        self._etcd_event(OpenRequested())

    def _drop(self) -> None:
        self._etcd_event(DropRequested())

    def _etcd_event(self, event: SessionEvent) -> None:
        self.enforce_deadline()
        self._perform_etcd(self.etcd_session.handle(self.clock, event))

    def _perform_etcd(self, effects: list[SessionEffect]) -> None:
        network = self._driver.network
        for effect in effects:
            if not self.alive:
                return
            match effect:
                case SendRequest(number, request):
                    self._driver.expect(self.etcd_session.leadership.last_write, request)
                    network.send_request(self, number, request)
                case StartWatch(number, key, end, start_revision):
                    network.watch(self, number, key, end, start_revision)
                case StopWatch(number):
                    network.unwatch(self, number)
                case ConnectPresence(number, presence):
                    self._driver.presences.connect(self, number, presence)
                case DropPresence(number):
                    self._driver.presences.drop(self, number)
                case DeliverMessage(message):
                    if not self._is_leaving:
                        self._perform(self.session.handle(self.clock, message))
                case ReportOpened(confirmed_at):
                    self._session_event(Connected(confirmed_at))
                case ReportClosed(why, permanent):
                    self.world.note(self, "loses its session: {0}", why)
                    self._session_event(Disconnected(why, permanent))
                case ReportLeft():
                    self._exit()
                case ReportUnreadable():
                    raise AssertionError(f"no other program writes to this etcd: {effect}")
        if self.alive:
            self.arm(self.etcd_session.next_deadline(self.clock))

    def _leave_job(self) -> None:
        self.left = True
        self._is_leaving = True
        self.workers.remove_all()
        self.after(LEAVE_S, self._exit)
        self._etcd_event(LeaveRequested())

    def _exit(self, _arg: object = None) -> None:
        if self.alive:
            self._end()
            self.world.agent_ended(self)

    def _end(self) -> None:
        self.alive = False
        self.workers.remove_all()
        self._driver.presences.end(self)


FREEZE_S = (0.1, 3.0)


class EtcdDriver:
    """A simulated etcd, with the jobs on it."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.paused = False
        self.keeps_state = True
        self.etcd = SimEtcd()
        self.network = EtcdNetwork(world, self.etcd, rng)
        self.network.on_done = self._done
        self.presences = Presences(world, Random(rng.getrandbits(64)))  # noqa: S311 (a seed's own)
        self._expected: dict[int, LeaderWrite] = {}  # By the `id` of the transaction.
        self._lives = 0
        self._life_of_job: dict[str, Life] = {}
        self._life_of_lead: dict[LedJob, Life] = {}
        self._life_of_term: dict[tuple[str, int], Life] = {}

    @property
    def alive(self) -> bool:
        """Whether etcd responds."""
        return self.network.alive

    @property
    def host_up(self) -> bool:
        """Whether connections are refused, not ignored, while etcd is down."""
        return self.network.host_up

    # Queries by the world.

    def job(self, run_id: str) -> Job | None:
        """Return the stored state of a job."""
        answer = self.etcd.perform(self.world.now, Txn((), (Get(JobKeys(PREFIX, run_id).job),)))
        assert isinstance(answer, TxnDone)
        record = unpack(JobRecord, answer.results[0][0].value) if answer.results[0] else None
        return record.job if record is not None else None

    def knows_end_of(self, job: JobTruth) -> bool:
        """Return whether late nodes can learn that a job is over: etcd stores the outcome."""
        return bool(job.closed_by)

    def new_agent(self, job: JobTruth, node: str, host: str, rng: Random) -> EtcdAgent:
        """Return an agent that uses this etcd."""
        return EtcdAgent(self.world, self, job, node, host, rng)

    def life_of(self, view: View) -> Life:
        """Return the life of the job that a view belongs to."""
        return self._life_of_term[view.run_id, view.term]

    # Faults of etcd.

    def cut(self, agent: Agent) -> None:
        """Break the connections of an agent that was disconnected."""
        assert isinstance(agent, EtcdAgent)
        self.network.cut(agent)
        self.presences.cut(agent)

    def die(self, *, host_too: bool) -> None:
        """Stop all members."""
        self.network.stop(host_too=host_too)

    def restart_as(self, _number: int, _rng: Random) -> EtcdDriver:
        """Restart etcd with its data."""
        self.network.restart()
        return self

    def pause(self) -> None:
        """Change etcd's leader, which takes a while."""
        self.network.elect(FREEZE_S[1])

    def resume(self, _arg: object = None) -> None:
        """Do nothing: an election ends by itself."""

    def compact(self) -> None:
        """Compact the whole history."""
        self.world.note("etcd", "compacts its history")
        self.etcd.compact(self.etcd.revision)

    def fill(self) -> None:
        """Reject writes."""
        self.world.note("etcd", "has no space left")
        self.etcd.full = True

    def make_room(self, _arg: object = None) -> None:
        """Accept writes again."""
        self.etcd.full = False

    # Stored decisions.

    def expect(self, written: LeaderWrite | None, request: Request) -> None:
        """Note the decisions in a leader's transaction when it is sent."""
        if written is not None and written.txn is request:
            self._expected[id(request)] = written

    def _done(self, request: Request, answer: Answer) -> None:
        written = self._expected.pop(id(request), None)
        if written is None or not isinstance(answer, TxnDone) or not answer.succeeded:
            return
        life = self._life(written)
        for event, job in written.decisions:
            self._life_of_term[job.run_id, job.term] = life
            self.world.decided(life, job, event if isinstance(event, Status) else None)
        for view in written.views:
            # A refused node may know a higher term from another leader, and gets a view above it.
            self._life_of_term.setdefault((view.run_id, view.term), life)
            self.world.view_sent(life, view)

    def _life(self, written: LeaderWrite) -> Life:
        lead = written.led
        run_id = lead.job.run_id
        if lead not in self._life_of_lead:
            if lead.is_new or run_id not in self._life_of_job:
                self._lives += 1
                self._life_of_job[run_id] = Life("leader", self._lives)
            self._life_of_lead[lead] = self._life_of_job[run_id]
        return self._life_of_lead[lead]
