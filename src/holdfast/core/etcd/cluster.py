"""One machine's place in the etcd cluster of a job: the machine `ClusterMember`.

A list names the machines, each of which is to run one member of etcd. They start in any order, some
never; each may be lost at any moment with all its member had stored, and come back with nothing. From
the list alone they must make one cluster, and never two of which each could decide.

::

    SEEKING ── most are here, and empty: a proposal ──► PROPOSING ── most accept ──► FOUNDING ──┐
     ▲  │ └── a proposal of another, accepted ────────────────────────────────────► FOUNDING ──┤
     │  └── there is a cluster, and it has a leader ──► CLAIMING ── a place ──► JOINING ───────┤
     │                                                                                         ▼
     ├── it came to nothing: the data are dropped ─────────────────────────────────────────  SERVING
     └── after a while ── RESTING ◄── etcd ended again ─► RESTARTING ◄── etcd ended ───────────┘

**Founding.** A machine whose member has no data says so at its door, with a number that it drew for
this emptiness (its *incarnation*). Who sees most of the list empty, itself included, proposes a founding: a
name that nobody had before, for those incarnations. Who accepts it starts etcd as a new member of the
cluster of that name, whose voters are always all of the list; so the cluster decides nothing before
most of the list have accepted. Rules, and what they are for:

1.  A member starts anew only for a founding that names its incarnation, and once. So no member ever
    forgets what it voted for: raft depends on that.
2.  Every voter but those is added by the cluster itself, in the place of the one that the machine
    had before, one at a time. So at least all but one of the list are voters at any time.
3.  A founding needs most of the list, empty. If there was a cluster before, then at least most of the
    list have nothing of it any more, and those who have are too few to decide, by rule 2.
4.  Where a member of a cluster is seen, nobody founds another: the cluster may have lost most of its members
    for a moment only. It does not answer before it has once been whole, so founders that came to
    nothing are in nobody's way.
5.  A founder that does not become a member within some seconds drops what it has and is empty again, as
    another incarnation; founders draw different times. It waits longer if a member is seen that has
    no leader, which may be of the same founding.

Which of several proposals wins does not matter, nor does an answer that is lost: no more than one founding can
have most of the list.

**Coming back.** A member whose process ended is started again with its data. If that does not last, it waits,
longer each time, and is started again: its data may be what the others wait for. It begins anew, with
rule 2, once it has waited for long and the others have a leader, and so all that was decided; or when
it has failed for `patience_s`. A member without a leader that sees so many without its cluster that the
rest are not most of the list knows that it will never decide again; after `patience_s` it begins anew too, so
that rule 4 does not hold the others up for ever. Until then the nodes of the lost cluster have long
stopped their workers.

Use: as `core.machine` has it. `Look` brings one `PeerSeen` for each machine.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.machine import Effect, Event, InvalidEvent, Story, Tick

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_S = 0.2
"""How often others are looked at by a machine that seeks; two of these after all are there, a cluster
is founded."""
SETTLE_S = 1.0
"""How long most of the list wait for the rest, and each for the one before it to propose."""
GUARD_S = 5.0
"""How often others are looked at by a member that serves."""
STALE_S = 3.0
"""How long what was seen of another machine counts."""
PROPOSE_S = 5.0
FOUND_S = 5.0
"""A founding that took longer, up to twice as long, is given up: etcd elects within two seconds."""
JOIN_S = 30.0
"""For etcd to catch up after it was added; the data are small."""
REST_S, REST_S_MAX = 0.5, 30.0
"""How long a machine whose etcd did not last waits before it begins anew; twice as long each time."""
DROP_S = 4.0
"""A machine that waited for so long knows that the others have a leader, if they say so: they notice
that they have none within two seconds."""
LASTING_S = 1.0
"""An etcd that served for so long is started again with its data if it ends."""


def majority(count: int) -> int:
    """Return how many of so many are most of them."""
    return count // 2 + 1


class Founding(msgspec.Struct, frozen=True):
    """A cluster that is to be: its name, and who is to begin with it."""

    id: str
    at_ms: int
    """By the clock of whoever proposed it."""
    roster: tuple[tuple[str, int], ...]
    """Machines, with the incarnation that each has without data."""

    def names(self, machine: str, incarnation: int) -> bool:
        return (machine, incarnation) in self.roster


# What is seen of another machine; None if it does not answer.


class Empty(msgspec.Struct, frozen=True, tag=True):
    """Its member has no data, and is ready to begin."""

    incarnation: int


class Serving(msgspec.Struct, frozen=True, tag=True):
    """Its member is one of a cluster."""

    cluster: str
    has_leader: bool


Sighting = Empty | Serving | None


class MemberState(Enum):
    """Where a machine's member is."""

    SEEKING = "seeking"
    PROPOSING = "proposing"
    FOUNDING = "founding"
    CLAIMING = "claiming"
    JOINING = "joining"
    SERVING = "serving"
    RESTARTING = "restarting"
    RESTING = "resting"
    """Its etcd did not last: it is not at the door, so that nobody counts on it. It may have data."""
    ENDED = "ended"


# Events.


class Begun(Event):
    """The machine has its ports, and nothing else."""


class PeerSeen(Event):
    """A machine was looked at."""

    machine: str
    sighting: Sighting


class FoundingProposed(Event):
    """Another machine proposes a founding."""

    founding: Founding


class ProposalAnswered(Event):
    """A machine that was sent the proposal accepts it, or does not or cannot be reached."""

    founding: str
    machine: str
    accepted: bool


class PlaceGiven(Event):
    """The cluster has a new voter: this machine's member that is yet to be started."""

    cluster: tuple[str, ...]
    """All voters, as etcd wants them."""


class PlaceRefused(Event):
    """The cluster did not change, or may have without an answer; asking again does no harm."""

    why: str


class EtcdReady(Event):
    """etcd is a member and answers; `cluster` is what etcd calls the cluster."""

    cluster: str


class EtcdEnded(Event):
    """The process of etcd is gone, though nobody asked for it."""

    why: str


class StopRequested(Event):
    """This machine's member is to end."""


MemberEvent = (
    Begun
    | PeerSeen
    | FoundingProposed
    | ProposalAnswered
    | PlaceGiven
    | PlaceRefused
    | EtcdReady
    | EtcdEnded
    | StopRequested
    | Tick
)


# Effects.


class OpenDoor(Effect):
    """Answer others that this machine is empty, with this incarnation, until `CloseDoor`."""

    incarnation: int


class CloseDoor(Effect):
    """Give the port to etcd."""


class Look(Effect):
    """Look at each of these machines, once; at this one's own member too, if it is among them."""

    machines: tuple[str, ...]


class Propose(Effect):
    """Send the founding to these; each brings a `ProposalAnswered`."""

    founding: Founding
    machines: tuple[str, ...]


class AcceptProposal(Effect):
    """Tell the one whose proposal this is that it is accepted; without this, that it is not."""


class StartNew(Effect):
    """Start etcd without data, as a member of a cluster that is to begin."""

    founding: Founding


class ClaimPlace(Effect):
    """Have the cluster remove the voter of this machine and add another; brings a `Place...`."""


class StartAdded(Effect):
    """Start etcd without data, as the voter that was added."""

    cluster: tuple[str, ...]


class StartAgain(Effect):
    """Start etcd with the data that it has."""


class DropEtcd(Effect):
    """Kill etcd, if it runs, and remove its data."""


class StopEtcd(Effect):
    """Stop etcd, if it runs, and remove its data."""


class Tell(Effect):
    """Tell the person what this machine waits for, which has changed."""

    state: MemberState
    empty: tuple[str, ...] = ()
    """Machines that wait too, this one included."""
    unseen: tuple[str, ...] = ()
    leaderless: tuple[str, ...] = ()
    """Machines whose cluster has no leader."""


MemberEffect = (
    OpenDoor
    | CloseDoor
    | Look
    | Propose
    | AcceptProposal
    | StartNew
    | ClaimPlace
    | StartAdded
    | StartAgain
    | DropEtcd
    | StopEtcd
    | Tell
)


class _Seen(msgspec.Struct, frozen=True):
    at: float
    sighting: Sighting


class ClusterMember:
    """The machine; `draw` returns random bits, so many that nobody draws the same."""

    def __init__(
        self,
        *,
        machine: str,
        machines: tuple[str, ...],
        patience_s: float,
        draw: Callable[[], int],
        wall_ms: Callable[[], int],
    ) -> None:
        self.state = MemberState.SEEKING
        self.incarnation = 0
        self.founding: Founding | None = None
        self.cluster = ""
        """What etcd calls the cluster that its data are of, once it is known."""
        self._machine, self._machines = machine, machines
        self._others = tuple(one for one in machines if one != machine)
        self._patience_s, self._draw, self._wall_ms = patience_s, draw, wall_ms
        self._seen: dict[str, _Seen] = {}
        self._looked_at = 0.0
        self._unanswered: set[str] = set()  # Of the last look, or of a proposal.
        self._accepted: set[str] = set()
        self._most_since: float | None = None  # Most of the list are empty.
        self._deadline: float | None = None  # Of the state.
        self._is_patient = False
        self._ready_at = 0.0
        self._failures = 0  # Ends of etcd in a row.
        self._rest_s = self._failing_since = 0.0
        self._told: Tell | None = None
        self._began = False
        self.story = Story("cluster", node=machine)

    def handle(self, now: float, event: MemberEvent, cause: str = "") -> list[MemberEffect]:
        """Take in one event; return what must now be done, in order."""
        state = self.state
        effects = self._handle(now, event)
        if any(not isinstance(one, Look) for one in effects) or self.state is not state:
            self.story.record(now, state, event, effects, cause)
        return effects

    def next_deadline(self, now: float) -> float | None:
        """Return when `Tick` is wanted next, or None."""
        del now
        if not self._began or self.state is MemberState.ENDED:
            return None
        times = [self._deadline, self._look_at()]
        if self.state is MemberState.SEEKING:
            times.append(self._proposal_at())
        return min((one for one in times if one is not None), default=None)

    def check(self) -> None:
        """Assert what must hold after every step."""
        founded = self.state in (MemberState.FOUNDING, MemberState.PROPOSING)
        assert not founded or self.founding is not None
        assert not self.founding or self.founding.names(self._machine, self.incarnation)

    def _look_at(self) -> float | None:
        """Return when the others are to be looked at again; one look ends before the next begins."""
        if self._unanswered or not self._others:
            return None
        if self.state in (MemberState.SEEKING, MemberState.FOUNDING):
            return self._looked_at + LOOK_S
        if self.state is MemberState.RESTING:
            return self._looked_at + LOOK_S if self.cluster else None
        guards = self.state in (MemberState.SERVING, MemberState.RESTARTING)
        return self._looked_at + GUARD_S if guards else None

    def _handle(self, now: float, event: MemberEvent) -> list[MemberEffect]:
        match event:
            case PeerSeen(machine, sighting):
                self._seen[machine] = _Seen(now, sighting)
                if self.state is not MemberState.PROPOSING:
                    self._unanswered.discard(machine)
                if self.state is MemberState.SEEKING:
                    return self._consider(now)
                return self._guard(now)
            case Tick():
                return self._tick(now)
            case FoundingProposed(founding):
                return self._proposed(now, founding)
            case ProposalAnswered(founding, machine, accepted):
                return self._answered(now, founding, machine, accepted=accepted)
            case EtcdReady(cluster):
                return self._ready(now, cluster)
            case EtcdEnded():
                return self._ended(now)
            case PlaceGiven(cluster):
                if self.state is not MemberState.CLAIMING:
                    return []
                self.state, self._deadline = MemberState.JOINING, now + JOIN_S
                return [CloseDoor(), StartAdded(cluster)]
            case PlaceRefused():
                if self.state is not MemberState.CLAIMING:
                    return []
                self.state, self._seen = MemberState.SEEKING, {}
                self._looked_at = now
                return []
            case Begun():
                if self._began:
                    raise InvalidEvent("a member begins once")
                self._began = True
                return self._begin_anew(now)
            case StopRequested():
                was, self.state = self.state, MemberState.ENDED
                door: list[MemberEffect] = [CloseDoor()] if was in _AT_THE_DOOR else []
                return [] if was is MemberState.ENDED else [*door, StopEtcd()]

    # Seeking.

    def _begin_anew(self, now: float) -> list[MemberEffect]:
        """Be empty, as nobody was before."""
        self.state, self.founding, self.cluster = MemberState.SEEKING, None, ""
        self.incarnation = self._draw()
        self._seen, self._most_since, self._deadline = {}, None, None
        self._unanswered = set()
        return [OpenDoor(self.incarnation), *self._look(now), *self._consider(now)]

    def _look(self, now: float) -> list[MemberEffect]:
        self._looked_at = now
        seeks = self.state in (MemberState.SEEKING, MemberState.FOUNDING)
        looked_at = self._others if seeks else self._machines
        self._unanswered = set(looked_at)
        return [Look(looked_at)] if looked_at else []

    def _consider(self, now: float) -> list[MemberEffect]:
        """Decide what is to be done about what is seen."""
        seen = self._sightings(now)
        serving = {name: one for name, one in seen.items() if isinstance(one, Serving)}
        if any(one.has_leader for one in serving.values()):
            self.state, self._most_since = MemberState.CLAIMING, None
            return [*self._tell(seen), ClaimPlace()]
        empty = self._empty(seen)
        if serving or len(empty) < majority(len(self._machines)):
            self._most_since = None
            return self._tell(seen)
        if self._most_since is None:
            self._most_since = now
        at = self._proposal_at()
        if at is None or now < at:
            return self._tell(seen)
        return self._propose(now, empty)

    def _proposal_at(self) -> float | None:
        """Return when this machine proposes a founding if nobody else does."""
        if self._most_since is None:
            return None
        empty = self._empty({name: one.sighting for name, one in self._seen.items()})
        turn = list(empty).index(self._machine)
        wait = 0 if len(empty) == len(self._machines) else 1
        return self._most_since + SETTLE_S * (turn + wait)

    def _empty(self, seen: dict[str, Sighting]) -> dict[str, int]:
        """Return the incarnations of the machines without data, in the order of the list."""
        found: dict[str, int] = {}
        for name in self._machines:
            one = seen.get(name)
            if name == self._machine:
                found[name] = self.incarnation
            elif isinstance(one, Empty):
                found[name] = one.incarnation
        return found

    def _sightings(self, now: float) -> dict[str, Sighting]:
        return {name: one.sighting for name, one in self._seen.items() if now - one.at <= STALE_S}

    def _tell(self, seen: dict[str, Sighting]) -> list[MemberEffect]:
        others = {name: seen.get(name) for name in self._others}
        tell = Tell(
            self.state,
            tuple(self._empty(seen)),
            tuple(name for name, one in others.items() if one is None),
            tuple(name for name, one in others.items() if isinstance(one, Serving)),
        )
        if self._unanswered or tell == self._told:
            return []  # Half a look would name those as missing that are only slower.
        self._told = tell
        return [tell]

    # Founding.

    def _propose(self, now: float, empty: dict[str, int]) -> list[MemberEffect]:
        drawn = f"{self._draw():016x}"
        self.founding = founding = Founding(drawn, self._wall_ms(), tuple(empty.items()))
        others = tuple(one for one in empty if one != self._machine)
        if not others:  # It is all of the list, or most of it, alone.
            return self._found(now, founding)
        self.state, self._deadline = MemberState.PROPOSING, now + PROPOSE_S
        self._unanswered, self._accepted = set(others), {self._machine}
        return [Propose(founding, others)]

    def _proposed(self, now: float, founding: Founding) -> list[MemberEffect]:
        # One that proposes itself may be accepted by others already.
        if self.state is not MemberState.SEEKING or not self._began:
            return []
        if not founding.names(self._machine, self.incarnation):
            return []  # It was for the data that this machine had before.
        self.founding = founding
        return [AcceptProposal(), *self._found(now, founding)]

    def _answered(
        self, now: float, founding: str, machine: str, *, accepted: bool
    ) -> list[MemberEffect]:
        proposal = self.founding
        if self.state is not MemberState.PROPOSING or proposal is None or proposal.id != founding:
            return []
        self._unanswered.discard(machine)
        if accepted:
            self._accepted.add(machine)
        return [] if self._unanswered else self._decide_proposal(now)

    def _decide_proposal(self, now: float) -> list[MemberEffect]:
        proposal, self._unanswered = self.founding, set()
        assert proposal is not None
        if len(self._accepted) >= majority(len(self._machines)):
            return self._found(now, proposal)
        # Those who accepted will find out; this machine has started nothing yet.
        self.state, self.founding, self._deadline = MemberState.SEEKING, None, None
        self._seen, self._most_since = {}, None
        return self._look(now)

    def _found(self, now: float, founding: Founding) -> list[MemberEffect]:
        self.state, self._is_patient = MemberState.FOUNDING, False
        # Each at another time: all that is needed is that they do not go on at once, for ever.
        self._deadline = now + FOUND_S * (1 + self._draw() % 1000 / 1000)
        return [CloseDoor(), StartNew(founding)]

    # etcd.

    def _ready(self, now: float, cluster: str) -> list[MemberEffect]:
        if self.state not in _STARTING:
            return []
        self.state, self.cluster, self._ready_at = MemberState.SERVING, cluster, now
        self._deadline, self.founding, self._told = None, None, None
        self._unanswered, self._seen, self._most_since = set(), {}, None
        self._looked_at = now
        return [Tell(self.state)]

    def _guard(self, now: float) -> list[MemberEffect]:
        """Give the cluster up once most of the list have had nothing of it for long."""
        if self.state not in (MemberState.SERVING, MemberState.RESTARTING):
            return []
        seen = {name: one.sighting for name, one in self._seen.items()}
        others = [
            one
            for one in seen.values()
            if isinstance(one, Empty) or (one is not None and one.cluster != self.cluster)
        ]
        if any(isinstance(one, Serving) and one.has_leader for one in others):
            return [DropEtcd(), *self._begin_anew(now)]  # Most of the list are in another cluster.
        own, count = seen.get(self._machine), len(self._machines)
        leads = isinstance(own, Serving) and own.has_leader
        if leads or count - len(others) >= majority(count):
            self._most_since = None
        elif self._most_since is None:
            self._most_since = now
        elif now - self._most_since >= self._patience_s:
            return [DropEtcd(), *self._begin_anew(now)]
        return []

    def _ended(self, now: float) -> list[MemberEffect]:
        if self.state is MemberState.SERVING and now - self._ready_at >= LASTING_S:
            # However long it takes: its data may be what the others wait for.
            self.state, self._failures = MemberState.RESTARTING, 0
            return [StartAgain()]
        if self.state not in _STARTING and self.state is not MemberState.SERVING:
            return []
        if not self._failures:
            self._failing_since = now
        self._rest_s = rest_s = min(REST_S_MAX, REST_S * 2**self._failures)
        self._failures += 1
        was_member = self.state in (MemberState.SERVING, MemberState.RESTARTING)
        self.state, self.founding, self._deadline = MemberState.RESTING, None, now + rest_s
        self._seen = {}
        if was_member:
            return self._look(now)
        self.cluster = ""
        return [DropEtcd()]

    def _tick(self, now: float) -> list[MemberEffect]:
        if not self._began or self.state is MemberState.ENDED:
            return []
        if self._deadline is not None and now >= self._deadline:
            return self._late(now)
        effects: list[MemberEffect] = []
        if self.state is MemberState.SEEKING:
            effects += self._consider(now)
        at = self._look_at()
        return effects + (self._look(now) if at is not None and now >= at else [])

    def _late(self, now: float) -> list[MemberEffect]:
        seen = [one for one in self._sightings(now).values() if isinstance(one, Serving)]
        waits = bool(seen) and not any(one.has_leader for one in seen)
        match self.state:
            case MemberState.PROPOSING:
                return self._decide_proposal(now)
            case MemberState.RESTING if not self.cluster:
                return self._begin_anew(now)
            case MemberState.RESTING if self._keeps_data(now, led=bool(seen) and not waits):
                self.state, self._deadline = MemberState.RESTARTING, None
                return [StartAgain()]
            case MemberState.FOUNDING if waits and not self._is_patient:
                self._is_patient, self._deadline = True, now + JOIN_S
                return []
            case _:
                return [DropEtcd(), *self._begin_anew(now)]

    def _keeps_data(self, now: float, *, led: bool) -> bool:
        """Whether others may lack the data with which etcd does not last."""
        if now - self._failing_since >= self._patience_s:
            return False  # The nodes have given up by now.
        return not led or self._rest_s < DROP_S


_AT_THE_DOOR = (MemberState.SEEKING, MemberState.PROPOSING, MemberState.CLAIMING)
_STARTING = (MemberState.FOUNDING, MemberState.JOINING, MemberState.RESTARTING)
