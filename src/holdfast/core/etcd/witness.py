"""Which agents have exited, detected long before their leases expire. The machine `Witness`.

Every agent on etcd listens on a port, its *presence*, where it only sends its identity. The leader
connects to the presence of each node, and every other node to that of the leader. No further data is sent
over these connections: the kernel of a host closes them when the process exits for any reason. A process
that is stopped, starved or slow keeps them.

::

    UNSEEN ── sent its identity ──► OPEN ── closed by its host ──► CHECKING ── refused ──► GRACE
      ▲ ▲                             ▲                              │  ▲                    │
      │ │                             └──── sent its identity ───────┘  └── GRACE_S later ───┘
      │ └── anything else ──────────────────────────────────────────┘           │
      └── timed out ── OPEN                                       refused again: ENDED

**Proof.** An agent has exited if it was seen at its address, its host closed the connection, and after that
its host refuses connections to the port, immediately and again after `GRACE_S`. Any other outcome (no
response, no route, another process that accepts) proves nothing and discards the evidence. A refusal
before the agent was seen at the address may come from another host with that address.

The keeper holds the listening socket, too. So the port refuses connections only when agent and keeper have
exited, and the workers exit with the keeper. `GRACE_S` covers the time that the kernel needs for that.

**Consequence.** The witness that has the proof revokes the agent's lease (`RevokeLease`). From then on
everything happens as if the lease had expired. A lease belongs to a single process, so a late or repeated
revocation affects no other. If another host refused connections in the agent's place, and the agent is
alive, it finds its lease gone, gets a new one and rejoins.

Use: perform the effects in order; report the outcome of each `ConnectPresence` as the event with its
number; call `handle` with `Tick` at `next_deadline`. When a session opens after a request failed,
`unfinished` returns the pending `RevokeLease` effects again.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from holdfast.core.machine import Effect, Event, Story, Tick
from holdfast.core.values import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.core.etcd.keys import Presence

GRACE_S = 0.2
"""The time between the two refusals; the same as a coordinator's grace for a closed connection."""
RETRY_S = 30.0
"""The interval at which all unseen agents are tried again; until then only their leases detect a loss. In
a job of thousands of nodes, the leader refuses connections above its limit, and those nodes retry."""
CHECKS_MAX = 4
"""The number of consecutive attempts if a port accepts and closes, as happens while the
keeper exits."""
STABLE_CONNECTION_S = 1.0  # A connection that was open for this long resets that number.
WATCHED_MAX = 4_096  # Further nodes are only detected by their leases.
ENDED_KEPT_MAX = 64  # Exited agents that are remembered after their records are gone, for messages.

ENDED = "its agent exited: its connection closed and its port refuses connections"


class Subject(Value):
    """A watched process: its presence, and its lease."""

    presence: Presence
    lease: int


# Events.


class SubjectsChanged(Event):
    """From now on exactly these processes are watched."""

    subjects: tuple[Subject, ...]


class SubjectAdded(Event):
    """Another process is watched, or a watched process has a new lease."""

    subject: Subject


class SubjectRemoved(Event):
    """A process is no longer watched."""

    id: str


class PresenceConfirmed(Event):
    """The connection opened, and the process sent its identity."""

    number: int


class PresenceClosed(Event):
    """The other host closed the connection, before or after the identity was received."""

    number: int


class PresenceRefused(Event):
    """The other host refused the connection."""

    number: int


class PresenceInconclusive(Event):
    """There was no response or no route, another process responded, or the connection timed out."""

    number: int


WitnessEvent = (
    SubjectsChanged
    | SubjectAdded
    | SubjectRemoved
    | PresenceConfirmed
    | PresenceClosed
    | PresenceRefused
    | PresenceInconclusive
    | Tick
)
ConnectionEvent = PresenceConfirmed | PresenceClosed | PresenceRefused | PresenceInconclusive

# Effects.


class ConnectPresence(Effect):
    """Connect once; with this number, report the outcome, and later that the connection closed."""

    number: int
    presence: Presence


class DropPresence(Effect):
    """Close the connection with this number, or cancel the attempt; report nothing more about it."""

    number: int


class RevokeLease(Effect):
    """Revoke the lease of an agent that has exited."""

    lease: int


PresenceEffect = ConnectPresence | DropPresence
WitnessEffect = PresenceEffect | RevokeLease


class WatchState(Enum):
    """The evidence about one process."""

    UNSEEN = "unseen"
    OPEN = "open"
    CHECKING = "checking"
    GRACE = "grace"
    ENDED = "ended"


class _Watch:
    __slots__ = ("checks", "number", "refused", "seen_at", "state", "subject")

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.state = WatchState.UNSEEN
        self.number = 0  # The number of the connection or attempt; 0 without one.
        self.checks = 0
        self.refused = False  # Whether the port refused since the connection closed.
        self.seen_at = 0.0


class Witness:
    """The machine of one node; `own_id` is the id of its presence, empty if it has none."""

    def __init__(self, *, node: str, own_id: str, numbers: Iterator[int]) -> None:
        self.watched_max = WATCHED_MAX
        self.story = Story("witness", node=node)
        self._own_id = own_id
        self._numbers = numbers
        self._watched: dict[str, _Watch] = {}
        self._by_number: dict[int, _Watch] = {}
        self._grace: dict[str, float] = {}  # When to check again.
        self._unseen: dict[str, None] = {}  # Processes to try again, all at once.
        self._retry_at: float | None = None
        self._ended: deque[str] = deque(maxlen=ENDED_KEPT_MAX)

    def has_ended(self, id: str) -> bool:  # noqa: A002 (its name)
        """Whether the connection to a process closed, and its port has refused a new one since then."""
        watch = self._watched.get(id)
        return watch.refused if watch is not None else id in self._ended

    def unfinished(self) -> list[RevokeLease]:
        """Return revocations that may not have been performed."""
        every = self._watched.values()
        return [RevokeLease(one.subject.lease) for one in every if one.state is WatchState.ENDED]

    def handle(self, now: float, event: WitnessEvent, cause: str = "") -> list[WitnessEffect]:
        """Handle one event; return the effects in order."""
        if not self._own_id:
            return []
        number = event.number if isinstance(event, ConnectionEvent) else 0
        watch = self._by_number.get(number)
        state = watch.state if watch is not None else None
        effects = self._handle(now, event, watch)
        if effects or (watch is not None and watch.state is not state):
            self.story.record(now, state, event, effects, cause)
        return effects

    def next_deadline(self) -> float | None:
        """Return when the next `Tick` is due, or None."""
        times = [*self._grace.values()]
        if self._retry_at is not None:
            times.append(self._retry_at)
        return min(times, default=None)

    def _handle(self, now: float, event: WitnessEvent, watch: _Watch | None) -> list[WitnessEffect]:
        match event:
            case Tick():
                return self._tick(now)
            case SubjectAdded(subject):
                return self._known(subject)
            case SubjectRemoved(id):
                return self._gone(id)
            case SubjectsChanged(subjects):
                wanted = {one.presence.id for one in subjects}
                unwanted = [one for one in self._watched if one not in wanted]
                effects = [each for one in unwanted for each in self._gone(one)]
                return effects + [each for one in subjects for each in self._known(one)]
        if watch is None:
            return []  # The connection was dropped before.
        if not isinstance(event, PresenceConfirmed):
            del self._by_number[watch.number]
            watch.number = 0
        match event:
            case PresenceConfirmed():
                watch.state, watch.refused, watch.seen_at = WatchState.OPEN, False, now
                return []
            case PresenceClosed():
                return self._closed(now, watch)
            case PresenceRefused():
                return self._refused(now, watch)
            case PresenceInconclusive():
                return self._unknown(now, watch)

    # The watched processes.

    def _known(self, subject: Subject) -> list[WitnessEffect]:
        id = subject.presence.id  # noqa: A001 (its name)
        watch = self._watched.get(id)
        if watch is None:
            if id == self._own_id or len(self._watched) >= self.watched_max:
                return []
            watch = self._watched[id] = _Watch(subject)
            return [self._connect(watch)]
        renewed, watch.subject = subject.lease != watch.subject.lease, subject
        if watch.state is WatchState.ENDED and renewed:
            # The lease was stored late, or the agent is alive: discard the evidence.
            watch.state, watch.checks, watch.refused = WatchState.UNSEEN, 0, False
            return [self._connect(watch)]
        return []

    def _gone(self, id: str) -> list[WitnessEffect]:  # noqa: A002 (its name)
        watch = self._watched.get(id)
        if watch is None:
            return []
        if self.has_ended(id):
            self._ended.append(id)
        del self._watched[id]
        self._grace.pop(id, None)
        self._unseen.pop(id, None)
        if not watch.number:
            return []
        del self._by_number[watch.number]
        return [DropPresence(watch.number)]

    # Outcomes of connections.

    def _closed(self, now: float, watch: _Watch) -> list[WitnessEffect]:
        if watch.state is WatchState.OPEN:
            watch.state = WatchState.CHECKING
            if now - watch.seen_at >= STABLE_CONNECTION_S:
                watch.checks = 0
        if watch.state is not WatchState.CHECKING or watch.checks >= CHECKS_MAX:
            return self._unknown(now, watch)
        return [self._connect(watch)]

    def _refused(self, now: float, watch: _Watch) -> list[WitnessEffect]:
        if watch.state is not WatchState.CHECKING:
            return self._unknown(now, watch)
        if watch.refused:
            watch.state = WatchState.ENDED
            return [RevokeLease(watch.subject.lease)]
        watch.state, watch.refused = WatchState.GRACE, True
        self._grace[watch.subject.presence.id] = now + GRACE_S
        return []

    def _unknown(self, now: float, watch: _Watch) -> list[WitnessEffect]:
        watch.state, watch.checks, watch.refused = WatchState.UNSEEN, 0, False
        self._unseen[watch.subject.presence.id] = None
        if self._retry_at is None:
            self._retry_at = now + RETRY_S
        return []

    def _tick(self, now: float) -> list[WitnessEffect]:
        effects: list[WitnessEffect] = []
        for one in [one for one, at in self._grace.items() if at <= now]:
            del self._grace[one]
            watch = self._watched[one]
            watch.state = WatchState.CHECKING
            effects.append(self._connect(watch))
        if self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
            unseen, self._unseen = self._unseen, {}
            effects += [self._connect(self._watched[one]) for one in unseen]
        return effects

    def _connect(self, watch: _Watch) -> ConnectPresence:
        watch.number = next(self._numbers)
        watch.checks += 1
        self._by_number[watch.number] = watch
        return ConnectPresence(watch.number, watch.subject.presence)
