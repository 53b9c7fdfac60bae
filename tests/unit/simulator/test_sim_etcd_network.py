"""What happens between simulated agents and their etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.core.etcd.calls import (
    Answer,
    Change,
    Get,
    Grant,
    Granted,
    KeyValue,
    Problem,
    Put,
    Txn,
    TxnDone,
)
from simulator import PROFILES, Machines, World
from simulator import etcd_network as module
from simulator.etcd_model import ELECTION_S, SimEtcd
from simulator.etcd_network import LEASE_CHECK_S, EtcdNetwork
from simulator.process import Process
from simulator.simulated_network import NetworkConditions
from simulator.world import RunLog, seeded

if TYPE_CHECKING:
    from collections.abc import Iterable

SOON_S = 0.1
KEY = b"key"


class Asker(Process):
    """An agent that only records what it receives."""

    def __init__(self, world: World, name: str = "asker") -> None:
        super().__init__(world, name, seeded(name))
        self.cut_in = self.cut_out = False
        self.lag_s = 0.0
        self.answers: list[tuple[int, Answer]] = []
        self.changes: list[tuple[int, int, tuple[Change, ...]]] = []
        self.ends: list[tuple[int, Problem]] = []
        self.told_at: list[float] = []

    def answered(self, delivery: tuple[int, Answer]) -> None:
        self.answers.append(delivery)
        self.told_at.append(self.world.now)

    def changed(self, delivery: tuple[int, int, tuple[Change, ...]]) -> None:
        assert not any(number == delivery[0] for number, _ in self.ends)
        self.changes.append(delivery)
        self.told_at.append(self.world.now)

    def watch_ended(self, delivery: tuple[int, Problem]) -> None:
        self.ends.append(delivery)
        self.told_at.append(self.world.now)

    @property
    def revisions(self) -> list[int]:
        return [revision for _, revision, _ in self.changes]


class Scene:
    """One agent and one etcd in a world where nothing else happens."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(
            seed,
            nodes=1,
            seconds=100.0,
            profile=PROFILES["calm"],
            machines=Machines(),
            log=RunLog(),
        )
        self.etcd = SimEtcd()
        self.network = EtcdNetwork(self.world, self.etcd, seeded(seed))
        self.agent = Asker(self.world)
        self._requests = 0

    def pass_s(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def send_request(self, *ops: Put | Get) -> int:
        self._requests += 1
        self.network.send_request(self.agent, self._requests, Txn(success=ops))
        return self._requests

    def put(self, value: bytes = b"") -> int:
        return self.send_request(Put(KEY, value))

    def change(self, values: Iterable[bytes] = (b"",)) -> None:
        """Write as another client, without network delay."""
        for value in values:
            self.etcd.perform(self.world.now, Txn(success=(Put(KEY, value),)))

    def watch(self, number: int = 1, start_revision: int = 0) -> None:
        self.network.watch(self.agent, number, KEY, b"", start_revision)
        self.pass_s(SOON_S)

    @property
    def stored(self) -> tuple[KeyValue, ...]:
        answer = self.etcd.perform(self.world.now, Txn(success=(Get(KEY),)))
        assert isinstance(answer, TxnDone)
        return answer.results[0]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_etcd_returns_with_its_data_and_leases_get_their_full_time(scene: Scene) -> None:
    scene.network.send_request(scene.agent, 1, Grant(5))
    scene.pass_s(SOON_S)
    ((_, granted),) = scene.agent.answers
    assert isinstance(granted, Granted)
    scene.send_request(Put(KEY, b"", granted.lease))
    scene.pass_s(4.0)
    scene.network.stop()
    scene.pass_s(10.0)
    assert scene.etcd.revision == 2, "no lease expires while etcd is down"
    scene.network.restart()
    scene.pass_s(5.0 + ELECTION_S - 0.01)
    assert scene.stored
    scene.pass_s(LEASE_CHECK_S + 0.02)
    assert not scene.stored


# Calls and watches during faults.


def trouble(seed: int) -> tuple[list[tuple[int, Answer]], list[int], list[float], int]:
    """Make calls and keep a watch during network faults; start a watch again after it ends."""
    scene = Scene(seed)
    agent, network, rng = scene.agent, scene.network, seeded(seed)
    scene.world.network.conditions = NetworkConditions(loss=0.1, jitter_s=2.5)
    watches = 1
    scene.watch(watches, 2)
    for _ in range(300):
        chance = rng.random()
        scene.put()
        if chance < 0.05:
            agent.cut_in, agent.cut_out = rng.random() < 0.5, rng.random() < 0.5
            network.cut(agent)
        elif chance < 0.15:
            agent.cut_in = agent.cut_out = False
        elif chance < 0.17:
            network.break_connections(agent)
        elif chance < 0.2:
            network.stop(host_too=rng.random() < 0.5)
        elif chance < 0.3:
            network.restart()
        elif chance < 0.32:
            network.elect(3.0 * rng.random())
        scene.pass_s(rng.random())
        if len(agent.ends) == watches:
            watches += 1
            network.watch(agent, watches, KEY, b"", max([1, *agent.revisions]) + 1)
    agent.cut_in = agent.cut_out = False
    network.restart()
    scene.world.network.conditions = NetworkConditions()
    scene.pass_s(3 * module.LATE_S)
    if len(agent.ends) == watches:
        watches += 1
        scene.watch(watches, max([1, *agent.revisions]) + 1)
    seen = [change.mod_revision for _, _, changes in agent.changes for change in changes]
    assert watches > 3
    assert seen == list(range(2, scene.etcd.revision + 1)), "every change once, and in order"
    return agent.answers, agent.revisions, agent.told_at, scene.etcd.revision


@pytest.mark.parametrize("seed", range(5))
def test_every_call_is_answered_once_and_no_change_is_missed(seed: int) -> None:
    answers, revisions, told_at, revision = trouble(seed)
    assert sorted(number for number, _ in answers) == list(range(1, 301))
    done = [one.revision for _, one in answers if isinstance(one, TxnDone)]
    assert len(set(done)) == len(done) < revision - 1, "some calls were executed without a response"
    assert trouble(seed) == (answers, revisions, told_at, revision), "the seed determines the run"
