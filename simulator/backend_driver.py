"""Simulated jobs with their state in a compare-and-set backend: the store and its agents.

The store does not lose, delay or repeat a write that it has acknowledged. Any other fault may hit a call:
the network loses the request or the response, or the store executes the request long after the caller
gave up. The store may freeze or exit. After a restart it has its state or, like a server without a disk, none.
In bad conditions, a read may return the previous state.

Only stored state counts. When the store executes a write, the driver therefore applies its changes again
to the previous state, one by one, and passes each result to the checkers. If the store lost the state of a job, the
job restarts with another `Life`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.core.machine import TICK
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import Status
from holdfast.core.rounds import Job, JobPhase, view_for_node
from holdfast.core.session import (
    DeliverView,
    GiveUp,
    LoopResumed,
    LoopStuck,
    Rejoined,
    RequestMade,
    StatusChanged,
)
from holdfast.core.shared_state import (
    CallFailed,
    ReadState,
    StateRead,
    StateWritten,
    Timeouts,
    WriteConflict,
    WriteState,
    decode,
)
from holdfast.core.supervision import Begun, CoordinatorLost, ViewReceived
from simulator.agent import Agent
from simulator.ledger import Life

if TYPE_CHECKING:
    from random import Random

    from holdfast.core.machine import Event
    from holdfast.core.protocol import Request, View
    from holdfast.core.rounds import Rounds
    from holdfast.core.session import SessionEvent as CoordinatorSessionEvent
    from holdfast.core.shared_state import SessionEffect, SessionEvent
    from simulator.ledger import Decider, JobTruth
    from simulator.world import World

CALL_TIMEOUT_S = 3.0
LATE_S_MAX = 10.0  # A request sent during a cut is executed within this time, or never.
FREEZE_S = (0.1, 4.0)
LOSES_STATE_SHARE = 0.5
STALE_S_MAX = 0.5  # How long after a write a read may return the previous state.
LEAVE_S = 2.0
READ_S = 0.25
TIMEOUTS = Timeouts(interval_s=1.0, lost_after_s=5.0, unreachable_s=30.0, read_s=READ_S)


class Stored:
    """A job's newest and previous state."""

    def __init__(self, life: Life, state: bytes, token: int, now: float) -> None:
        self.life = life
        self.state, self.token = state, token
        self.before: tuple[bytes, int] | None = None
        self.written_at = now

    def replace(self, state: bytes, now: float) -> None:
        """Store a new state."""
        self.before = (self.state, self.token)
        self.state, self.token, self.written_at = state, self.token + 1, now


class Call:
    """One call of an agent. A response after its timeout is ignored."""

    __slots__ = ("agent", "cause", "request")

    def __init__(self, agent: BackendAgent, request: ReadState | WriteState, cause: str) -> None:
        self.agent = agent
        self.request = request
        self.cause = cause


class SimBackendDriver:
    """A simulated compare-and-set store, with the jobs in it."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.alive = self.host_up = True
        self.paused = False
        self.keeps_state = False  # The store may restart without its state.
        self._rng = rng
        self._jobs: dict[str, Stored] = {}
        self._lives = 0
        self._frozen_until = 0.0

    # Queries by the world.

    def job(self, run_id: str) -> Job | None:
        """Return the stored state of a job."""
        stored = self._jobs.get(run_id)
        return decode(stored.state) if stored is not None else None

    def knows_end_of(self, job: JobTruth) -> bool:
        """Return whether the store still knows that a job is over."""
        stored = self._jobs.get(job.run_id)
        return stored is not None and stored.life.number in job.closed_by

    def new_agent(self, job: JobTruth, node: str, host: str, rng: Random) -> BackendAgent:
        """Return an agent that uses this store."""
        return BackendAgent(self.world, self, job, node, host, rng)

    # Faults of the store.

    def cut(self, agent: Agent) -> None:
        """Do nothing: the calls of an agent that is cut off fail."""

    def die(self, *, host_too: bool) -> None:
        """Stop the store."""
        self.world.note("store", "dies with its host" if host_too else "exits")
        self.alive, self.host_up = False, not host_too

    def restart_as(self, _number: int, _rng: Random) -> SimBackendDriver:
        """Restart the store, with its state or empty."""
        self.alive = self.host_up = True
        if self._rng.random() < LOSES_STATE_SHARE:
            self._jobs.clear()
            self.world.note("store", "restarts without its state")
        else:
            self.world.note("store", "restarts with its state")
        return self

    def pause(self) -> None:
        """Freeze: do not respond for a random time."""
        low, high = FREEZE_S
        self._frozen_until = self.world.now + low + (high - low) * self._rng.random()
        self.world.note("store", "freezes")

    def resume(self, _arg: object = None) -> None:
        """Do nothing: a freeze ends by itself."""

    # Calls.

    def send_request(self, call: Call) -> None:
        """Send a request. Its caller gets a response within `CALL_TIMEOUT_S` or times out."""
        agent, world, draw = call.agent, self.world, self._rng.random
        if not (agent.cut_out or agent.cut_in) and self.host_up and not self.alive:
            agent.after(2 * self._delay_s(agent), agent.failed, (call, "connection refused"))
            return
        agent.after(CALL_TIMEOUT_S, agent.failed, (call, "timed out"))
        if not self.host_up or draw() < world.network.conditions.loss:
            return
        if agent.cut_out:
            if draw() < 0.5:
                world.schedule(world.now + LATE_S_MAX * draw(), self._arrive_late, call)
            return
        world.schedule(world.now + self._delay_s(agent), self._execute, call)

    def _delay_s(self, agent: Agent) -> float:
        conditions, draw = self.world.network.conditions, self._rng.random
        return (conditions.delay_s + agent.lag_s) * (
            0.5 + draw()
        ) + conditions.jitter_s * draw() ** 6

    def _arrive_late(self, call: Call) -> None:
        if not call.agent.cut_out:
            self._execute(call)

    def _execute(self, call: Call) -> None:
        world, agent = self.world, call.agent
        if not self.alive:
            if self.host_up and not agent.cut_in:
                agent.after(self._delay_s(agent), agent.failed, (call, "connection reset"))
            return
        if world.now < self._frozen_until:
            world.schedule(self._frozen_until + 0.01 * self._rng.random(), self._execute, call)
            return
        stored = self._jobs.get(agent.job.run_id)
        answer: SessionEvent
        if isinstance(call.request, ReadState):
            answer = self._read(stored)
        else:
            answer = self._write(agent.job.run_id, stored, call.request)
        stored = self._jobs.get(agent.job.run_id)
        if agent.cut_in or self._rng.random() < world.network.conditions.loss:
            return
        life = stored.life if stored is not None else None
        agent.after(self._delay_s(agent), agent.answered, (call, answer, life))

    def _read(self, stored: Stored | None) -> StateRead:
        if stored is None:
            return StateRead(None, None)
        conditions, now = self.world.network.conditions, self.world.now
        is_fresh = now - stored.written_at < STALE_S_MAX
        if stored.before and is_fresh and self._rng.random() < conditions.reordering:
            return StateRead(*stored.before)
        return StateRead(stored.state, stored.token)

    def _write(
        self, run_id: str, stored: Stored | None, request: WriteState
    ) -> StateWritten | WriteConflict:
        if request.token != (stored.token if stored is not None else None):
            return WriteConflict()
        now = self.world.now
        if stored is not None:
            job = decode(stored.state)
        else:
            job = Job(run_id=run_id, fence_floor=decode(request.state).fence_floor)
        if stored is None:
            self._lives += 1
            life = Life("state", self._lives)
            self._jobs[run_id] = Stored(life, request.state, 1000 * self._lives, now)
        else:
            life = stored.life
            stored.replace(request.state, now)
        if request.changes:
            self._show(life, self.world.machines.rounds(job), request)
        return StateWritten()

    def _show(self, life: Life, rounds: Rounds, request: WriteState) -> None:
        for change in request.changes:
            rounds.handle(self.world.now, change)
            self.world.decided(life, rounds.job, change if isinstance(change, Status) else None)
        job = decode(request.state)
        self.world.decided(life, job, None)
        if job.phase is not JobPhase.RECOVERING:
            for node in job.nodes.values():
                self.world.view_sent(life, view_for_node(job, rounds.rank_table, node.info))


class BackendAgent(Agent):
    """One agent process, from its start to its end."""

    def __init__(
        self,
        world: World,
        store: SimBackendDriver,
        job: JobTruth,
        node: str,
        host: str,
        rng: Random,
    ) -> None:
        super().__init__(world, job, node, host, rng)
        self.info = msgspec.structs.replace(self.info, address=self.address)
        self._store = store
        self._call: Call | None = None
        self._life: Life | None = None
        self._is_leaving = False
        self.shared = world.machines.shared_state(
            self.clock,
            run_id=job.run_id,
            info=self.info,
            settings=job.settings,
            timeouts=msgspec.structs.replace(TIMEOUTS, needs_answers=job.self_fencing),
            draw=rng.random,
            fence_floor=int(world.now * 1000),
            rounds=world.machines.rounds,
        )

    @property
    def unanswered(self) -> Request | None:
        return self.shared.status.request

    @property
    def cut_off(self) -> bool:
        """Whether the agent is cut off, or its last write may not have reached the store."""
        return super().cut_off or self._call is not None

    @property
    def stop_extra_s(self) -> float:
        return 0.0

    @property
    def stop_at(self) -> float | None:
        """When its workers must have exited, by its own clock."""
        return self.shared.stop_at

    # Events.

    def begin(self, _arg: object = None) -> None:
        """Start the agent."""
        self.world.note(self, "starts (host {0.host}, {0.job.run_id})", self)
        self.supervise(Begun())

    def tick(self) -> None:
        """Handle a deadline."""
        self._feed(TICK)

    def answered(self, delivery: tuple[Call, SessionEvent, Life | None]) -> None:
        """Handle a response of the store, unless the call has timed out."""
        call, answer, life = delivery
        if call is self._call:
            self._call, self._life = None, life or self._life
            self._feed(answer, call.cause)

    def failed(self, delivery: tuple[Call, str]) -> None:
        """Handle a failed call."""
        call, why = delivery
        if call is self._call:
            self._call = None
            self._feed(CallFailed(why), call.cause)

    def supervise(self, event: Event, cause: str = "") -> None:
        """Pass an event to the supervision, unless this agent is leaving."""
        if not self._is_leaving:
            super().supervise(event, cause)

    # The session.

    def decider(self, _view: View) -> Decider:
        """Return the life of the job that the newest view belongs to."""
        assert self._life is not None
        return self._life

    def _session_event(self, event: CoordinatorSessionEvent, cause: str = "") -> None:
        assert isinstance(event, StatusChanged | Rejoined | RequestMade | LoopStuck | LoopResumed)
        self._feed(event, cause)

    def _feed(self, event: SessionEvent, cause: str = "") -> None:
        self.enforce_deadline()
        effects = self.shared.handle(self.clock, event, cause)
        cause = self.shared.story.last
        for effect in effects:
            self._perform_session_effect(effect, cause)
            if not self.alive:
                return
        if self._is_leaving and self._has_left():
            self._exit()
        else:
            self.arm(self.shared.next_deadline(self.clock))

    def _perform_session_effect(self, effect: SessionEffect, cause: str) -> None:
        match effect:
            case ReadState() | WriteState():
                self._call = Call(self, effect, cause)
                self._store.send_request(self._call)
            case DeliverView(view):
                self.world.view_received(self, view)
                self.view = view
                self.supervise(ViewReceived(view), cause)
            case GiveUp(_away_s, why):
                self.supervise(CoordinatorLost(why), cause)

    # Leaving.

    def _has_left(self) -> bool:
        session, view = self.shared, self.shared.view
        if view is not None and view.role in (NodeRole.FENCED, NodeRole.REFUSED, NodeRole.CLOSED):
            return True
        return session.stored_seq >= session.status.seq

    def _leave_job(self) -> None:
        """Report that the agent leaves before its process exits, as a real agent does."""
        self.left = self._is_leaving = True
        self.workers.remove_all()
        self.after(LEAVE_S, self._exit)
        self._feed(StatusChanged(NodePhase.LEAVING, self.shared.status.generation))

    def _exit(self, _arg: object = None) -> None:
        if self.alive:
            self._end()
            self.world.agent_ended(self)

    def _end(self) -> None:
        self.alive = False
        self.workers.remove_all()
