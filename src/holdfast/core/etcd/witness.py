"""Which agents are known to have ended, long before their leases do. The machine `Witness`.

Every agent on etcd listens at a port, its *presence*, where it says who it is and nothing else. The
leader holds a connection to each node's, every other node one to the leader's. Nothing is sent on
them: they are there because the kernel of a host closes them when the process is gone, however it
ended. A process that is stopped, starved or slow keeps them.

::

    UNSEEN ── it said who it is ──► OPEN ── closed by its host ──► CHECKING ── refused ──► GRACE
      ▲ ▲                             ▲                              │  ▲                    │
      │ │                             └──── it says who it is ───────┘  └── GRACE_S later ───┘
      │ └── anything else ──────────────────────────────────────────┘           │
      └── timed out ── OPEN                                       refused again: ENDED

**Proof.** An agent has ended if it was seen at this address, the connection to it was closed by its
host, and from then on its host refuses others at that port, at once and again after `GRACE_S`. All
else proves nothing and takes the evidence back: no answer, no way there, somebody else who accepts. A
refusal before the agent was ever seen there may be that of another host with the same address.

The keeper holds the listening socket too: so the port refuses only when keeper and agent are gone,
and the workers die with the keeper. The grace is for the moment that the kernel takes for the latter.

**Consequence.** `EndLease`: the lease of an agent that has ended is revoked, by whoever has the
proof. From there on everything is as if the lease had run out. It belongs to one process alone, so
however late this is done, and by however many, it hits nobody else. An agent that was taken for ended
all the same, because somebody refused on its host's behalf, finds its lease gone and begins anew.

Use: perform the effects in order; bring back what became of each `ConnectPresence` as the event
with its number; call `handle` with `Tick` at `next_deadline`. `EndLease` is returned again by
`unfinished`, for a session that opens after a request failed.
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
"""Between the two refusals; as long as a coordinator waits for a node whose connection closed."""
RETRY_S = 30.0
"""How often agents are tried that were not seen, all at once; until then their leases have to do. In a job
of thousands most are turned away by a leader that has enough witnesses, and come again."""
CHECKS_MAX = 4
"""A port that accepts and closes is tried so often in a row: the keeper may just be ending."""
LASTING_S = 1.0  # A connection that was open for so long ends such a row.
WATCHED_MAX = 4_096  # Of more nodes the last ones are left to their leases.
ENDED_KEPT_MAX = 64  # So many are remembered after their records are gone, for the reason.

ENDED = "its agent ended: its connection was closed and its port refuses others"


class Subject(Value):
    """A process that is watched: where, and by which lease others know it."""

    presence: Presence
    lease: int


# Events.


class SubjectsKnown(Event):
    """These are to be watched, and no others."""

    subjects: tuple[Subject, ...]


class SubjectKnown(Event):
    """Another one is to be watched, or has another lease."""

    subject: Subject


class SubjectGone(Event):
    """One need not be watched any more."""

    id: str


class PresenceSeen(Event):
    """The connection is there, and whoever is wanted has said so."""

    number: int


class PresenceClosed(Event):
    """The other host closed the connection, whether anything was said before or not."""

    number: int


class PresenceRefused(Event):
    """The other host refused the connection."""

    number: int


class PresenceUnknown(Event):
    """No answer, no way there, somebody else, or a connection that timed out."""

    number: int


WitnessEvent = (
    SubjectsKnown
    | SubjectKnown
    | SubjectGone
    | PresenceSeen
    | PresenceClosed
    | PresenceRefused
    | PresenceUnknown
    | Tick
)
ConnectionEvent = PresenceSeen | PresenceClosed | PresenceRefused | PresenceUnknown

# Effects.


class ConnectPresence(Effect):
    """Connect, once; report what comes of it with this number, and then that it was closed."""

    number: int
    presence: Presence


class DropPresence(Effect):
    """End the connection, or the attempt, of this number; nothing more is reported of it."""

    number: int


class EndLease(Effect):
    """Revoke the lease of an agent that has ended."""

    lease: int


PresenceEffect = ConnectPresence | DropPresence
WitnessEffect = PresenceEffect | EndLease


class WatchState(Enum):
    """What is known of one process."""

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
        self.number = 0  # Of the connection or the attempt, 0 without one.
        self.checks = 0
        self.refused = False  # Since it was closed by its host.
        self.seen_at = 0.0


class Witness:
    """The machine of one node; `own_id` is its own presence, nothing if it takes no part."""

    def __init__(self, *, node: str, own_id: str, numbers: Iterator[int]) -> None:
        self.watched_max = WATCHED_MAX
        self.story = Story("witness", node=node)
        self._own_id = own_id
        self._numbers = numbers
        self._watched: dict[str, _Watch] = {}
        self._by_number: dict[int, _Watch] = {}
        self._grace: dict[str, float] = {}  # When to check again.
        self._unseen: dict[str, None] = {}  # To be tried again, all at once.
        self._retry_at: float | None = None
        self._ended: deque[str] = deque(maxlen=ENDED_KEPT_MAX)

    def has_ended(self, id: str) -> bool:  # noqa: A002 (its name)
        """Whether a process was seen to end, and refused at least once since."""
        watch = self._watched.get(id)
        return watch.refused if watch is not None else id in self._ended

    def unfinished(self) -> list[EndLease]:
        """Return what must be done all the same: it is not known to have been."""
        every = self._watched.values()
        return [EndLease(one.subject.lease) for one in every if one.state is WatchState.ENDED]

    def handle(self, now: float, event: WitnessEvent, cause: str = "") -> list[WitnessEffect]:
        """Take in one event; return what must now be done, in order."""
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
        """Return when `Tick` is wanted next, or None."""
        times = [*self._grace.values()]
        if self._retry_at is not None:
            times.append(self._retry_at)
        return min(times, default=None)

    def _handle(self, now: float, event: WitnessEvent, watch: _Watch | None) -> list[WitnessEffect]:
        match event:
            case Tick():
                return self._tick(now)
            case SubjectKnown(subject):
                return self._known(subject)
            case SubjectGone(id):
                return self._gone(id)
            case SubjectsKnown(subjects):
                wanted = {one.presence.id for one in subjects}
                unwanted = [one for one in self._watched if one not in wanted]
                effects = [each for one in unwanted for each in self._gone(one)]
                return effects + [each for one in subjects for each in self._known(one)]
        if watch is None:
            return []  # It was given up before.
        if not isinstance(event, PresenceSeen):
            del self._by_number[watch.number]
            watch.number = 0
        match event:
            case PresenceSeen():
                watch.state, watch.refused, watch.seen_at = WatchState.OPEN, False, now
                return []
            case PresenceClosed():
                return self._closed(now, watch)
            case PresenceRefused():
                return self._refused(now, watch)
            case PresenceUnknown():
                return self._unknown(now, watch)

    # Whom to watch.

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
            # Stored late, or it lives after all: nothing is taken for granted of it any more.
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

    # What becomes of a connection.

    def _closed(self, now: float, watch: _Watch) -> list[WitnessEffect]:
        if watch.state is WatchState.OPEN:
            watch.state = WatchState.CHECKING
            if now - watch.seen_at >= LASTING_S:
                watch.checks = 0
        if watch.state is not WatchState.CHECKING or watch.checks >= CHECKS_MAX:
            return self._unknown(now, watch)
        return [self._connect(watch)]

    def _refused(self, now: float, watch: _Watch) -> list[WitnessEffect]:
        if watch.state is not WatchState.CHECKING:
            return self._unknown(now, watch)
        if watch.refused:
            watch.state = WatchState.ENDED
            return [EndLease(watch.subject.lease)]
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
