"""The state machine of one etcd member of a job's cluster (`--ha`): `ClusterMember`.

A list names the machines (hosts); each runs one member of etcd. They start in any order, and some may never start.
At any time a machine may be lost with its member's data, and return without data. Knowing only the list,
the machines must form one cluster, and never two clusters that both make decisions.

::

    DISCOVERING ── a majority is empty ──► PROPOSING ── a majority accepts ──► BOOTSTRAPPING ──┐
     ▲  │ └── accepts another machine's proposal ────────────────────────────► BOOTSTRAPPING ──┤
     │  └── a cluster has a leader ──► REPLACING ── voter replaced ──► JOINING ────────────────┤
     │                                                                                         ▼
     ├── time out, or an unsafe etcd exited: the data are dropped ──────────────────────── SERVING
     └── give up ── BACKING_OFF ◄── etcd exited again ── RESTARTING ◄── etcd exited ───────────┘

**Bootstrap.** A machine without data responds to probes with its *incarnation*: a number that it drew when
it became empty. If a machine finds that a majority of the list is empty, itself included, it proposes a
bootstrap: a new cluster name, and those incarnations. A machine that accepts starts etcd as a new member of
that cluster. The voters are always all machines of the list, so the cluster decides nothing before a
majority has accepted. The rules, and their reasons:

1.  A member starts without data only for a bootstrap that names its incarnation, and only once. So no
    member forgets its votes; raft depends on that.
2.  The cluster itself adds all later voters, one at a time, each in place of the earlier voter of the
    same machine. So at any time at most one machine of the list is not a voter.
3.  A bootstrap requires that a majority of the list is empty. If there was a cluster before, that majority
    has none of its data, and by rule 2 the remaining members are too few to decide anything.
4.  If a machine sees a member of a cluster, it proposes no bootstrap: the cluster may only have lost its
    majority for a moment. A member does not respond to probes before its cluster has had a majority, so
    a failed bootstrap does not block others.
5.  If a bootstrapping machine does not become a member within some seconds, it drops its data and
    becomes empty, as a new incarnation. The time is random. It waits longer if it sees a member without a
    leader, which may belong to the same bootstrap.

If there are several proposals, it does not matter which one succeeds, nor whether a response is lost: at
most one bootstrap can have a majority of the list.

**Restart.** If etcd exits, it is restarted with its data, because the other members may need them. If it
exits again soon, the machine backs off, longer each time. After a long backoff, if the others have a leader
(and thus all committed entries), the machine drops its data and joins by rule 2. Once etcd has failed for
`patience_s`, the machine does so in any case. A member without a leader may find that a majority of the list
has no data of its cluster, so the cluster can never decide again. After `patience_s` it drops its data, too;
otherwise rule 4 would block the others forever. By then the nodes of the lost cluster have stopped their workers.

**Protection.** A job survives the loss of any machine if one member more than a majority serves. The nodes of the job
may use a new cluster once every machine of the list that responds is a member, at the latest after `OPEN_S`. From then
on, the first machine of the list that serves reports which machines are missing whenever the job is not protected.

**Unsafe etcd.** Some versions of etcd can damage their data when they are killed (`keeps_data` is false). Such an etcd
never restarts with its data: when it exits, the machine drops them and joins by rule 2, like a replaced machine. If a
majority exits at once, the cluster is lost, as above. Only a list of one machine keeps its data, because no other
member has a copy.

Use: follow the contract of `core.machine`. `ProbeMachines` leads to one `MachineProbed` per machine.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.machine import Effect, Event, InvalidEvent, Story, Tick

if TYPE_CHECKING:
    from collections.abc import Callable

PROBE_INTERVAL_S = 0.2
"""The interval of probes while a machine discovers the others."""
SETTLE_S = 1.0
"""How long a machine waits for the rest of the list once a majority is empty. It waits this long again for
each empty machine before it in the list, because that machine proposes first."""
SERVING_PROBE_INTERVAL_S = 5.0
"""The interval of probes by a member that serves."""
MISSING_PROBE_INTERVAL_S = 2.0
"""The same, while a machine of the list does not serve."""
OPEN_S = 5.0
"""How long the nodes of a new cluster wait for machines that respond but are not members yet. A machine that joins
needs one to three seconds."""
UNPROTECTED_S = 3.0
"""A shorter loss of protection, such as a restart of etcd, is not reported."""
PROBE_VALID_S = 3.0
"""How long the result of a probe is used."""
PROPOSE_S = 5.0
BOOTSTRAP_S = 5.0
"""A machine gives up a bootstrap after a random time between this and twice this. etcd elects a leader
within two seconds."""
JOIN_S = 30.0
"""How long an added member may take to catch up; the data are small."""
BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
"""How long a machine waits if its etcd exits shortly after its start; doubles each time."""
LEADER_REPORT_VALID_S = 4.0
"""After a backoff of this length, the other members' report that they have a leader is reliable: they
detect a lost leader within two seconds."""
STABLE_S = 1.0
"""If etcd exits after it served for this long, it is restarted immediately with its data."""


def majority(count: int) -> int:
    """Return the smallest majority of `count`."""
    return count // 2 + 1


class Bootstrap(msgspec.Struct, frozen=True):
    """A proposal to bootstrap a new cluster."""

    id: str
    """The name of the cluster."""
    at_ms: int
    """The time of the proposal, by the proposer's clock."""
    roster: tuple[tuple[str, int], ...]
    """The machines that may start a new member, each with its incarnation."""

    def names(self, machine: str, incarnation: int) -> bool:
        return (machine, incarnation) in self.roster


# The state of a machine according to a probe; None if it did not respond.


class NoData(msgspec.Struct, frozen=True, tag=True):
    """The machine's member has no data, and the machine is ready to start it."""

    incarnation: int


class Serving(msgspec.Struct, frozen=True, tag=True):
    """The machine runs a member of a cluster."""

    cluster: str
    has_leader: bool


ProbedState = NoData | Serving | None


class MemberState(Enum):
    """The state of this machine's member."""

    DISCOVERING = "discovering"
    PROPOSING = "proposing"
    BOOTSTRAPPING = "bootstrapping"
    REPLACING = "replacing"
    JOINING = "joining"
    SERVING = "serving"
    RESTARTING = "restarting"
    BACKING_OFF = "backing off"
    """etcd exited shortly after its start. The machine may have data. It does not respond to probes, so
    that the others do not count it."""
    ENDED = "ended"


# Events.


class PortsHeld(Event):
    """The machine holds its ports; its member has not started."""


class MachineProbed(Event):
    """A probe of a machine ended."""

    machine: str
    state: ProbedState


class BootstrapProposed(Event):
    """Another machine proposes a bootstrap."""

    bootstrap: Bootstrap


class ProposalAnswered(Event):
    """A machine accepted the proposal, rejected it, or cannot be reached."""

    bootstrap: str
    machine: str
    accepted: bool


class VoterReplaced(Event):
    """The cluster has a new voter for this machine, whose member is about to start."""

    cluster: tuple[str, ...]
    """All voters, in the format of etcd's flag."""


class VoterNotReplaced(Event):
    """The voter was not replaced, as far as this machine knows. A retry does no harm."""

    why: str


class EtcdReady(Event):
    """etcd serves as a member; `cluster` is the cluster's id in etcd."""

    cluster: str


class EtcdEnded(Event):
    """The etcd process exited, although nothing had requested it."""

    why: str


class MemberStopRequested(Event):
    """This machine's member must stop."""


MemberEvent = (
    PortsHeld
    | MachineProbed
    | BootstrapProposed
    | ProposalAnswered
    | VoterReplaced
    | VoterNotReplaced
    | EtcdReady
    | EtcdEnded
    | MemberStopRequested
    | Tick
)


# Effects.


class StartProbeServer(Effect):
    """Until `StopProbeServer`, answer probes with this incarnation, which shows that this machine is empty."""

    incarnation: int


class StopProbeServer(Effect):
    """Stop responding to probes; etcd needs the port."""


class ProbeMachines(Effect):
    """Probe each of these machines once, including this one if listed; the outcomes are `MachineProbed`."""

    machines: tuple[str, ...]


class Propose(Effect):
    """Send the proposal to these machines; each leads to one `ProposalAnswered`."""

    bootstrap: Bootstrap
    machines: tuple[str, ...]


class AcceptProposal(Effect):
    """Respond to the proposer that the proposal is accepted; without this effect it is rejected."""


class StartNewEtcd(Effect):
    """Start etcd without data, as a member of a new cluster."""

    bootstrap: Bootstrap


class ReplaceVoter(Effect):
    """Have the cluster replace this machine's voter; leads to `VoterReplaced` or `VoterNotReplaced`."""


class StartAddedEtcd(Effect):
    """Start etcd without data, as the added voter of an existing cluster."""

    cluster: tuple[str, ...]


class RestartEtcd(Effect):
    """Start etcd with its data."""


class DropEtcd(Effect):
    """Kill etcd, if it runs, and remove its data."""


class StopEtcd(Effect):
    """Stop etcd gracefully, if it runs, and remove its data."""


class ReportProgress(Effect):
    """Inform the user of a change in what this machine waits for."""

    state: MemberState
    empty: tuple[str, ...] = ()
    """Machines without data, including this one."""
    unreachable: tuple[str, ...] = ()
    leaderless: tuple[str, ...] = ()
    """Machines whose cluster has no leader."""


class ReportMajorityLost(Effect):
    """Inform the user that the cluster cannot recover: these machines are a majority and have no data of it."""

    machines: tuple[str, ...]


class OpenCluster(Effect):
    """Let the nodes of the job use the cluster, if they do not yet."""


class ReportProtection(Effect):
    """Inform all nodes which machines are missing, so that the job does not survive a loss; none if it does."""

    missing: tuple[str, ...]


MemberEffect = (
    StartProbeServer
    | StopProbeServer
    | ProbeMachines
    | Propose
    | AcceptProposal
    | StartNewEtcd
    | ReplaceVoter
    | StartAddedEtcd
    | RestartEtcd
    | DropEtcd
    | StopEtcd
    | ReportProgress
    | ReportMajorityLost
    | OpenCluster
    | ReportProtection
)


class _Probed(msgspec.Struct, frozen=True):
    at: float
    state: ProbedState


class ClusterMember:
    """The machine of one host's member; `draw` returns enough random bits to be unique."""

    def __init__(
        self,
        *,
        machine: str,
        machines: tuple[str, ...],
        patience_s: float,
        draw: Callable[[], int],
        wall_ms: Callable[[], int],
        keeps_data: bool = True,
    ) -> None:
        """`keeps_data` is false if etcd may damage its data when it is killed."""
        self.state = MemberState.DISCOVERING
        self.incarnation = 0
        self.bootstrap: Bootstrap | None = None
        self.cluster = ""
        """The id of the cluster that the data belong to; empty while unknown."""
        self._machine, self._machines = machine, machines
        self._others = tuple(one for one in machines if one != machine)
        self._patience_s, self._draw, self._wall_ms = patience_s, draw, wall_ms
        self._keeps_data = keeps_data or not self._others
        self._probed: dict[str, _Probed] = {}
        self._probed_at = 0.0
        self._unanswered: set[str] = set()  # Machines that have yet to answer a probe or proposal.
        self._accepted: set[str] = set()
        # Discovering: since when a majority is empty. Serving: since when this cluster has lacked a majority.
        self._majority_since: float | None = None
        self._deadline: float | None = None  # The deadline of the current state.
        self._is_extended = False
        self._ready_at = 0.0
        self._failures = 0  # Consecutive exits of etcd.
        self._backoff_s = self._failing_since = 0.0
        self._reported: ReportProgress | ReportMajorityLost | None = None
        self._is_open = False
        # Machines that should become members: those that responded, or that bootstrap with this one.
        self._expected: set[str] = set()
        self._unprotected_since: float | None = None
        self._published: tuple[str, ...] | None = None  # The last `ReportProtection`.
        self._began = False
        self.story = Story("cluster", node=machine)

    def handle(self, now: float, event: MemberEvent, cause: str = "") -> list[MemberEffect]:
        """Handle one event; return the effects in order."""
        state = self.state
        effects = self._handle(now, event)
        if any(not isinstance(one, ProbeMachines) for one in effects) or self.state is not state:
            self.story.record(now, state, event, effects, cause)
        return effects

    def next_deadline(self, now: float) -> float | None:
        """Return when the next `Tick` is due, or None."""
        del now
        if not self._began or self.state is MemberState.ENDED:
            return None
        times = [self._deadline, self._next_probe_at()]
        if self.state is MemberState.DISCOVERING:
            times.append(self._proposal_at())
        if self.state is MemberState.SERVING and not self._is_open:
            times.append(self._ready_at + OPEN_S)
        return min((one for one in times if one is not None), default=None)

    def check(self) -> None:
        """Assert the invariants."""
        has_proposal = self.state in (MemberState.BOOTSTRAPPING, MemberState.PROPOSING)
        assert not has_proposal or self.bootstrap is not None
        assert not self.bootstrap or self.bootstrap.names(self._machine, self.incarnation)

    def _next_probe_at(self) -> float | None:
        """Return when to probe the machines again; None while probes are under way."""
        if self._unanswered or not self._others:
            return None
        if self.state in (MemberState.DISCOVERING, MemberState.BOOTSTRAPPING):
            return self._probed_at + PROBE_INTERVAL_S
        if self.state is MemberState.BACKING_OFF:
            return self._probed_at + PROBE_INTERVAL_S if self.cluster else None
        if self.state is MemberState.SERVING and not self._is_open:
            return self._probed_at + PROBE_INTERVAL_S
        if self.state is MemberState.SERVING and self._unprotected_since is not None:
            return self._probed_at + MISSING_PROBE_INTERVAL_S
        is_member = self.state in (MemberState.SERVING, MemberState.RESTARTING)
        return self._probed_at + SERVING_PROBE_INTERVAL_S if is_member else None

    def _handle(self, now: float, event: MemberEvent) -> list[MemberEffect]:
        match event:
            case MachineProbed(machine, state):
                self._probed[machine] = _Probed(now, state)
                if state is not None:
                    self._expected.add(machine)
                if self.state is not MemberState.PROPOSING:
                    self._unanswered.discard(machine)
                if self.state is MemberState.DISCOVERING:
                    return self._decide(now)
                return self._check_cluster(now) + self._protect(now)
            case Tick():
                return self._tick(now)
            case BootstrapProposed(bootstrap):
                return self._accept_proposal(now, bootstrap)
            case ProposalAnswered(bootstrap, machine, accepted):
                return self._answered(now, bootstrap, machine, accepted=accepted)
            case EtcdReady(cluster):
                return self._etcd_ready(now, cluster)
            case EtcdEnded():
                return self._etcd_ended(now)
            case VoterReplaced(cluster):
                if self.state is not MemberState.REPLACING:
                    return []
                self.state, self._deadline = MemberState.JOINING, now + JOIN_S
                return [StopProbeServer(), StartAddedEtcd(cluster)]
            case VoterNotReplaced():
                if self.state is not MemberState.REPLACING:
                    return []
                self.state, self._probed = MemberState.DISCOVERING, {}
                self._probed_at = now
                return []
            case PortsHeld():
                if self._began:
                    raise InvalidEvent("a member begins once")
                self._began = True
                return self._start_over(now)
            case MemberStopRequested():
                was, self.state = self.state, MemberState.ENDED
                first: list[MemberEffect] = [StopProbeServer()] if was in _RESPONDING else []
                return [] if was is MemberState.ENDED else [*first, StopEtcd()]

    # Discovery.

    def _start_over(self, now: float) -> list[MemberEffect]:
        """Start without data, as a new incarnation."""
        self.state, self.bootstrap, self.cluster = MemberState.DISCOVERING, None, ""
        self.incarnation = self._draw()
        self._probed, self._majority_since, self._deadline = {}, None, None
        self._unanswered, self._expected, self._is_open = set(), set(), False
        self._published = self._unprotected_since = None
        return [StartProbeServer(self.incarnation), *self._probe(now), *self._decide(now)]

    def _probe(self, now: float) -> list[MemberEffect]:
        self._probed_at = now
        is_starting = self.state in (MemberState.DISCOVERING, MemberState.BOOTSTRAPPING)
        machines = self._others if is_starting else self._machines
        self._unanswered = set(machines)
        return [ProbeMachines(machines)] if machines else []

    def _decide(self, now: float) -> list[MemberEffect]:
        """Join a cluster, propose a bootstrap, or keep waiting, according to the probes."""
        states = self._recent_states(now)
        serving = {name: one for name, one in states.items() if isinstance(one, Serving)}
        if any(one.has_leader for one in serving.values()):
            self.state, self._majority_since = MemberState.REPLACING, None
            return [*self._report(states), ReplaceVoter()]
        empty = self._empty(states)
        if serving or len(empty) < majority(len(self._machines)):
            self._majority_since = None
            return self._report(states)
        if self._majority_since is None:
            self._majority_since = now
        at = self._proposal_at()
        if at is None or now < at:
            return self._report(states)
        return self._propose(now, empty)

    def _proposal_at(self) -> float | None:
        """Return when this machine proposes a bootstrap, unless another machine does so first."""
        if self._majority_since is None:
            return None
        empty = self._empty({name: one.state for name, one in self._probed.items()})
        turn = list(empty).index(self._machine)
        wait = 0 if len(empty) == len(self._machines) else 1
        return self._majority_since + SETTLE_S * (turn + wait)

    def _empty(self, states: dict[str, ProbedState]) -> dict[str, int]:
        """Return the incarnations of the machines without data, in the order of the list."""
        found: dict[str, int] = {}
        for name in self._machines:
            one = states.get(name)
            if name == self._machine:
                found[name] = self.incarnation
            elif isinstance(one, NoData):
                found[name] = one.incarnation
        return found

    def _recent_states(self, now: float) -> dict[str, ProbedState]:
        return {
            name: one.state for name, one in self._probed.items() if now - one.at <= PROBE_VALID_S
        }

    def _report(self, states: dict[str, ProbedState]) -> list[MemberEffect]:
        others = {name: states.get(name) for name in self._others}
        report = ReportProgress(
            self.state,
            tuple(self._empty(states)),
            tuple(name for name, one in others.items() if one is None),
            tuple(name for name, one in others.items() if isinstance(one, Serving)),
        )
        if self._unanswered or report == self._reported:
            return []  # Wait for all probes: a slow machine is not missing.
        self._reported = report
        return [report]

    # Bootstrapping.

    def _propose(self, now: float, empty: dict[str, int]) -> list[MemberEffect]:
        drawn = f"{self._draw():016x}"
        self.bootstrap = bootstrap = Bootstrap(drawn, self._wall_ms(), tuple(empty.items()))
        others = tuple(one for one in empty if one != self._machine)
        if not others:  # This machine is the whole list.
            return self._start_bootstrap(now, bootstrap)
        self.state, self._deadline = MemberState.PROPOSING, now + PROPOSE_S
        self._unanswered, self._accepted = set(others), {self._machine}
        return [Propose(bootstrap, others)]

    def _accept_proposal(self, now: float, bootstrap: Bootstrap) -> list[MemberEffect]:
        # While this machine itself proposes, others may already have accepted its proposal.
        if self.state is not MemberState.DISCOVERING or not self._began:
            return []
        if not bootstrap.names(self._machine, self.incarnation):
            return []  # The proposal was for an earlier incarnation.
        self.bootstrap = bootstrap
        return [AcceptProposal(), *self._start_bootstrap(now, bootstrap)]

    def _answered(
        self, now: float, bootstrap: str, machine: str, *, accepted: bool
    ) -> list[MemberEffect]:
        proposal = self.bootstrap
        if self.state is not MemberState.PROPOSING or proposal is None or proposal.id != bootstrap:
            return []
        self._unanswered.discard(machine)
        if accepted:
            self._accepted.add(machine)
        return [] if self._unanswered else self._decide_proposal(now)

    def _decide_proposal(self, now: float) -> list[MemberEffect]:
        proposal, self._unanswered = self.bootstrap, set()
        assert proposal is not None
        if len(self._accepted) >= majority(len(self._machines)):
            return self._start_bootstrap(now, proposal)
        # Machines that accepted will time out. This machine has not started anything.
        self.state, self.bootstrap, self._deadline = MemberState.DISCOVERING, None, None
        self._probed, self._majority_since = {}, None
        return self._probe(now)

    def _start_bootstrap(self, now: float, bootstrap: Bootstrap) -> list[MemberEffect]:
        self.state, self._is_extended = MemberState.BOOTSTRAPPING, False
        # A random deadline per machine, so that they do not give up at the same time every time.
        self._deadline = now + BOOTSTRAP_S * (1 + self._draw() % 1000 / 1000)
        return [StopProbeServer(), StartNewEtcd(bootstrap)]

    # etcd.

    def _etcd_ready(self, now: float, cluster: str) -> list[MemberEffect]:
        if self.state not in _STARTING:
            return []
        self.state, self.cluster, self._ready_at = MemberState.SERVING, cluster, now
        if self.bootstrap is not None:
            self._expected |= dict(self.bootstrap.roster).keys()
        self._deadline, self.bootstrap, self._reported = None, None, None
        self._unanswered, self._probed, self._majority_since = set(), {}, None
        self._probed_at = now
        self._published = self._unprotected_since = None
        if self._is_open:
            return [ReportProgress(self.state)]
        if self._may_survive_loss:
            return [ReportProgress(self.state), *self._probe(now)]
        self._is_open = True
        return [ReportProgress(self.state), OpenCluster()]

    @property
    def _may_survive_loss(self) -> bool:
        """Whether the list has enough machines to survive the loss of one."""
        return len(self._machines) > 2

    def _protect(self, now: float) -> list[MemberEffect]:
        """Open the cluster to the nodes, and report whether the job survives the loss of a machine."""
        if self.state is not MemberState.SERVING or not self._may_survive_loss:
            return []
        is_late = not self._is_open and now >= self._ready_at + OPEN_S
        if self._unanswered and not is_late:
            return []  # Wait for all probes: a slow machine is not missing.
        states = {name: one.state for name, one in self._probed.items()}
        serving = [
            name
            for name in self._machines
            if name == self._machine
            or (isinstance(one := states.get(name), Serving) and one.cluster == self.cluster)
        ]
        opens = False
        if not self._is_open:
            if self._expected - {*serving} and not is_late:
                return []
            self._is_open = opens = True
        missing: tuple[str, ...] = ()
        if len(serving) - 1 < majority(len(self._machines)):
            missing = tuple(name for name in self._machines if name not in serving)
        if not missing:
            self._unprotected_since = None
        elif self._unprotected_since is None:
            self._unprotected_since = now
        effects: list[MemberEffect] = []
        since = self._unprotected_since
        is_due = opens or since is None or now - since >= UNPROTECTED_S
        if serving[0] != self._machine:
            self._published = None  # Another member reports.
        elif is_due and missing != self._published:
            self._published = missing
            effects.append(ReportProtection(missing))
        return [*effects, OpenCluster()] if opens else effects

    def _check_cluster(self, now: float) -> list[MemberEffect]:
        """Give the cluster up if a majority of the list has had no data of it for `patience_s`."""
        if self.state not in (MemberState.SERVING, MemberState.RESTARTING):
            return []
        states = {name: one.state for name, one in self._probed.items()}
        others = {
            name: one
            for name, one in states.items()
            if isinstance(one, NoData) or (one is not None and one.cluster != self.cluster)
        }
        if any(isinstance(one, Serving) and one.has_leader for one in others.values()):
            return [DropEtcd(), *self._start_over(now)]  # A majority is in another cluster.
        own, count = states.get(self._machine), len(self._machines)
        leads = isinstance(own, Serving) and own.has_leader
        if leads or count - len(others) >= majority(count):
            self._majority_since = self._reported = None
            return []
        if self._majority_since is None:
            self._majority_since = now
        elif now - self._majority_since >= self._patience_s:
            return [DropEtcd(), *self._start_over(now)]
        report = ReportMajorityLost(tuple(name for name in self._machines if name in others))
        if self._unanswered or report == self._reported:
            return []
        self._reported = report
        return [report]

    def _etcd_ended(self, now: float) -> list[MemberEffect]:
        if self.state is MemberState.SERVING and now - self._ready_at >= STABLE_S:
            self._failures = 0
            if not self._keeps_data:
                return [DropEtcd(), *self._start_over(now)]
            # The restart has no deadline, because the other members may need this one's data.
            self.state = MemberState.RESTARTING
            return [RestartEtcd()]
        if self.state not in _STARTING and self.state is not MemberState.SERVING:
            return []
        if not self._failures:
            self._failing_since = now
        self._backoff_s = rest_s = min(BACKOFF_S_MAX, BACKOFF_S * 2**self._failures)
        self._failures += 1
        was_member = self.state in (MemberState.SERVING, MemberState.RESTARTING)
        self.state, self.bootstrap, self._deadline = MemberState.BACKING_OFF, None, now + rest_s
        self._probed = {}
        if was_member and self._keeps_data:
            return self._probe(now)
        self.cluster = ""
        return [DropEtcd()]

    def _tick(self, now: float) -> list[MemberEffect]:
        if not self._began or self.state is MemberState.ENDED:
            return []
        if self._deadline is not None and now >= self._deadline:
            return self._deadline_passed(now)
        effects: list[MemberEffect] = []
        if self.state is MemberState.DISCOVERING:
            effects += self._decide(now)
        elif not self._is_open:
            effects += self._protect(now)
        at = self._next_probe_at()
        return effects + (self._probe(now) if at is not None and now >= at else [])

    def _deadline_passed(self, now: float) -> list[MemberEffect]:
        serving = [one for one in self._recent_states(now).values() if isinstance(one, Serving)]
        has_leader = any(one.has_leader for one in serving)
        is_leaderless = bool(serving) and not has_leader
        match self.state:
            case MemberState.PROPOSING:
                return self._decide_proposal(now)
            case MemberState.BACKING_OFF if not self.cluster:
                return self._start_over(now)
            case MemberState.BACKING_OFF if self._may_keep_data(now, has_leader=has_leader):
                self.state, self._deadline = MemberState.RESTARTING, None
                return [RestartEtcd()]
            case MemberState.BOOTSTRAPPING if is_leaderless and not self._is_extended:
                self._is_extended, self._deadline = True, now + JOIN_S
                return []
            case _:
                return [DropEtcd(), *self._start_over(now)]

    def _may_keep_data(self, now: float, *, has_leader: bool) -> bool:
        """Whether to retry etcd with its data, which the other members may lack."""
        if now - self._failing_since >= self._patience_s:
            return False  # The job's nodes have given up by now.
        return not has_leader or self._backoff_s < LEADER_REPORT_VALID_S


_RESPONDING = (MemberState.DISCOVERING, MemberState.PROPOSING, MemberState.REPLACING)
_STARTING = (MemberState.BOOTSTRAPPING, MemberState.JOINING, MemberState.RESTARTING)
