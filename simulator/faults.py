"""Fault injection: a profile has the kinds and rates of faults; the injector picks times and targets.

One random generator makes all choices, so a seed determines the run. A fault without a target does nothing.
When the faults end, everything is healed, and each job gets enough nodes: from then on it must run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.coordinator.endpoint_list import PROBE_S
from holdfast.core.limits import COORDINATORS_MAX, REPORT_BYTES_MAX
from holdfast.core.protocol import Request
from holdfast.core.requests import Action
from holdfast.core.rounds import drained_nodes
from holdfast.core.supervision import SIGINT, State
from holdfast.core.values import Value
from simulator.etcd_driver import EtcdAgent, EtcdDriver
from simulator.members_driver import MembersDriver
from simulator.simulated_coordinator import Coordinator
from simulator.simulated_network import NetworkConditions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from simulator.agent import Agent
    from simulator.ledger import JobTruth
    from simulator.world import World


class Profile(Value):
    """A set of faults; `weights` has the relative frequency of each."""

    name: str
    about: str
    weights: Mapping[str, float]
    mean_gap_s: float = 4.0
    """The mean time between two faults."""
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    jitter_s: float = 0.0
    lag_share: float = 0.0
    """The share of nodes that respond slowly."""
    slow_share: float = 0.0
    """The share of nodes with links of limited bandwidth, and long failure reports."""
    absent_share: float = 0.0
    """The share of nodes above the minimum that do not join at the start of their job."""
    has_members: bool = False
    """Whether etcd is a cluster of members on the machines of nodes."""
    members_keep_data: bool = True
    """Whether a member restarts with its data after its etcd was killed."""
    only_on: Mapping[str, Mapping[str, float]] = {}
    """Additional weights, by driver."""

    @property
    def conditions(self) -> NetworkConditions:
        return NetworkConditions(
            loss=self.loss,
            duplication=self.duplication,
            reordering=self.reordering,
            jitter_s=self.jitter_s,
        )


_WORKERS = {"fail": 2.0, "cascade": 1.0, "hang": 0.3, "fail_permanently": 0.05}
_ETCD = {
    "leader": 1.0,
    "pause_leader": 0.7,
    "compact": 1.0,
    "break_links": 1.0,
    "set_apart": 0.7,
    "fill": 0.2,
}
_NODES = {"kill": 3.0, "power_off": 1.0, "die_silently": 1.0, "join": 3.0, "leave": 1.0}

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("calm", "workers sometimes fail, nodes join", {"fail": 1.0, "join": 1.0}, 8.0),
        Profile(
            "lossy",
            "messages are lost, repeated, delayed and reordered; some nodes are slow",
            {**_WORKERS, "kill": 0.5, "join": 1.0, "leave": 0.5},
            6.0,
            loss=0.1,
            duplication=0.1,
            reordering=0.3,
            jitter_s=1.5,
            lag_share=0.2,
        ),
        Profile(
            "partitions",
            "nodes are disconnected, one by one or many at once, in one direction or both",
            {"cut": 4.0, "cut_many": 2.0, "cut_one_way": 3.0, "fail": 1.0, "join": 1.0},
            3.0,
            only_on={"etcd": {"break_links": 2.0, "compact": 1.0, "set_apart": 2.0}},
        ),
        Profile(
            "crashes",
            "agents and their hosts die; some return",
            {**_NODES, **_WORKERS},
            2.0,
            only_on={"etcd": {"leader": 2.0}},
        ),
        Profile(
            "coordinator",
            "the coordinator dies and returns, sometimes several times in a row",
            {"coordinator": 4.0, "coordinator_host": 0.7, "fail": 0.7, "kill": 0.4, "join": 0.4},
            8.0,
            only_on={"etcd": {**_ETCD, "leader": 2.0}},
        ),
        Profile(
            "take_over",
            "the coordinator dies or is disconnected, and an operator starts another one elsewhere",
            {"fail": 0.7, "kill": 0.4, "join": 0.4, "cut": 0.5},
            8.0,
            only_on={
                "coordinator": {"take_over": 2.0, "replace": 2.0, "coordinator": 1.0},
                "etcd": {"leader": 1.0},
            },
        ),
        Profile(
            "pauses",
            "agents and the coordinator are stopped for a while",
            {"pause": 4.0, "pause_coordinator": 2.0, "fail": 1.0, "join": 1.0},
            3.0,
            only_on={"etcd": {"pause_leader": 2.0}},
        ),
        Profile(
            "churn",
            "nodes join and leave all the time, some with the id of another",
            {"join": 6.0, "leave": 4.0, "kill": 2.0, "twin": 0.7, "fail": 0.3},
            1.0,
        ),
        Profile(
            "wedged",
            "the loops of agents hang while their connections are served",
            {"wedge": 4.0, "fail": 0.5, "join": 0.3},
            12.0,
        ),
        Profile(
            "starved",
            "agents get little CPU, with growing pauses",
            {"starve": 4.0, "fail": 0.5, "join": 0.5},
            10.0,
        ),
        Profile(
            "flapping",
            "one node joins and leaves repeatedly, like a broken machine",
            {"flap": 6.0, "fail": 0.3, "join": 0.5},
            2.0,
            absent_share=0.7,
            only_on={"etcd": {"leader": 0.2}},
        ),
        Profile(
            "slow",
            "some nodes are behind slow links, and send long failure reports",
            {**_WORKERS, "join": 0.5, "leave": 0.3},
            6.0,
            slow_share=0.5,
        ),
        Profile(
            "members",
            "machines with members of the job's own etcd fail and are replaced by empty ones",
            {
                "kill": 2.0,
                "power_off": 2.0,
                "die_silently": 1.0,
                "join": 1.5,
                "fail": 1.0,
                "cut": 1.5,
                "cut_one_way": 1.0,
                "pause": 1.5,
            },
            3.0,
            has_members=True,
            only_on={"etcd": {"end_member": 2.0, "cut_members": 1.0, "leader": 2.0}},
        ),
        Profile(
            "majorities",
            "most members of the job's own etcd are unavailable for a while, at any time",
            {"cut_many": 1.0, "pause": 1.0, "kill": 1.0, "join": 1.0, "fail": 1.0},
            6.0,
            has_members=True,
            only_on={"etcd": {"stop_most": 4.0, "end_member": 1.0, "pause_leader": 1.0}},
        ),
        Profile(
            "requests",
            "operators restart and stop jobs and drain nodes, during other faults",
            {
                "operator_request": 8.0,
                "fail": 1.0,
                "kill": 0.5,
                "join": 1.0,
                "leave": 0.3,
                "cut": 0.5,
                "pause": 0.3,
                "coordinator": 0.5,
            },
            2.0,
            only_on={"etcd": {"leader": 0.5}},
        ),
        Profile(
            "everything",
            "all faults at once",
            {
                **_WORKERS,
                **_NODES,
                "cut": 1.0,
                "cut_many": 0.5,
                "cut_one_way": 1.0,
                "pause": 1.0,
                "pause_coordinator": 0.5,
                "coordinator": 1.0,
                "coordinator_host": 0.3,
                "twin": 0.2,
                "flap": 0.2,
            },
            1.5,
            loss=0.02,
            duplication=0.02,
            reordering=0.1,
            jitter_s=0.5,
            lag_share=0.1,
            only_on={"etcd": _ETCD},
        ),
        Profile(
            "unsafe_etcd",
            "members of the job's own etcd are killed and start without data; their machines fail, too",
            {"kill": 1.0, "join": 1.0, "fail": 0.5, "cut": 1.0, "pause": 1.0},
            3.0,
            has_members=True,
            members_keep_data=False,
            only_on={"etcd": {"end_member": 4.0, "stop_most": 1.0, "cut_members": 1.0}},
        ),
    )
}


SIGTERM = 15
LAG_S = 0.15
BANDWIDTH = (9_000.0, 50_000.0)  # In bytes per second; over the slowest link a report takes 7 s.
OUTAGE_S = (0.05, 12.0)
PAUSE_S_MAX = 20.0
STALLS_S = ((1.2, 3.0), (2.2, 3.5), (2.2, 3.5), (3.0, 10.0), (3.0, 10.0), (0.1, 10.0))
"""The pauses of a starved agent, at least and at most; it asks for patience after the first."""
STALL_GAPS_S = (0.3, 1.5)  # How long it runs in between.
FROZEN_SHARE = 0.6  # The share of stopped agents whose whole machine is stopped.
REFILLS_S = (0.0, 7.0, 14.0)
WEDGED_S = (4.0, 40.0)
FLAP_S = (0.6, 4.0)  # How long a flapping node stays connected or disconnected, at most.
FLAPS_S = (5.0, 60.0)  # How long a node flaps.
FLAPS_MAX = 3  # Each flapping node causes many restarts.
NOTICED_S = (6.0, 20.0)  # How long an operator takes to replace a lost coordinator.
CUT_OFF_S = (0.5, 30.0)  # How much longer a replaced coordinator stays disconnected.
RESET_SHARE = 0.3  # The share of connections that a change of the network resets.
REQUEST_WEIGHTS = {Action.RESTART: 4.0, Action.DRAIN: 4.0, Action.UNDRAIN: 3.0, Action.STOP: 0.15}
REPEATED_REQUEST_SHARE = 0.4
DIRECT_REQUEST_SHARE = 0.3
"""The share of requests that go directly to the coordinator, with drivers that have one."""


class FaultInjector:
    """Injects the faults of a profile."""

    def __init__(self, world: World, profile: Profile, rng: Random, until_s: float) -> None:
        self._world = world
        self._profile = profile
        self._rng = rng
        self._until_s = until_s
        self._flaps = 0
        weights = {**profile.weights, **profile.only_on.get(world.driver, {})}
        self._kinds = list(weights)
        self._weights = list(weights.values())

    def begin(self) -> None:
        """Set the network's conditions, and schedule the first fault."""
        self._world.network.conditions = self._profile.conditions
        self._schedule_next()

    def configure(self, agent: Agent) -> None:
        """Make a new agent slow, with the probabilities of the profile."""
        if self._world.now < self._until_s and self._rng.random() < self._profile.lag_share:
            agent.lag_s = LAG_S
        if self._profile.slow_share and self._rng.random() < self._profile.slow_share:
            agent.bandwidth = self._between(*BANDWIDTH)
            agent.report_bytes = REPORT_BYTES_MAX

    def joins_at_start(self, job: JobTruth) -> bool:
        """Decide whether another node joins at the start of a job."""
        absent_share = self._profile.absent_share
        if not absent_share or len(job.agents) < job.settings.min_nodes:
            return True
        return self._rng.random() >= absent_share

    def _schedule_next(self) -> None:
        gap = self._rng.expovariate(1.0 / self._profile.mean_gap_s)
        self._world.schedule(self._world.now + gap, self._inject, None)

    def _inject(self, _arg: object) -> None:
        if self._world.now >= self._until_s:
            return
        kind = self._rng.choices(self._kinds, self._weights)[0]
        getattr(self, f"_{kind}")()
        self._world.keep_busy()
        self._schedule_next()

    def end(self, _arg: object = None) -> None:
        """Heal everything, and give every job enough nodes."""
        world = self._world
        world.note("faults", "end; everything is healed")
        world.network.conditions = NetworkConditions()
        for job in list(world.jobs.values()):
            for agent in job.agents:
                agent.lag_s = 0.0
                self._heal(agent)
                agent.starved = False
                agent.resume()
                agent.unwedge()
                if isinstance(agent, EtcdAgent):
                    agent.is_apart = False
        world.coordinator.resume()
        if world.replaced or any(agent.apart for agent in self._all_agents()):
            assert isinstance(world.coordinator, Coordinator)
            self._rejoin(world.coordinator)
        if isinstance(world.coordinator, MembersDriver):
            world.coordinator.heal()
        elif not world.coordinator.alive:
            world.start_coordinator()
        if isinstance(world.coordinator, EtcdDriver):
            world.coordinator.make_room()
        for delay_s in REFILLS_S:
            world.schedule(world.now + delay_s, self._refill, None)

    def _refill(self, _arg: object) -> None:
        """Start missing nodes. This runs several times, because some agents exit late."""
        for job in self._world.jobs.values():
            names = {agent.node for agent in job.living}
            self._undrain_all(job)
            if not job.closed_by:
                for _ in range(job.settings.min_nodes - len(names)):
                    self._world.start_agent(job)

    # Targets.

    def _random_agent(self, agents: list[Agent] | None = None) -> Agent | None:
        if agents is None:
            agents = [agent for job in self._world.jobs.values() for agent in job.living]
        return self._rng.choice(agents) if agents else None

    def _between(self, low: float, high: float) -> float:
        """Draw a number with a logarithmic distribution."""
        return float(low * (high / low) ** self._rng.random())

    def _start_later(
        self, delay_s: float, job: JobTruth, node: str | None, host: str | None = None
    ) -> None:
        world = self._world

        def start(_arg: object) -> None:
            if world.now < self._until_s:
                taken = any(agent.host == host for agent in job.living)
                world.start_agent(job, node, None if taken else host)

        world.schedule(world.now + delay_s, start, None)

    # Workers.

    def _running(self) -> Agent | None:
        living = [agent for job in self._world.jobs.values() for agent in job.living]
        return self._random_agent([agent for agent in living if agent.workers.running])

    def _fail(self, *, retryable: bool = True, hangs: bool = False) -> None:
        agent = self._running()
        if agent is not None:
            agent.after(0.0, agent.workers.fail, (agent.workers.generation, retryable, hangs))

    def _hang(self) -> None:
        self._fail(hangs=True)

    def _fail_permanently(self) -> None:
        self._fail(retryable=False)

    def _cascade(self) -> None:
        """Let a failure make workers on other nodes fail, like a broken collective."""
        first = self._running()
        if first is None:
            return
        generation = first.workers.generation
        for agent in first.job.living:
            if agent is first or self._rng.random() < 0.6:
                delay = 0.0 if agent is first else self._between(0.001, 1.0)
                agent.after(delay, agent.workers.fail, (generation, True, False))

    # Agents.

    def _kill(self, agent: Agent | None = None, *, host_too: bool = False) -> None:
        agent = agent or self._random_agent()
        if agent is None:
            return
        members, machine = self._members(agent)
        if members is not None:
            if not members.can_lose(machine):
                return
            members.lose(machine)
        self._world.disturb()
        agent.die(host_too=host_too)
        fate = self._rng.random()
        if fate < 0.8:
            node = agent.node if fate < 0.4 else None
            self._start_later(self._between(0.3, 15.0), agent.job, node, agent.host)

    def _flap(self) -> None:
        """Let the agents of one host die soon after they joined, each replaced by another."""
        world, chosen = self._world, self._random_agent()
        if chosen is None or chosen.job.closed_by or self._flaps >= FLAPS_MAX:
            return
        self._flaps += 1
        job, host, node = chosen.job, chosen.host, None
        if self._rng.random() < 0.5:
            host = f"flapping-{self._flaps}"  # A new node.
        elif self._rng.random() < 0.5:
            node = chosen.node
        period_s, until_s = self._between(*FLAP_S), world.now + self._between(*FLAPS_S)

        def turn(_arg: object) -> None:
            alive = [agent for agent in job.living if agent.host == host]
            if alive and world.now < until_s:
                world.disturb()
                alive[0].die(host_too=False)
            elif not alive and world.now < self._until_s and not job.closed_by:
                world.start_agent(job, node, host)
            if world.now < min(until_s, self._until_s):
                gap_s = period_s * self._rng.random()
                world.schedule(world.now + gap_s, turn, None)

        turn(None)

    def _power_off(self) -> None:
        self._kill(host_too=True)

    def _die_silently(self) -> None:
        """Power a host off, and let workers on other nodes fail because of it, as sockets time out."""
        first = self._running()
        if first is None:
            return
        generation = first.workers.generation
        self._kill(first, host_too=True)
        for agent in first.job.living:
            if self._rng.random() < 0.6:
                delay = self._between(0.05, 4.0)
                agent.after(delay, agent.workers.fail, (generation, True, False))

    def _join(self) -> None:
        jobs = [job for job in self._world.jobs.values() if self._world.has_room(job)]
        if jobs:
            job = self._rng.choice(jobs)
            for _ in range(self._rng.choice((1, 1, 2, 3))):
                self._start_later(self._between(0.01, 1.0), job, None)

    def _leave(self) -> None:
        agent = self._random_agent()
        if agent is None:
            return
        self._world.disturb()
        signum = self._rng.choice((SIGTERM, SIGTERM, SIGINT))
        agent.left = True
        agent.after(0.0, agent.signalled, signum)
        if self._rng.random() < 0.3:
            agent.after(self._between(0.01, 1.0), agent.signalled, signum)
        if self._rng.random() < 0.5:
            self._start_later(self._between(0.3, 15.0), agent.job, None)

    def _twin(self) -> None:
        agent = self._random_agent()
        if agent is not None and self._world.has_room(agent.job):
            self._world.start_agent(agent.job, agent.node)
            for one in agent.job.agents:  # Their order decides which of them is refused.
                one.superseded = one.superseded or one.node == agent.node

    def _pause(self, agent: Agent | None = None, *, shortest_s: float = 0.1) -> None:
        agent = agent or self._random_agent()
        if agent is not None and not agent.paused:
            self._world.disturb()
            agent.pause()
            at = self._world.now + self._between(shortest_s, PAUSE_S_MAX)
            self._world.schedule(at, agent.resume, None)
            members, machine = self._members(agent)
            if members is not None and self._rng.random() < FROZEN_SHARE:
                members.members.freeze(machine, at - self._world.now)

    def _starve(self) -> None:
        agent = self._random_agent()
        if agent is not None and not agent.paused and not agent.starved:
            agent.starved = True
            self._stall((agent, 0))

    def _stall(self, which: tuple[Agent, int]) -> None:
        """Let an agent get no CPU for a while, then run for a moment, and so on."""
        agent, number = which
        if number == len(STALLS_S) or not (agent.alive and agent.starved):
            agent.starved = False
            return
        self._world.disturb()
        for_s, gap_s = self._between(*STALLS_S[number]), self._between(*STALL_GAPS_S)
        if not agent.paused:
            agent.pause()
            self._world.schedule(self._world.now + for_s, agent.resume, None)
        self._world.schedule(self._world.now + for_s + gap_s, self._stall, (agent, number + 1))

    # Requests.

    def _operator_request(self) -> None:
        """Let an operator send a request through a random node, sometimes twice."""
        agent = self._random_agent()
        if agent is None:
            return
        chosen = self._rng.choices([*REQUEST_WEIGHTS], [*REQUEST_WEIGHTS.values()])[0]
        node = ""
        if chosen in (Action.DRAIN, Action.UNDRAIN):
            node = self._rng.choice(agent.job.agents).node
        self._request(agent, chosen, node)

    def _request(self, agent: Agent, action: Action, node: str) -> None:
        world = self._world
        world.disturb()
        number = len(world.requests) + 1
        request = Request(
            id=f"ask-{number}", action=action.value, node=node, who="ann@login", why=f"no {number}"
        )
        world.requests[request.id] = request
        coordinator = world.coordinator
        if isinstance(coordinator, Coordinator) and self._rng.random() < DIRECT_REQUEST_SHARE:
            coordinator.send_request(agent.job.run_id, request)
        else:
            agent.send_request(request)
        if self._rng.random() < REPEATED_REQUEST_SHARE:
            again = self._random_agent(agent.job.living)
            if again is not None:
                again.after(self._between(0.01, 2.0), again.send_request, request)

    def _undrain_all(self, job: JobTruth) -> None:
        known = self._world.coordinator.job(job.run_id)
        for node in drained_nodes(known) if known is not None else ():
            agent = self._random_agent(job.living)
            if agent is not None:
                self._request(agent, Action.UNDRAIN, node)

    def _wedge(self) -> None:
        agent = self._random_agent()
        begun = agent is not None and agent.supervision.state is not State.IDLE
        if agent is not None and begun and agent.wedged_at is None:
            self._world.disturb()
            agent.wedge()
            at = self._world.now + self._between(*WEDGED_S)
            self._world.schedule(at, agent.unwedge, None)

    # The network.

    def _cut(self, agent: Agent | None = None, *, ways: int = 3) -> None:
        agent = agent or self._random_agent()
        if agent is None or agent.cut_in or agent.cut_out:
            return
        self._world.disturb()
        agent.cut_out, agent.cut_in = bool(ways & 1), bool(ways & 2)
        self._world.coordinator.cut(agent)
        self._world.note(agent, f"is disconnected ({('', 'out', 'in', 'both ways')[ways]})")
        self._world.schedule(self._world.now + self._between(0.1, 40.0), self._heal, agent)

    def _cut_one_way(self) -> None:
        self._cut(ways=self._rng.choice((1, 2)))

    def _cut_many(self) -> None:
        ways = self._rng.choice((1, 2, 3, 3))
        for job in self._world.jobs.values():
            for agent in job.living:
                if self._rng.random() < 0.5:
                    self._cut(agent, ways=ways)

    def _heal(self, agent: Agent) -> None:
        if agent.cut_in or agent.cut_out:
            agent.cut_in = agent.cut_out = False
            agent.reached_since = self._world.now
            self._world.note(agent, "is connected again")
            self._world.network.deliver_held(agent)
            self._world.disturb()

    # The coordinator.

    def _coordinator(self, *, host_too: bool = False) -> None:
        coordinator = self._world.coordinator
        if coordinator.alive:
            self._world.kill_coordinator(host_too=host_too)
            back = self._world.now + self._between(*OUTAGE_S)
            self._world.schedule(min(back, self._until_s), self._world.start_coordinator, None)

    def _take_over(self) -> None:
        """Let the coordinator die permanently, and let an operator start another one elsewhere."""
        world, old = self._world, self._world.coordinator
        assert isinstance(old, Coordinator)
        if not old.alive or old.endpoint_index + 1 >= COORDINATORS_MAX:
            return
        world.kill_coordinator(host_too=self._rng.random() < 0.7)

        def take_over(_arg: object) -> None:
            if world.coordinator is old:
                world.take_over()

        delay_s = self._between(*NOTICED_S)
        world.schedule(min(world.now + delay_s, self._until_s), take_over, None)

    def _replace(self) -> None:
        """Let an operator start another coordinator although the first one is alive.

        The first one is disconnected from some nodes, and only these reach the other one; or it is stopped.
        """
        world, old = self._world, self._world.coordinator
        assert isinstance(old, Coordinator)
        is_single = not any(one.alive for one in world.replaced)
        if (
            not old.alive
            or old.paused
            or not is_single
            or old.endpoint_index + 1 >= COORDINATORS_MAX
        ):
            return
        world.disturb()
        agents = [agent for job in world.jobs.values() for agent in job.living]
        others = [agent for agent in agents if self._rng.random() < 0.6]
        if self._rng.random() < 0.3:
            old.pause()
        else:
            world.note(old, f"is disconnected from {', '.join(map(str, others))}")
            for agent in others:
                agent.apart = frozenset({old})

        def take_over(_arg: object) -> None:
            if world.coordinator is not old or not old.alive or world.now >= self._until_s:
                self._rejoin(old)
                return
            world.disturb()
            world.take_over()
            if not old.paused:
                for agent in agents:
                    if agent not in others:
                        agent.apart = frozenset({world.coordinator})
                if self._rng.random() < 0.3:
                    world.schedule(world.now + self._between(*OUTAGE_S), self._restart, old)
            world.schedule(world.now + self._between(*CUT_OFF_S), self._rejoin, old)

        world.schedule(world.now + self._between(*NOTICED_S), take_over, None)

    def _restart(self, old: Coordinator) -> None:
        """Restart a replaced and disconnected coordinator, as if its agent had crashed."""
        world = self._world
        if not old.alive or not any(old in agent.apart for agent in self._all_agents()):
            return
        again = world.restart_replaced(old)
        for agent in self._all_agents():
            if old in agent.apart:
                agent.apart = frozenset({again})

    def _all_agents(self) -> list[Agent]:
        return [agent for job in self._world.jobs.values() for agent in job.agents]

    def _rejoin(self, old: Coordinator) -> None:
        """Reconnect or resume a coordinator. It soon finds out whether it was replaced."""
        world = self._world
        world.disturb()
        for agent in self._all_agents():
            if agent.apart:
                agent.apart = frozenset()
                world.network.deliver_held(agent)
            if agent.link is not None and self._rng.random() < RESET_SHARE:
                world.network.close_from_agent(agent.link)
                agent.after(0.0, agent.link_lost, agent.link)
        old.resume()
        for one in world.replaced:
            one.resume()
            world.schedule(world.now + self._between(0.1, 2 * PROBE_S), self._find_replaced, one)

    def _find_replaced(self, old: Coordinator) -> None:
        world = self._world
        if old.alive and world.coordinator.alive:
            world.disturb()
            world.note(old, "finds that it was replaced")
            old.die(host_too=False)
        elif old.alive:  # The other coordinator is down at the moment.
            world.schedule(world.now + PROBE_S, self._find_replaced, old)

    def _coordinator_host(self) -> None:
        self._coordinator(host_too=True)

    def _pause_coordinator(self) -> None:
        coordinator = self._world.coordinator
        if coordinator.alive and not coordinator.paused:
            self._world.disturb()
            coordinator.pause()
            self._world.schedule(
                self._world.now + self._between(0.1, PAUSE_S_MAX), coordinator.resume, None
            )

    # Faults of etcd.

    def _random_leader(self) -> Agent | None:
        living = [agent for job in self._world.jobs.values() for agent in job.living]
        leaders: list[Agent] = [one for one in living if isinstance(one, EtcdAgent) and one.leads]
        return self._random_agent(leaders)

    def _leader(self) -> None:
        agent = self._random_leader()
        if agent is not None:
            self._kill(agent)

    def _pause_leader(self) -> None:
        """Stop the leader's agent, often for longer than its lease."""
        agent = self._random_leader()
        if agent is not None:
            self._pause(agent, shortest_s=3.0)

    def _compact(self) -> None:
        self._etcd_driver.compact()

    def _break_links(self) -> None:
        """Break the connections of an agent and lose messages in transit."""
        agent = self._random_agent()
        if isinstance(agent, EtcdAgent):
            self._world.disturb()
            self._etcd_driver.network.break_connections(agent)
            self._etcd_driver.presences.reset(agent)

    def _set_apart(self) -> None:
        """Break the connections between an agent and the others, but not those to etcd."""
        agent = self._random_agent()
        if isinstance(agent, EtcdAgent) and not agent.is_apart:
            self._world.note(agent, "is disconnected from other agents")
            self._etcd_driver.presences.reset(agent)
            agent.is_apart = True
            self._world.schedule(self._world.now + self._between(0.1, 40.0), self._reunite, agent)

    @staticmethod
    def _reunite(agent: EtcdAgent) -> None:
        agent.is_apart = False

    def _fill(self) -> None:
        self._world.disturb()
        self._etcd_driver.fill()
        self._world.schedule(
            self._world.now + self._between(0.5, 10.0), self._etcd_driver.make_room, None
        )

    # Faults of `--ha`.

    def _members(self, agent: Agent) -> tuple[MembersDriver | None, str]:
        """Return the members, if one of them is on the agent's machine, and the machine's name."""
        place = self._world.coordinator
        machine = place.machine_of(agent) if isinstance(place, MembersDriver) else None
        return (place, machine) if isinstance(place, MembersDriver) and machine else (None, "")

    def _end_member(self) -> None:
        self._members_driver.end_member()

    def _cut_members(self) -> None:
        self._members_driver.cut_members(self._between(0.1, 40.0))

    def _stop_most(self) -> None:
        self._members_driver.stop_most(self._between(*OUTAGE_S))

    @property
    def _members_driver(self) -> MembersDriver:
        place = self._world.coordinator
        assert isinstance(place, MembersDriver)
        return place

    @property
    def _etcd_driver(self) -> EtcdDriver:
        place = self._world.coordinator
        assert isinstance(place, EtcdDriver)
        return place
