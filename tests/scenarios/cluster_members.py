"""Player of `ClusterMember`: one machine of a list, and what it sees of the others.

Each input begins with the time::

    0 list abc me b              a machine that has not begun; it draws 1, 2, 3 ...
    0 begins / 9 stops           with its ports, and at the end
    1 sees a empty 7 / c in X led / c in X alone / a nothing
    1 proposed F a=7 b=1         somebody proposes a founding for these incarnations
    1 answered a yes             to what this machine proposed last; or no
    1 place / 1 no place         the cluster has a voter for it, or not
    1 ready X / 1 ended          etcd
    1 tick

Below is all that is to be done, and where the machine is then, with when it wants to be woken.
"""

from __future__ import annotations

from typing import Any

from transcripts import Clock

from holdfast.core.etcd.cluster import (
    Begun,
    ClusterMember,
    Empty,
    EtcdEnded,
    EtcdReady,
    Founding,
    FoundingProposed,
    Look,
    MemberEvent,
    MemberState,
    OpenDoor,
    PeerSeen,
    PlaceGiven,
    PlaceRefused,
    ProposalAnswered,
    Propose,
    Serving,
    Sighting,
    StartAdded,
    StartNew,
    StopRequested,
    Tell,
)
from holdfast.core.machine import TICK, InvalidEvent

PATIENCE_S = 60.0


class ClusterPlayer:
    """Plays to one machine at a time."""

    def __init__(self) -> None:
        self.states: set[MemberState] = set()
        self.events: set[type] = set()
        self.effects: set[type] = set()
        self._clock = Clock()
        self._member: ClusterMember | None = None
        self._drawn = 0

    def play(self, line: str) -> list[str]:
        time, *words = line.split()
        if words[0] == "list":
            self._clock, self._drawn = Clock(), 0
            self._member = ClusterMember(
                machine=words[3],
                machines=tuple(words[1]),
                patience_s=PATIENCE_S,
                draw=self._draw,
                wall_ms=lambda: 1000,
            )
            return []
        member, now = self._member, self._clock.read(time)
        assert member is not None
        event = self._event(member, words)
        self.events.add(type(event))
        try:
            effects = member.handle(now, event)
        except InvalidEvent as error:
            return [f"InvalidEvent: {error}"]
        member.check()
        self.states.add(member.state)
        self.effects |= {type(one) for one in effects}
        at = member.next_deadline(now)
        awake = f" until {at:g}" if at is not None else ""
        return [*map(described, effects), f"{member.state.value}{awake}"]

    def _draw(self) -> int:
        self._drawn += 1
        return self._drawn

    @staticmethod
    def _event(member: ClusterMember, words: list[str]) -> MemberEvent:
        match words:
            case ["begins"]:
                return Begun()
            case ["stops"]:
                return StopRequested()
            case ["sees", machine, *what]:
                return PeerSeen(machine, sighting(what))
            case ["proposed", name, *roster]:
                pairs = (one.split("=") for one in roster)
                return FoundingProposed(
                    Founding(name, 1000, tuple((one, int(number)) for one, number in pairs))
                )
            case ["answered", machine, answer]:
                founding = member.founding.id if member.founding is not None else "none"
                return ProposalAnswered(founding, machine, answer == "yes")
            case ["place"]:
                return PlaceGiven(("a=A", "b=B", "c=C"))
            case ["no", "place"]:
                return PlaceRefused("another machine is being added")
            case ["ready", cluster]:
                return EtcdReady(cluster)
            case ["ended"]:
                return EtcdEnded("killed")
            case ["tick"]:
                return TICK
        raise AssertionError(f"not an input: {words}")


def sighting(words: list[str]) -> Sighting:
    match words:
        case ["empty", incarnation]:
            return Empty(int(incarnation))
        case ["in", cluster, how]:
            return Serving(cluster, how == "led")
    return None


def described(effect: Any) -> str:
    match effect:
        case OpenDoor(incarnation):
            return f"open the door as {incarnation}"
        case Look(machines):
            return f"look at {' '.join(machines)}"
        case Propose(founding, machines):
            return f"propose {shown(founding)} to {' '.join(machines)}"
        case StartNew(founding):
            return f"start etcd anew for {shown(founding)}"
        case StartAdded(cluster):
            return f"start etcd as added to {' '.join(cluster)}"
        case Tell(state, empty, unseen, leaderless):
            parts = [("empty", empty), ("unseen", unseen), ("leaderless", leaderless)]
            told = "; ".join(f"{name} {' '.join(those)}" for name, those in parts if those)
            return f"tell: {state.value}{f' ({told})' if told else ''}"
    words = "".join(f" {one.lower()}" if one.isupper() else one for one in type(effect).__name__)
    return words.strip()


def shown(founding: Founding) -> str:
    roster = " ".join(f"{one}={number}" for one, number in founding.roster)
    return f"{founding.id.lstrip('0')} ({roster})"
