"""The agent ports of simulated agents on etcd (`net.agent_port`), and the connections to them.

When an agent exits, its host closes the agent's connections immediately. Once the keeper has killed the
workers too, the host refuses new connections. A host that is down, cut off or behind a firewall does not
respond. Some addresses lead to another host, and another process may reuse the port later. Data that is
in flight during a cut arrives later, because TCP retransmits it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.etcd.keys import Presence
from holdfast.core.etcd.witness import (
    PresenceClosed,
    PresenceConfirmed,
    PresenceInconclusive,
    PresenceRefused,
)

if TYPE_CHECKING:
    from random import Random

    from holdfast.core.etcd.witness import ConnectionEvent
    from simulator.etcd_driver import EtcdAgent
    from simulator.world import World

CONNECT_S = 2.0
AGAIN_S = (0.2, 1.0)  # The delay of a TCP retransmission.
AGAIN_S_MAX = 60.0  # TCP gives up after this time.
FORGOTTEN_S = (5.0, 30.0)  # How long after a cut a connection is detected as dead.
KEEPER_S_MAX = 0.5  # How long a keeper takes to kill the workers of a killed agent.
HIDDEN_SHARE = 0.1  # The share of agents whose address leads others to another host.
SQUATTED_SHARE = 0.1  # The share of ports that another process reuses.


class _Connection:
    __slots__ = ("at", "is_over", "number", "seen_by")

    def __init__(self, seen_by: EtcdAgent, number: int, at: EtcdAgent) -> None:
        self.seen_by = seen_by
        self.number = number
        self.at = at
        self.is_over = False
        """Whether the agent receives no more events about this connection."""


class Presences:
    """All presences of a world."""

    def __init__(self, world: World, rng: Random) -> None:
        self._world = world
        self._rng = rng
        self._agents: dict[str, EtcdAgent] = {}
        self._hidden: set[str] = set()
        self._squatted: set[str] = set()
        self._connections: dict[tuple[EtcdAgent, int], _Connection] = {}

    def show(self, agent: EtcdAgent) -> Presence:
        """Give an agent a port. The agent adds its address."""
        presence = Presence("", 1 + len(self._agents), f"{self._rng.getrandbits(128):032x}")
        self._agents[presence.id] = agent
        if self._rng.random() < HIDDEN_SHARE:
            self._hidden.add(presence.id)
        if self._rng.random() < SQUATTED_SHARE:
            self._squatted.add(presence.id)
        return presence

    def keeper_s(self) -> float:
        """Draw how long the workers of a killed agent outlive it."""
        return KEEPER_S_MAX * self._rng.random()

    def connect(self, agent: EtcdAgent, number: int, presence: Presence) -> None:
        """Connect an agent to another agent's port; it receives the outcome as events."""
        at = self._agents[presence.id]
        connection = self._connections[agent, number] = _Connection(agent, number, at)
        arrival = self._world.now + self._delay_s(agent, at)
        self._world.schedule(arrival, self._arrive, (connection, presence.id))

    def drop(self, agent: EtcdAgent, number: int) -> None:
        """Close a connection at the connecting side."""
        connection = self._connections.pop((agent, number), None)
        if connection is not None:
            connection.is_over = True

    def _arrive(self, what: tuple[_Connection, str]) -> None:
        connection, wanted = what
        at, number = connection.at, connection.number
        if connection.is_over:
            return
        if wanted in self._hidden:
            outcome = PresenceRefused if self._rng.random() < 0.8 else PresenceInconclusive
            self._end(connection, outcome(number))
        elif self._is_apart(connection) or not at.host_up:
            self._end(connection, PresenceInconclusive(number), CONNECT_S)
        elif at.alive:
            at.after(0.0, self._report_end, connection)  # A stopped process responds later.
        elif at.workers.exist:
            pass  # The keeper holds the port and does not respond.
        elif wanted in self._squatted:
            self._end(connection, PresenceInconclusive(number))
        else:
            self._end(connection, PresenceRefused(number))

    def _report_end(self, connection: _Connection) -> None:
        if not connection.is_over:
            self._send((connection, PresenceConfirmed(connection.number), self._world.now))

    def _send(self, what: tuple[_Connection, ConnectionEvent, float]) -> None:
        """Deliver an event as soon as the network allows."""
        connection, event, since = what
        if connection.is_over or self._world.now - since > AGAIN_S_MAX:
            return
        if self._is_apart(connection):
            low, high = AGAIN_S
            again = self._world.now + low + (high - low) * self._rng.random()
            self._world.schedule(again, self._send, what)
        elif isinstance(event, PresenceConfirmed):
            connection.seen_by.after(self._delay(connection), self._see, (connection, event))
        else:
            self._end(connection, event)

    def _end(self, connection: _Connection, event: ConnectionEvent, after_s: float = 0.0) -> None:
        after_s = after_s or self._delay(connection)
        connection.seen_by.after(after_s, self._see, (connection, event))

    def _see(self, what: tuple[_Connection, ConnectionEvent]) -> None:
        connection, event = what
        if not connection.is_over:
            if not isinstance(event, PresenceConfirmed):
                self.drop(connection.seen_by, connection.number)
            connection.seen_by.handle_presence(event)

    # Faults.

    def end(self, agent: EtcdAgent) -> None:
        """Close the connections of an agent that has exited, or whose keeper has."""
        for one in self._of(agent):
            if one.seen_by is agent and not agent.alive:
                self.drop(agent, one.number)
            elif agent.host_up:
                self._send((one, PresenceClosed(one.number), self._world.now))

    def reset(self, agent: EtcdAgent) -> None:
        """Reset all connections of an agent, as a router may do."""
        for one in self._of(agent):
            self._send((one, PresenceClosed(one.number), self._world.now))

    def cut(self, agent: EtcdAgent) -> None:
        """Handle a cut of an agent: if it lasts, the agent's connections are detected as dead."""
        low, high = FORGOTTEN_S
        for one in self._of(agent):
            at = self._world.now + low + (high - low) * self._rng.random()
            self._world.schedule(at, self._forget, one)

    def _forget(self, connection: _Connection) -> None:
        if not connection.is_over and self._is_apart(connection):
            self._end(connection, PresenceInconclusive(connection.number))

    def _of(self, agent: EtcdAgent) -> list[_Connection]:
        return [one for one in self._connections.values() if agent in (one.seen_by, one.at)]

    def _is_apart(self, connection: _Connection) -> bool:
        """Whether the network between the two sides is cut in either direction."""
        ends = (connection.seen_by, connection.at)
        return any(one.cut_in or one.cut_out or one.is_apart for one in ends)

    def _delay(self, connection: _Connection) -> float:
        return self._delay_s(connection.seen_by, connection.at)

    def _delay_s(self, one: EtcdAgent, other: EtcdAgent) -> float:
        conditions = self._world.network.conditions
        delay = (conditions.delay_s + one.lag_s + other.lag_s) * (0.5 + self._rng.random())
        if conditions.jitter_s:
            delay += conditions.jitter_s * self._rng.random() ** 6
        return delay
