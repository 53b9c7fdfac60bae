"""Members of a cluster never make two of it, whatever fails, and make one in the end."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_worlds import World, run_faults

from holdfast.core.etcd.cluster import ClusterMember, DropEtcd, Founding, MemberEffect, MemberState
from simulator import Machines, simulate
from simulator.members import Split

FAULTS_S = 150.0
QUIET_S = 200.0
SEEDS_MAX = 400


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(12))
def test_one_cluster_decides_and_all_are_in_it_in_the_end(size: int, seed: int) -> None:
    world = World(1000 * size + seed, size)
    run_faults(world, FAULTS_S)
    world.heal()
    world.run(FAULTS_S + QUIET_S)
    assert world.is_whole(), [one.member and one.member.state for one in world.machines.values()]


# Without the rules the same faults end badly: what is checked can be seen to fail.


class Forgetful(ClusterMember):
    """Begins anew in the cluster that it has lost the data of (rule 1)."""

    _before: Founding | None = None

    def _found(self, now: float, founding: Founding) -> list[MemberEffect]:
        self._before = founding
        return super()._found(now, founding)

    def _ended(self, now: float) -> list[MemberEffect]:
        if self.state is not MemberState.SERVING or self._before is None:
            return super()._ended(now)
        self.founding = self._before
        self.incarnation = dict(self._before.roster)[self._machine]
        return [DropEtcd(), *super()._found(now, self._before)]


@pytest.mark.parametrize(
    ("size", "broken"),
    [
        (3, {"member": Forgetful}),
        (5, {"one_at_a_time": False}),  # Rule 2.
    ],
)
def test_members_without_a_rule_split(size: int, broken: dict[str, Any]) -> None:
    def run_seeds() -> None:
        for seed in range(SEEDS_MAX):
            run_faults(World(seed, size, **broken), FAULTS_S)

    with pytest.raises(Split):
        run_seeds()


# The same, with the nodes that are on those machines.


class Careless(ClusterMember):
    """Drops its data when etcd has ended twice in a row, whether others have them or not."""

    def _ended(self, now: float) -> list[MemberEffect]:
        effects = super()._ended(now)
        if self.state is not MemberState.RESTING:
            return effects
        self.cluster = ""
        return [DropEtcd()]


@pytest.mark.parametrize("broken", [Forgetful, Careless])
def test_nodes_do_not_survive_members_without_a_rule(broken: type[ClusterMember]) -> None:
    machines = Machines(cluster_member=broken)
    runs = (
        simulate(seed, nodes=3, profile="majorities", driver="etcd", machines=machines)
        for seed in range(SEEDS_MAX)
    )
    assert any(run.violation.startswith("Split") for run in runs)
