"""The network between simulated agents and their etcd, with delays, cuts and outages.

Every call gets exactly one answer within `CALL_S`, and calls may overtake each other. After the answer
`UNREACHABLE`, the request may still be performed: perhaps only its answer was lost, or TCP retransmits the
request after its caller gave up.

The events of a watch arrive in order and without a gap. A watch ends once, with a `Problem`, or when the
agent ends it; after that the agent gets no more events. All events are delivered with the agent's `after`,
so a paused agent gets them when it continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from holdfast.core.etcd.calls import Answer, Change, Grant, Problem, ProblemKind, Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from simulator.etcd_model import SimEtcd
    from simulator.world import World

CALL_S = 2.0  # The time limit of a call.
NOTICED_S = (0.5, 4.0)  # How long a dead connection may stay undetected.
REPEATED_S = (0.2, 1.0)  # The delay of a TCP retransmission.
LATE_SHARE = 0.25  # The share of requests sent during a cut that arrive if it ends within `LATE_S`.
LATE_S = 6.0
CATCH_UP_S = 0.1  # The interval at which watches that began in the past catch up.
LEASE_CHECK_S = 0.5  # The interval at which etcd ends expired leases.
HELD_CHANGES_MAX = 256
"""Changes held per watch while its agent is unreachable; beyond this number the watch ends."""
NEVER = float("inf")

TIMED_OUT = Problem(ProblemKind.UNREACHABLE, "timed out")
REFUSED = Problem(ProblemKind.UNREACHABLE, "connection refused")
RESET = Problem(ProblemKind.UNREACHABLE, "connection reset")


class EtcdUser(Protocol):
    """The interface of an agent that uses etcd, in addition to `simulator.process.Process`."""

    alive: bool
    cut_in: bool
    cut_out: bool
    lag_s: float

    def after(self, delay_s: float, what: Callable[[Any], None], arg: Any = None) -> None:
        """Call `what` later, unless the agent has exited."""

    def answered(self, result: tuple[int, Answer]) -> None:
        """Receive the answer to the request with this number."""

    def changed(self, result: tuple[int, int, tuple[Change, ...]]) -> None:
        """Receive the changes of the watch with this number, up to a revision."""

    def watch_ended(self, result: tuple[int, Problem]) -> None:
        """Receive the end of the watch with this number."""


class _EtcdCall:
    __slots__ = ("agent", "is_answered", "number", "request", "sent_at")

    def __init__(self, agent: EtcdUser, number: int, request: Request, sent_at: float) -> None:
        self.agent = agent
        self.number = number
        self.request = request
        self.sent_at = sent_at
        self.is_answered = False
        """Whether the agent has its answer, or will get it."""


class _Stream:
    """One watch, with its two sides."""

    __slots__ = ("agent", "at", "broken", "ended", "held", "holds", "number", "subscription")

    def __init__(self, agent: EtcdUser, number: int) -> None:
        self.agent = agent
        self.number = number
        self.subscription = 0
        self.at = 0.0  # When the last event arrives.
        self.held: list[tuple[int, tuple[Change, ...]]] = []
        self.holds = False
        """Whether new changes must wait until the held ones are sent."""
        self.broken = False
        """Whether etcd sends no more events. The agent may not know this yet."""
        self.ended = False
        """Whether the agent ended the watch, or knows that it ended."""


class EtcdNetwork:
    """All calls and watches of one etcd."""

    def __init__(self, world: World, etcd: SimEtcd, rng: Random) -> None:
        self.etcd = etcd
        self.alive = True
        self.host_up = True
        """A host that is up refuses calls while etcd is down; a host that is down does not respond."""
        self.on_done: Callable[[Request, Answer], None] | None = None
        """Called with every performed request, before the answer is sent."""
        self._world = world
        self._random = rng.random
        self._streams: dict[tuple[EtcdUser, int], _Stream] = {}
        self._lost: dict[EtcdUser, float] = {}  # When the connections were last killed.
        self._busy_until = 0.0
        self._expiry_at = NEVER

    # Chance.

    def _between(self, bounds: tuple[float, float]) -> float:
        return bounds[0] + (bounds[1] - bounds[0]) * self._random()

    def _delay_s(self, agent: EtcdUser) -> float:
        """Draw a one-way delay."""
        conditions = self._world.network.conditions
        delay = (conditions.delay_s + agent.lag_s) * (0.5 + self._random())
        if conditions.jitter_s:
            # Most delays are short, a few very long.
            delay += conditions.jitter_s * self._random() ** 6
        return delay

    def _is_lost(self) -> bool:
        loss = self._world.network.conditions.loss
        return loss > 0.0 and self._random() < loss

    # Calls.

    def send_request(self, agent: EtcdUser, number: int, request: Request) -> None:
        """Send a request; `answered` of the agent is called once with this number."""
        now = self._world.now
        call = _EtcdCall(agent, number, request, now)
        if agent.cut_out:
            self._time_out(call)
            if self._random() < LATE_SHARE:
                self._world.schedule(now + LATE_S * self._random(), self._arrive_again, call)
        elif self._is_lost():
            self._time_out(call)
        else:
            self._arrive_at(now + self._delay_s(agent), call)

    def _arrive_at(self, at: float, call: _EtcdCall) -> None:
        if at >= call.sent_at + CALL_S:
            self._time_out(call)  # etcd still performs the request.
        self._world.schedule(at, self._arrive, call)

    def _arrive_again(self, call: _EtcdCall) -> None:
        if not call.agent.cut_out:
            self._arrive(call)

    def _arrive(self, call: _EtcdCall) -> None:
        world = self._world
        world.steps += 1
        if not self.alive:
            if self.host_up:
                self._answer(call, REFUSED)
            else:
                self._time_out(call)
        elif world.now < self._busy_until:
            self._arrive_at(self._busy_until, call)
        else:
            answer = self.etcd.perform(world.now, call.request)
            if self.on_done is not None:
                self.on_done(call.request, answer)
            if type(call.request) is Grant:  # Other requests do not make the next expiry earlier.
                self._arm()
            self._answer(call, answer)

    def _answer(self, call: _EtcdCall, answer: Answer) -> None:
        agent, world = call.agent, self._world
        delay = self._delay_s(agent)
        if self._lost.get(agent, -1.0) >= call.sent_at:
            answer = RESET
        late = world.now + delay >= call.sent_at + CALL_S
        if late or agent.cut_in or self._is_lost():
            self._time_out(call)
        elif not call.is_answered:
            call.is_answered = True
            agent.after(delay, agent.answered, (call.number, answer))

    def _time_out(self, call: _EtcdCall) -> None:
        if not call.is_answered:
            call.is_answered = True
            left = max(0.0, call.sent_at + CALL_S - self._world.now)
            call.agent.after(left, call.agent.answered, (call.number, TIMED_OUT))

    # Watches.

    def watch(
        self, agent: EtcdUser, number: int, key: bytes, end: bytes, start_revision: int
    ) -> None:
        """Start a watch; its number must be new for this agent."""
        assert (agent, number) not in self._streams, f"watch {number} of {agent} already exists"
        stream = _Stream(agent, number)
        self._streams[agent, number] = stream
        if agent.cut_out or agent.cut_in or not self.host_up or self._is_lost():
            self._break(stream, TIMED_OUT, CALL_S)
            return
        delay = self._delay_s(agent)
        self._world.schedule(
            self._world.now + delay, self._begin, (stream, key, end, start_revision)
        )

    def _begin(self, begun: tuple[_Stream, bytes, bytes, int]) -> None:
        stream, key, end, start_revision = begun
        if stream.broken:
            return
        if not self.alive:
            if self.host_up:
                self._break(stream, REFUSED, self._delay_s(stream.agent))
            else:
                self._break(stream, TIMED_OUT, CALL_S)
            return
        if start_revision <= self.etcd.revision:
            stream.holds = True
            at = (self._world.now // CATCH_UP_S + 1) * CATCH_UP_S
            self._world.schedule(at, self._send_held, stream)

        def sink(revision: int, changes: tuple[Change, ...]) -> None:
            self._send_changes(stream, revision, changes)

        subscription = self.etcd.subscribe(key, end, start_revision, sink)
        if isinstance(subscription, Problem):
            self._break(stream, subscription, self._delay_s(stream.agent))
            return
        stream.subscription = subscription

    def unwatch(self, agent: EtcdUser, number: int) -> None:
        """End a watch; if it has already ended, nothing happens."""
        stream = self._streams.pop((agent, number), None)
        if stream is not None:
            stream.ended = True
            self._cease(stream)

    def _send_changes(self, stream: _Stream, revision: int, changes: tuple[Change, ...]) -> None:
        agent = stream.agent
        if not agent.alive:
            self.unwatch(agent, stream.number)
        elif not (stream.holds or agent.cut_in):
            self._send(stream, revision, changes)
        elif len(stream.held) >= HELD_CHANGES_MAX:
            self._break(stream, RESET, self._between(NOTICED_S))
        else:
            stream.held.append((revision, changes))
            if not stream.holds:
                stream.holds = True
                at = self._world.now + self._between(NOTICED_S)
                self._world.schedule(at, self._send_held, stream)

    def _send_held(self, stream: _Stream) -> None:
        """Send held changes, or break the watch if the cut still lasts."""
        if stream.agent.cut_in:
            self._break(stream, TIMED_OUT, 0.0)
            return
        stream.holds = False
        held, stream.held = stream.held, []
        if held:  # etcd sends them as one event, with the newest revision.
            missed = [change for _, changes in held for change in changes]
            self._send(stream, self.etcd.revision, tuple(missed))

    def _send(self, stream: _Stream, revision: int, changes: tuple[Change, ...]) -> None:
        result = (stream.number, revision, changes)
        delay = self._delay_s(stream.agent)
        if self._is_lost():
            delay += self._between(REPEATED_S)
        stream.agent.after(self._in_turn(stream, delay), self._deliver, (stream, result))

    def _in_turn(self, stream: _Stream, delay_s: float) -> float:
        """Return a delay after which all earlier events have arrived."""
        now = self._world.now
        stream.at = max(now + delay_s, stream.at + 1e-9)
        return stream.at - now

    def _deliver(self, sent: tuple[_Stream, tuple[int, int, tuple[Change, ...]]]) -> None:
        stream, result = sent
        if not stream.ended:
            stream.agent.changed(result)

    def _break(self, stream: _Stream, problem: Problem, delay_s: float) -> None:
        """Break a watch; the agent learns of it after all earlier events."""
        if not stream.broken:
            self._cease(stream)
            stream.agent.after(self._in_turn(stream, delay_s), self._end, (stream, problem))

    def _cease(self, stream: _Stream) -> None:
        stream.broken = True
        stream.held = []
        self.etcd.unsubscribe(stream.subscription)

    def _end(self, ended: tuple[_Stream, Problem]) -> None:
        stream, problem = ended
        if not stream.ended:
            stream.ended = True
            del self._streams[stream.agent, stream.number]
            stream.agent.watch_ended((stream.number, problem))

    # Faults.

    def cut(self, agent: EtcdUser) -> None:
        """Cut an agent off: if the cut lasts, its watches break."""
        for stream in self._streams_of(agent):
            at = self._world.now + self._between(NOTICED_S)
            self._world.schedule(at, self._find_cut, stream)

    def _find_cut(self, stream: _Stream) -> None:
        if stream.agent.cut_in or stream.agent.cut_out:
            self._break(stream, TIMED_OUT, 0.0)

    def break_connections(self, agent: EtcdUser) -> None:
        """Break all connections of an agent; requests in transit are reset."""
        self._lost[agent] = self._world.now
        for stream in self._streams_of(agent):
            self._break(stream, RESET, self._delay_s(agent))

    def _streams_of(self, agent: EtcdUser) -> list[_Stream]:
        return [stream for stream in self._streams.values() if stream.agent is agent]

    def stop(self, *, host_too: bool = False) -> None:
        """Stop etcd. If its hosts die too, nothing closes the connections."""
        self._world.note("etcd", "dies with its hosts" if host_too else "exits")
        self.alive = False
        self.host_up = not host_too
        for stream in list(self._streams.values()):
            agent = stream.agent
            unnoticed = host_too or agent.cut_in
            self._break(
                stream, RESET, self._between(NOTICED_S) if unnoticed else self._delay_s(agent)
            )

    def restart(self, _arg: object = None) -> None:
        """Start etcd again, with its data."""
        if not self.alive:
            self._world.note("etcd", "restarts")
            self.alive = self.host_up = True
            self._busy_until = 0.0
            self.etcd.failover(self._world.now)
            self._arm()

    def elect(self, pause_s: float) -> None:
        """Change etcd's leader, which delays requests for this long."""
        self._world.note("etcd", f"elects another leader, for {pause_s:.3f} s")
        self._busy_until = self._world.now + pause_s
        self.etcd.failover(self._busy_until)

    # Leases.

    def _arm(self) -> None:
        first = self.etcd.next_expiry()
        if first is None or not self.alive:
            return
        at = max(first, self._world.now) + LEASE_CHECK_S * self._random()
        if at < self._expiry_at:
            self._expiry_at = at
            self._world.schedule(at, self._expire_leases, at)

    def _expire_leases(self, at: float) -> None:
        if at == self._expiry_at:
            self._expiry_at = NEVER
            if self.alive:
                before = self.etcd.revision
                self.etcd.expire(at)
                if self.etcd.revision > before:
                    self._world.note("etcd", f"ends leases, at revision {self.etcd.revision}")
            self._arm()
