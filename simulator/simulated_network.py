"""The simulated network between agents and the coordinator: links and their faults.

A link is a connection. It delivers messages in order, unless the network's conditions reorder, lose,
repeat or delay them. TCP would not do the first three, but the machines under test must tolerate them.
A cut stops one direction or both. The link loses messages that are sent during a cut, or delivers them
after the cut, like a TCP retransmission. If one side closes a link, the other side notices after the
delay of a message; during a cut it does not notice.

The links of some agents have a limited bandwidth. They carry the frames that a real connection would
write, one after the other in each direction. Production code (`wire.frames`) splits large frames into
parts. Such a link loses nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.core.protocol import Status, View
from holdfast.wire.frames import HEADER_BYTES, TAKEN, IncomingParts, encode_frame
from holdfast.wire.messages import Part, decode
from simulator.simulated_coordinator import Coordinator

if TYPE_CHECKING:
    from random import Random

    from holdfast.core.protocol import Ack, Heartbeat
    from holdfast.wire.frames import OutgoingParts
    from simulator.agent import Agent
    from simulator.process import Process
    from simulator.world import World

CONNECT_TIMEOUT_S = 3.0
HELD_MESSAGES_MAX = 64  # Messages that one link holds during a cut.


class NetworkConditions:
    """The current faults of the network."""

    def __init__(
        self,
        *,
        loss: float = 0.0,
        duplication: float = 0.0,
        reordering: float = 0.0,
        delay_s: float = 0.001,
        jitter_s: float = 0.0,
    ) -> None:
        self.loss = loss
        self.duplication = duplication
        self.reordering = reordering
        self.delay_s = delay_s
        self.jitter_s = jitter_s
        self.unreliable = loss + duplication + reordering + jitter_s > 0.0


class Link:
    """One connection between an agent and a coordinator."""

    __slots__ = ("agent", "coordinator", "down", "down_at", "held", "id", "peers", "up", "up_at")

    def __init__(self, number: int, agent: Agent, coordinator: Coordinator) -> None:
        self.id = number
        self.agent = agent
        self.coordinator = coordinator
        self.up_at = 0.0  # When the last message to the coordinator arrives.
        self.down_at = 0.0  # When the last message to the agent arrives.
        self.held: list[tuple[bool, Status | Heartbeat | Ack | View]] = []
        self.peers: list[tuple[str, str, int]] = []
        parts = agent.world.machines.parts
        self.up = SlowLine(parts())
        self.down = SlowLine(parts())


class SlowLine:
    """One direction of a link with limited bandwidth."""

    __slots__ = ("free_at", "incoming", "outgoing", "split_messages")

    def __init__(self, outgoing: OutgoingParts) -> None:
        self.free_at = 0.0
        self.outgoing = outgoing
        self.incoming = IncomingParts()
        self.split_messages: dict[bytes, Any] = {}  # By their bodies.


class Network:
    """All links, and the network's conditions."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.conditions = NetworkConditions()
        self._rng = rng
        self._random = rng.random
        self._links = 0

    # Messages.

    def send_up(self, link: Link, message: Status | Heartbeat) -> None:
        if link.agent.cut_out or link.coordinator in link.agent.apart:
            self._hold(link, message, up=True)
            return
        if link.agent.bandwidth:
            self._send_slowly(link, message, up=True)
            return
        world = self.world
        conditions = self.conditions
        at = world.now + (conditions.delay_s + link.agent.lag_s) * (0.5 + self._random())
        if conditions.unreliable:
            self._send_unreliably(link, message, at, up=True)
            return
        if at <= link.up_at:
            at = link.up_at + 1e-9
        link.up_at = at
        world.schedule(at, link.coordinator.receive, (link, message))

    def send_down(self, link: Link, message: Ack | View) -> None:
        if link.agent.cut_in or link.coordinator in link.agent.apart:
            self._hold(link, message, up=False)
            return
        if link.agent.bandwidth:
            self._send_slowly(link, message, up=False)
            return
        world = self.world
        conditions = self.conditions
        at = world.now + (conditions.delay_s + link.agent.lag_s) * (0.5 + self._random())
        if conditions.unreliable:
            self._send_unreliably(link, message, at, up=False)
            return
        if at <= link.down_at:
            at = link.down_at + 1e-9
        link.down_at = at
        world.schedule(at, link.agent.receive, (link, message))

    def _send_unreliably(
        self, link: Link, message: Status | Heartbeat | Ack | View, at: float, *, up: bool
    ) -> None:
        conditions, draw = self.conditions, self._random
        chance = draw()
        if chance < conditions.loss:
            return
        copies = 2 if chance < conditions.loss + conditions.duplication else 1
        for _ in range(copies):
            arrives = at
            if conditions.jitter_s:
                # Most delays are short, a few very long.
                arrives += conditions.jitter_s * draw() ** 6
            if draw() >= conditions.reordering:
                arrives = max(arrives, (link.up_at if up else link.down_at) + 1e-9)
                if up:
                    link.up_at = arrives
                else:
                    link.down_at = arrives
            to = link.coordinator.receive if up else link.agent.receive
            self.world.schedule(arrives, to, (link, message))

    def _send_slowly(
        self, link: Link, message: Status | Heartbeat | Ack | View, *, up: bool
    ) -> None:
        line = link.up if up else link.down
        kind = {Status: "status", View: "view"}.get(type(message), "")
        frame = encode_frame(message)
        written = line.outgoing.send(frame, kind)
        if written == frame:
            to = link.coordinator.receive if up else link.agent.receive
            self.world.schedule(self._arrival_of(link, written, up=up), to, (link, message))
            return
        line.split_messages[frame[HEADER_BYTES:]] = message
        self._write_part(link, written, up=up)

    def _write_part(self, link: Link, written: bytes, *, up: bool) -> None:
        if written:
            to: Process = link.coordinator if up else link.agent
            takes_s = self._arrival_of(link, written, up=up) - self.world.now
            to.after(takes_s, self._take_part, (link, written, up))

    def _arrival_of(self, link: Link, written: bytes, *, up: bool) -> float:
        """Return when data that is written now arrives. It waits until the line is free."""
        line = link.up if up else link.down
        line.free_at = max(line.free_at, self.world.now) + len(written) / link.agent.bandwidth
        at = max(line.free_at + self.delay_s(link.agent), (link.up_at if up else link.down_at))
        if up:
            link.up_at = at
        else:
            link.down_at = at
        return at

    def _take_part(self, what: tuple[Link, bytes, bool]) -> None:
        """Receive and acknowledge a part; after the last part, deliver the message."""
        link, written, up = what
        part = decode(written[HEADER_BYTES:])
        assert type(part) is Part
        sender: Process = link.agent if up else link.coordinator
        takes_s = self._arrival_of(link, TAKEN, up=not up) - self.world.now
        sender.after(takes_s, self._part_taken, (link, up))
        line = link.up if up else link.down
        body = line.incoming.take(part)
        if body is not None:
            receive = link.coordinator.receive if up else link.agent.receive
            receive((link, line.split_messages[body]))

    def _part_taken(self, what: tuple[Link, bool]) -> None:
        link, up = what
        line = link.up if up else link.down
        self._write_part(link, line.outgoing.next_part(), up=up)

    def _hold(self, link: Link, message: Status | Heartbeat | Ack | View, *, up: bool) -> None:
        if len(link.held) < HELD_MESSAGES_MAX and self._random() < 0.5:
            link.held.append((up, message))

    def deliver_held(self, agent: Agent) -> None:
        """Deliver the messages that the agent's link held during a cut, if the link is still open."""
        link = agent.link
        if link is None:
            return
        held, link.held = link.held, []
        for up, message in held:
            at = self.world.now + 0.2 * self._random()
            to = link.coordinator.receive if up else agent.receive
            self.world.schedule(at, to, (link, message))

    # Links.

    def delay_s(self, agent: Agent) -> float:
        """Return the one-way delay of a small message."""
        return (self.conditions.delay_s + agent.lag_s) * (0.5 + self._random())

    def open(self, agent: Agent) -> None:
        """Connect an agent; it receives the outcome as an event."""
        at = self.delay_s(agent) * 2
        coordinator = self._reachable_coordinator(agent)
        unheard = agent.cut_out or agent.cut_in or not coordinator.host_up
        unheard = unheard or coordinator in agent.apart
        if unheard:
            agent.after(CONNECT_TIMEOUT_S, agent.link_failed, "timed out")
        elif not coordinator.alive:
            agent.after(at, agent.link_failed, "connection refused")
        else:
            self._links += 1
            agent.after(at, agent.link_opened, Link(self._links, agent, coordinator))

    def _reachable_coordinator(self, agent: Agent) -> Coordinator:
        """Return the first coordinator that responds to an agent, or else the newest one."""
        newest = self.world.coordinator
        assert isinstance(newest, Coordinator)
        for one in (*self.world.replaced, newest):
            is_up = one.alive and not one.paused and one not in agent.apart
            if is_up and one.endpoint_index >= agent.session.endpoint_index:
                return one
        return newest

    def close_from_agent(self, link: Link) -> None:
        """Close the agent's end; the coordinator may notice."""
        is_cut = link.agent.cut_out or link.coordinator in link.agent.apart
        if not is_cut and link.agent.host_up:
            at = max(self.delay_s(link.agent), link.up_at - self.world.now + 1e-9)
            link.coordinator.after(at, link.coordinator.link_closed, link)

    def close_from_coordinator(self, link: Link) -> None:
        """Close the coordinator's end; the agent may notice."""
        is_cut = link.agent.cut_in or link.coordinator in link.agent.apart
        if not is_cut and link.coordinator.host_up:
            at = max(self.delay_s(link.agent), link.down_at - self.world.now + 1e-9)
            link.agent.after(at, link.agent.link_lost, link)
