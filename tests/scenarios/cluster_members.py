"""Player of `ClusterMember`: one machine of a list, and its probes of the others.

Each input begins with the time::

    0 list abc me b              a machine that has not started; it draws 1, 2, 3 ...; its etcd may be
                                 `unsafe`
    0 begins / 9 stops           it holds its ports; it must stop
    1 probed a empty 7           the outcome of a probe; also `c in X with leader`,
                                 `c in X without leader` and `a unreachable`
    1 proposed F a=7 b=1         another machine proposes a bootstrap for these incarnations
    1 answered a yes             the answer to this machine's last proposal; or `no`
    1 voter replaced             the cluster has a voter for this machine; or `voter not replaced`
    1 ready X / 1 exited         etcd serves in the cluster X; etcd exited
    1 tick

The output has all effects, the machine's state, and the time of its next `Tick`.
"""

from __future__ import annotations

from typing import Any

from transcripts import Clock

from holdfast.core.etcd.cluster import (
    Bootstrap,
    BootstrapProposed,
    ClusterMember,
    EtcdEnded,
    EtcdReady,
    MachineProbed,
    MemberEvent,
    MemberState,
    MemberStopRequested,
    NoData,
    PortsHeld,
    ProbedState,
    ProbeMachines,
    ProposalAnswered,
    Propose,
    ReportMajorityLost,
    ReportProgress,
    ReportProtection,
    Serving,
    StartAddedEtcd,
    StartNewEtcd,
    StartProbeServer,
    VoterNotReplaced,
    VoterReplaced,
)
from holdfast.core.machine import TICK, InvalidEvent

PATIENCE_S = 60.0


class ClusterPlayer:
    """Plays the inputs to one machine at a time."""

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
                keeps_data="unsafe" not in words,
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
        deadline = f" until {at:g}" if at is not None else ""
        return [*map(described, effects), f"{member.state.value}{deadline}"]

    def _draw(self) -> int:
        self._drawn += 1
        return self._drawn

    @staticmethod
    def _event(member: ClusterMember, words: list[str]) -> MemberEvent:
        match words:
            case ["begins"]:
                return PortsHeld()
            case ["stops"]:
                return MemberStopRequested()
            case ["probed", machine, *what]:
                return MachineProbed(machine, probed_state(what))
            case ["proposed", name, *roster]:
                pairs = (one.split("=") for one in roster)
                return BootstrapProposed(
                    Bootstrap(name, 1000, tuple((one, int(number)) for one, number in pairs))
                )
            case ["answered", machine, answer]:
                bootstrap = member.bootstrap.id if member.bootstrap is not None else "none"
                return ProposalAnswered(bootstrap, machine, answer == "yes")
            case ["voter", "replaced"]:
                return VoterReplaced(("a=A", "b=B", "c=C"))
            case ["voter", "not", "replaced"]:
                return VoterNotReplaced("another machine is being added")
            case ["ready", cluster]:
                return EtcdReady(cluster)
            case ["exited"]:
                return EtcdEnded("killed")
            case ["tick"]:
                return TICK
        raise AssertionError(f"not an input: {words}")


def probed_state(words: list[str]) -> ProbedState:
    match words:
        case ["empty", incarnation]:
            return NoData(int(incarnation))
        case ["in", cluster, "with" | "without" as how, "leader"]:
            return Serving(cluster, how == "with")
    return None


def described(effect: Any) -> str:
    match effect:
        case StartProbeServer(incarnation):
            return f"start probe server as {incarnation}"
        case ProbeMachines(machines):
            return f"probe {' '.join(machines)}"
        case Propose(bootstrap, machines):
            return f"propose {shown(bootstrap)} to {' '.join(machines)}"
        case StartNewEtcd(bootstrap):
            return f"start new etcd for {shown(bootstrap)}"
        case StartAddedEtcd(cluster):
            return f"start added etcd in {' '.join(cluster)}"
        case ReportProgress(state, empty, unreachable, leaderless):
            parts = [("empty", empty), ("unreachable", unreachable), ("leaderless", leaderless)]
            text = "; ".join(f"{name} {' '.join(names)}" for name, names in parts if names)
            return f"report: {state.value}{f' ({text})' if text else ''}"
        case ReportProtection(machines):
            return (
                f"report: unprotected without {' '.join(machines)}"
                if machines
                else "report: protected"
            )
        case ReportMajorityLost(machines):
            return f"report: majority lost at {' '.join(machines)}"
    words = "".join(f" {one.lower()}" if one.isupper() else one for one in type(effect).__name__)
    return words.strip()


def shown(bootstrap: Bootstrap) -> str:
    roster = " ".join(f"{one}={number}" for one, number in bootstrap.roster)
    return f"{bootstrap.id.lstrip('0')} ({roster})"
