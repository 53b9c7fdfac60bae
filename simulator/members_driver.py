"""Simulated jobs with `--ha`: the etcd members run on the machines of the nodes.

A fault that hits a machine's agent (loss, network cut, freeze) also hits its member. The member restarts
when an agent starts on the machine. All members together provide one etcd to the nodes (`simulator.etcd_model`),
which is available while the members have a leader. If an agent exits by itself, its member continues,
like a member of `holdfast coordinator --ha`.

The simulator never loses so many machines with their data that the rest cannot recover. A job does not
survive such a loss; `tests/simulation/test_clusters.py` tests it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.etcd.cluster import majority
from simulator.cluster_machines import SimMachine, SimMembers, Split
from simulator.etcd_driver import EtcdDriver

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from simulator.agent import Agent
    from simulator.etcd_driver import EtcdAgent
    from simulator.ledger import JobTruth
    from simulator.world import World

FEW, MANY = 3, 5
START_S = 2.0
ELECTION_S = (1.0, 2.0)


class AgentMachines(SimMembers):
    """The members of the cluster. A network cut of an agent also cuts its machine's member."""

    def __init__(self, world: World, names: list[str], rng: Random) -> None:
        def after(delay_s: float, action: Callable[[], None]) -> None:
            world.schedule(world.now + delay_s, lambda _: action(), None)

        member = world.machines.cluster_member
        super().__init__(
            names,
            rng,
            clock=lambda: world.now,
            after=after,
            member=member,
            keeps_data=lambda _: world.profile.members_keep_data,
        )
        self.world = world
        self.on_decided: Callable[[], None] = lambda: None

    def agents(self, name: str) -> list[Agent]:
        """Return the agents that run on a machine."""
        return [
            agent for job in self.world.jobs.values() for agent in job.living if agent.host == name
        ]

    def reaches(self, one: SimMachine, other: SimMachine) -> bool:
        """Whether the two machines can exchange messages."""
        return super().reaches(one, other) and (
            one is other or not (self._is_cut(one) or self._is_cut(other))
        )

    def _is_cut(self, machine: SimMachine) -> bool:
        return any(agent.cut_in or agent.cut_out for agent in self.agents(machine.name))

    def decide(self) -> None:
        """Let each cluster with a leader commit an entry."""
        super().decide()
        self.on_decided()


class MembersDriver(EtcdDriver):
    """The etcd cluster on the machines of the jobs."""

    def __init__(self, world: World, rng: Random) -> None:
        super().__init__(world, rng)
        self._rng = rng
        size = MANY if world.size >= MANY and rng.random() < 0.5 else FEW
        # The machines of the first nodes. Some of them may never get a node.
        self.members = AgentMachines(world, [str(one + 1) for one in range(size)], rng)
        self.members.on_decided = self._follow
        self._leader: SimMachine | None = None
        self._cluster = ""
        self.network.alive = False
        for name in self.members.machines:
            world.schedule(world.now + START_S * rng.random(), self._start, name)

    def new_agent(self, job: JobTruth, node: str, host: str, rng: Random) -> EtcdAgent:
        """Return an agent that uses this etcd, and restart its machine's member."""
        if host in self.members.machines:
            self.world.schedule(self.world.now, self._start, host)
        return super().new_agent(job, node, host, rng)

    def restart_as(self, _number: int, _rng: Random) -> MembersDriver:
        """Continue with the same data."""
        self.network.restart()
        return self

    def heal(self) -> None:
        """End all faults. The etcd is available again once its members have elected a leader."""
        self.make_room()
        self.members.heal()

    # Faults of machines.

    def machine_of(self, agent: Agent) -> str | None:
        """Return the machine of an agent if it has a member."""
        return agent.host if agent.host in self.members.machines else None

    def can_lose(self, name: str) -> bool:
        """Whether the members without this one are still a majority with all committed entries."""
        active_cluster = self.members.active_cluster
        group = self.members.quorum(active_cluster) if active_cluster is not None else []
        left = [one for one in group if one.name != name]
        return len(left) >= majority(len(self.members.machines))

    def lose(self, name: str) -> None:
        """Lose a machine's member, with its data."""
        self.world.note(f"member {name}", "is lost with its data")
        self.members.lose(name)

    def end_member(self) -> None:
        """Kill one member's etcd process, unless too few others would have the data."""
        name = self._random_member()
        if not self.world.profile.members_keep_data and not self.can_lose(name):
            return
        self.world.note(f"member {name}", "is killed")
        self.members.end_etcd(name)

    def cut_members(self, length_s: float) -> None:
        """Lose messages from one machine's member to some others."""
        name = self._random_member()
        cut = {(name, one) for one in self.members.machines if self._rng.random() < 0.7}
        self.world.note(f"member {name}", "is disconnected from {0}", sorted(one for _, one in cut))
        self.members.cut |= cut - {(name, name)}
        self.members.after(length_s, lambda: self.members.cut.difference_update(cut))

    def stop_most(self, length_s: float) -> None:
        """Freeze most members, or kill their processes if they keep their data."""
        names = [*self.members.machines]
        most = self._rng.sample(names, majority(len(names)))
        self.world.note("members", "most of them are stopped: {0}", most)
        kills = self._rng.random() < 0.5 and self.world.profile.members_keep_data
        for name in most:
            if kills:
                self.members.end_etcd(name)
            else:
                self.members.freeze(name, length_s)

    def _random_member(self) -> str:
        return self._rng.choice([*self.members.machines])

    def _start(self, name: str) -> None:
        self.members.start(name)

    def _follow(self) -> None:
        """Serve the nodes while the members have a leader."""
        active_cluster = self.members.active_cluster
        if active_cluster is None:
            return
        self._cluster = self._cluster or active_cluster.name
        if active_cluster.name != self._cluster:
            raise Split(
                f"{active_cluster.name} decides, though {self._cluster} has not lost its majority"
            )
        group = self.members.quorum(active_cluster)
        if not group:
            if self.alive:
                self.world.kill_coordinator(host_too=self._rng.random() < 0.5)
        elif not active_cluster.is_open:
            return
        elif not self.alive:
            self.world.start_coordinator()
        elif self._leader not in group:
            self.network.elect(self._rng.uniform(*ELECTION_S))
        if group and self._leader not in group:
            self._leader = group[0]
