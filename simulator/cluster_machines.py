"""Simulated machines of `--ha` that form an etcd cluster; each runs the real `ClusterMember`.

The model of raft is simple: a leader needs a majority of the voters and the longest log among them, and an
entry is committed once a majority has it. At every commit of any cluster, the simulation checks that

- no cluster commits after a newer cluster has committed;
- the leader has all entries that its cluster ever committed, so no member has forgotten its votes;
- at most one machine of the list is not a voter.

No cluster is opened to the nodes of the job while a machine that responds is not a member, unless that takes long. No
member of a list with others restarts with data that its etcd may have damaged.

The owner provides the clock and the timers.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from holdfast.core.etcd.cluster import (
    OPEN_S,
    AcceptProposal,
    BootstrapProposed,
    ClusterMember,
    DropEtcd,
    EtcdEnded,
    EtcdReady,
    MachineProbed,
    MemberEvent,
    MemberState,
    NoData,
    OpenCluster,
    PortsHeld,
    ProbedState,
    ProbeMachines,
    ProposalAnswered,
    Propose,
    ReplaceVoter,
    RestartEtcd,
    Serving,
    StartAddedEtcd,
    StartNewEtcd,
    StartProbeServer,
    StopProbeServer,
    VoterNotReplaced,
    VoterReplaced,
    majority,
)
from holdfast.core.machine import TICK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from random import Random

    from holdfast.core.etcd.cluster import Bootstrap

DECISION_S = 0.1
PATIENCE_S = 60.0
CLAIM_S = 10.0  # How long a machine holds the lock for changing the voters.


class Split(AssertionError):
    """An older cluster committed after a newer one, or a cluster lost committed entries."""


class OpenedEarly(AssertionError):
    """The nodes of the job may use a cluster that lacks a machine which is about to become a member."""


class Cluster:
    """A cluster: its voters and how many entries it committed."""

    def __init__(self, name: str, voters: dict[str, object]) -> None:
        self.name = name
        self.voters = voters
        self.decided = 0
        self.is_open = False
        self.lock: tuple[str, float] | None = None


class Data:
    """The data of one voter."""

    def __init__(self, cluster: Cluster, voter: object) -> None:
        self.cluster, self.voter = cluster, voter
        self.log = 0
        self.was_ready = self.is_damaged = False


class SimMachine:
    """A machine of the list."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.member: ClusterMember | None = None
        self.probed_as: int | None = None
        self.data: Data | None = None
        self.etcd_runs = False
        self.frozen = False
        self.life = 0
        self.waiting: list[MemberEvent] = []  # Events that arrived while it was frozen.
        self.seen: dict[
            str, int
        ] = {}  # Machines that responded since it became empty, and in which life.
        self.ready_at = 0.0

    @property
    def votes(self) -> bool:
        return self.etcd_runs and not self.frozen and self.data is not None


class SimMembers:
    """All machines of the list, and the network between them."""

    def __init__(
        self,
        names: Iterable[str],
        rng: Random,
        *,
        clock: Callable[[], float],
        after: Callable[[float, Callable[[], None]], None],
        member: type[ClusterMember] = ClusterMember,
        keeps_data: Callable[[str], bool] = lambda _: True,
        one_at_a_time: bool = True,
    ) -> None:
        self.machines = {name: SimMachine(name) for name in names}
        self.cut: set[tuple[str, str]] = set()  # From, to.
        self.clusters: list[Cluster] = []
        self.bootstrapped: dict[str, Cluster] = {}
        self.active_cluster: Cluster | None = None
        self.deposed: set[str] = set()
        self.has_faults_ended = False
        self.random = rng
        self._clock, self.after = clock, after
        self._member, self._keeps_data = member, keeps_data
        self._one_at_a_time = one_at_a_time
        self._count = itertools.count()
        after(DECISION_S, self._decide_periodically)

    @property
    def now(self) -> float:
        return self._clock()

    def _decide_periodically(self) -> None:
        self.decide()
        self.after(DECISION_S, self._decide_periodically)

    # Faults and repairs.

    def start(self, name: str) -> None:
        """Start the member of a machine, unless it runs."""
        machine = self.machines[name]
        if machine.member is not None:
            return
        machine.life += 1
        machine.seen = {}
        machine.member = self._member(
            machine=name,
            machines=tuple(self.machines),
            patience_s=PATIENCE_S,
            draw=lambda: self.random.getrandbits(60),
            wall_ms=lambda: int(self.now * 1000),
            keeps_data=self._keeps_data(name),
        )
        self.deliver(machine, PortsHeld())

    def lose(self, name: str) -> None:
        """Kill a machine's member and remove its data."""
        machine = self.machines[name]
        machine.member = machine.probed_as = machine.data = None
        machine.etcd_runs = machine.frozen = False
        machine.waiting = []

    def end_etcd(self, name: str) -> None:
        """Kill only the etcd process of a machine. If its etcd is unsafe, the kill damages the data."""
        machine = self.machines[name]
        if machine.etcd_runs and not machine.frozen:
            machine.etcd_runs = False
            if machine.data is not None:
                machine.data.is_damaged = not self._keeps_data(name)
            self.deliver(machine, EtcdEnded("killed"))

    def freeze(self, name: str, for_s: float) -> None:
        """Freeze a machine for a while."""
        machine, life = self.machines[name], self.machines[name].life
        machine.frozen = True

        def thaw() -> None:
            if machine.life == life:
                self.thaw(name)

        self.after(for_s, thaw)

    def thaw(self, name: str) -> None:
        """Resume a machine, and deliver the events that arrived meanwhile."""
        machine = self.machines[name]
        machine.frozen = False
        waiting, machine.waiting = machine.waiting, []
        for event in waiting:
            self.deliver(machine, event)

    def heal(self) -> None:
        """End all faults."""
        self.cut.clear()
        self.has_faults_ended = True
        for name, machine in self.machines.items():
            if machine.frozen:
                self.thaw(name)
            self.start(name)

    def is_complete(self) -> bool:
        """Whether every machine's member serves."""
        return all(
            one.member is not None and one.member.state is MemberState.SERVING
            for one in self.machines.values()
        )

    def deliver(self, machine: SimMachine, event: MemberEvent) -> bool:
        """Deliver an event to a member; return whether it accepts a proposal."""
        if machine.member is None:
            return False
        if machine.frozen:
            machine.waiting.append(event)
            return False
        effects = machine.member.handle(self.now, event)
        machine.member.check()
        for effect in effects:
            self._perform(machine, effect)
        self._schedule(machine)
        return any(isinstance(one, AcceptProposal) for one in effects)

    def _schedule(self, machine: SimMachine) -> None:
        member, life = machine.member, machine.life
        at = member.next_deadline(self.now) if member is not None else None
        if at is None:
            return

        def tick() -> None:
            if machine.life == life and machine.member is member:
                if machine.frozen:
                    self.after(0.5, tick)
                else:
                    self.deliver(machine, TICK)

        self.after(max(0.01, at - self.now), tick)

    def _perform(self, machine: SimMachine, effect: object) -> None:
        match effect:
            case StartProbeServer(incarnation):
                machine.probed_as, machine.seen = incarnation, {}
            case StopProbeServer():
                machine.probed_as = None
            case ProbeMachines(names):
                for name in names:
                    self._probe(machine, name)
            case Propose(bootstrap, names):
                for name in names:
                    self._propose(machine, bootstrap, name)
            case StartNewEtcd(bootstrap):
                if machine.data is not None:
                    raise Split(f"{machine.name} starts as new although it has data")
                cluster = self.bootstrapped.get(bootstrap.id)
                if cluster is None:
                    voters: dict[str, object] = {one: (bootstrap.id, one) for one in self.machines}
                    cluster = self.bootstrapped[bootstrap.id] = Cluster(bootstrap.id, voters)
                    self.clusters.append(cluster)
                self._boot(machine, Data(cluster, (bootstrap.id, machine.name)))
            case ReplaceVoter():
                self._replace_voter(machine)
            case StartAddedEtcd((cluster_name, _)):
                cluster = self.bootstrapped[cluster_name]
                self._boot(machine, Data(cluster, cluster.voters.get(machine.name)))
            case RestartEtcd():
                assert machine.data is not None
                if machine.data.is_damaged and len(self.machines) > 1:
                    raise Split(f"{machine.name} restarts with data that may be damaged")
                self._boot(machine, machine.data)
            case DropEtcd():
                machine.data, machine.etcd_runs = None, False
            case OpenCluster():
                assert machine.data is not None
                self._open(machine, machine.data.cluster)

    def _open(self, machine: SimMachine, cluster: Cluster) -> None:
        if cluster.is_open:
            return
        cluster.is_open = True
        for name, life in machine.seen.items():
            other = self.machines[name]
            is_member = other.data is not None and other.data.cluster is cluster
            if is_member or other.life != life or other.member is None or other.frozen:
                continue
            if self.now < machine.ready_at + OPEN_S:
                raise OpenedEarly(f"{machine.name} opens {cluster.name} without {name}")

    def _boot(self, machine: SimMachine, data: Data) -> None:
        machine.data, life = data, machine.life
        data.was_ready = False

        def boot() -> None:
            if machine.life == life and machine.data is data:
                machine.etcd_runs = True

        self.after(self.random.uniform(0.05, 0.5), boot)

    # The network.

    def reaches(self, one: SimMachine, other: SimMachine) -> bool:
        """Whether another machine receives messages from this one and can respond."""
        return (
            not other.frozen
            and (one.name, other.name) not in self.cut
            and (other.name, one.name) not in self.cut
        )

    def _delay(self) -> float:
        return self.random.uniform(0.001, 0.01 if self.has_faults_ended else 0.5)

    def _loses_message(self) -> bool:
        return not self.has_faults_ended and self.random.random() < 0.1

    def _is_same_process(self, machine: SimMachine, life: int) -> bool:
        return machine.life == life and machine.member is not None

    def _probe(self, machine: SimMachine, name: str) -> None:
        life, other = machine.life, self.machines[name]

        def answer() -> None:
            state: ProbedState = None
            if self.reaches(machine, other) and not self._loses_message():
                if other.probed_as is not None:
                    state = NoData(other.probed_as)
                elif other.votes and other.data is not None and other.data.was_ready:
                    cluster = other.data.cluster
                    state = Serving(cluster.name, has_leader=other in self.quorum(cluster))

            def arrive() -> None:
                if self._is_same_process(machine, life):
                    if state is not None:
                        machine.seen[name] = other.life
                    self.deliver(machine, MachineProbed(name, state))

            self.after(self._delay(), arrive)

        self.after(self._delay(), answer)

    def _propose(self, machine: SimMachine, bootstrap: Bootstrap, name: str) -> None:
        life, other = machine.life, self.machines[name]

        def arrive() -> None:
            accepted = False
            if self.reaches(machine, other) and not self._loses_message():
                accepted = self.deliver(other, BootstrapProposed(bootstrap))
            if self._loses_message():
                accepted = False  # The response is lost.

            def answer() -> None:
                if self._is_same_process(machine, life):
                    self.deliver(machine, ProposalAnswered(bootstrap.id, name, accepted))

            self.after(self._delay(), answer)

        # A proposal may be very late, and arrive at a later incarnation.
        self.after(self._delay() * (20 if self._loses_message() else 1), arrive)

    # Clusters.

    def quorum(self, cluster: Cluster) -> list[SimMachine]:
        """Return a leader and its followers; empty if they are not a majority."""
        voters = [
            one
            for one in self.machines.values()
            if one.votes
            and one.data is not None
            and one.data.cluster is cluster
            and cluster.voters.get(one.name) == one.data.voter
        ]
        needed = majority(len(cluster.voters))
        for leader in sorted(voters, key=_log, reverse=True):
            group = [one for one in voters if one is leader or self.reaches(leader, one)]
            if len(group) >= needed and _log(leader) == max(map(_log, group)):
                return group
        return []

    def decide(self) -> None:
        """Let each cluster with a leader commit an entry."""
        for cluster in self.clusters:
            group = self.quorum(cluster)
            if group:
                self._commit(cluster, group)
                for one in group:
                    assert one.data is not None
                    if not one.data.was_ready:
                        one.data.was_ready, one.ready_at = True, self.now
                        self.deliver(one, EtcdReady(cluster.name))

    def _commit(self, cluster: Cluster, group: list[SimMachine]) -> None:
        if cluster.name in self.deposed:
            raise Split(
                f"{cluster.name} commits after {self.active_cluster and self.active_cluster.name}"
            )
        if self.active_cluster is not None and self.active_cluster is not cluster:
            self.deposed.add(self.active_cluster.name)
        self.active_cluster = cluster
        if max(map(_log, group)) < cluster.decided:
            raise Split(f"{cluster.name} has lost committed entries")
        if len(cluster.voters) < len(self.machines) - 1:
            raise Split(f"{cluster.name} has {len(cluster.voters)} voters")
        cluster.decided += 1
        for one in group:
            assert one.data is not None
            one.data.log = cluster.decided

    def _replace_voter(self, machine: SimMachine) -> None:
        life = machine.life

        def report_failed() -> None:
            if self._is_same_process(machine, life):
                self.deliver(machine, VoterNotReplaced("no"))

        def reachable_cluster() -> Cluster | None:
            for cluster in reversed(self.clusters):
                if any(self.reaches(machine, one) for one in self.quorum(cluster)):
                    return cluster
            return None

        def remove() -> None:
            cluster = reachable_cluster()
            lock = cluster.lock if cluster is not None else None
            held = lock is not None and lock[0] != machine.name and lock[1] > self.now
            held = held and self._one_at_a_time
            if (
                cluster is None
                or held
                or not self._is_same_process(machine, life)
                or machine.frozen
            ):
                self.after(self._delay(), report_failed)
                return
            cluster.lock = (machine.name, self.now + CLAIM_S)
            missing = self.machines.keys() - cluster.voters.keys() - {machine.name}
            if missing and self._one_at_a_time:  # The machine that removed it did not add it again.
                self._commit(cluster, self.quorum(cluster))
                name = min(missing)
                cluster.voters[name] = (cluster.name, name, next(self._count))
                self.after(self._delay(), remove)
                return
            if machine.name in cluster.voters:
                self._commit(cluster, self.quorum(cluster))
                del cluster.voters[machine.name]
            self.after(self._delay(), lambda: add(cluster))

        def add(cluster: Cluster) -> None:
            group = self.quorum(cluster)
            if (
                not group
                or self._loses_message()
                or not self._is_same_process(machine, life)
                or machine.frozen
            ):
                self.after(self._delay(), report_failed)
                return
            self._commit(cluster, group)
            cluster.voters[machine.name] = (cluster.name, machine.name, next(self._count))
            if self._loses_message():
                self.after(self._delay(), report_failed)
            else:
                self.after(self._delay(), report_added)

        def report_added() -> None:
            cluster = reachable_cluster()
            if self._is_same_process(machine, life) and cluster is not None:
                self.deliver(machine, VoterReplaced((cluster.name, "")))
            else:
                report_failed()

        self.after(self._delay(), remove)


def _log(machine: SimMachine) -> int:
    assert machine.data is not None
    return machine.data.log
