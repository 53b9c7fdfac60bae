"""Under any faults the members never form two clusters; after the faults they form one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from cluster_worlds import World, run_faults

from holdfast.core.etcd.cluster import Bootstrap, ClusterMember, DropEtcd, MemberEffect, MemberState
from simulator import Machines, simulate
from simulator.cluster_machines import OpenedEarly, Split

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS_S = 150.0
QUIET_S = 200.0
SEEDS_MAX = 400


# A third of the lists has an etcd that may damage its data when it is killed, on some or all machines.
def keeps_data(seed: int) -> Callable[[str], bool]:
    return lambda name: seed % 3 != 0 or (seed % 2 == 1 and name == "m1")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(18))
def test_all_machines_join_one_cluster_after_faults(size: int, seed: int) -> None:
    world = World(1000 * size + seed, size, keeps_data=keeps_data(seed))
    run_faults(world, FAULTS_S)
    world.heal()
    world.run(FAULTS_S + QUIET_S)
    assert world.is_complete(), [one.member and one.member.state for one in world.machines.values()]


# Members that break a rule: the same faults then cause a violation, so the checks detect it.


class RejoinsWithoutData(ClusterMember):
    """Starts as a new member of the cluster whose data it lost (rule 1)."""

    _before: Bootstrap | None = None

    def _start_bootstrap(self, now: float, bootstrap: Bootstrap) -> list[MemberEffect]:
        self._before = bootstrap
        return super()._start_bootstrap(now, bootstrap)

    def _etcd_ended(self, now: float) -> list[MemberEffect]:
        if self.state is not MemberState.SERVING or self._before is None:
            return super()._etcd_ended(now)
        self.bootstrap = self._before
        self.incarnation = dict(self._before.roster)[self._machine]
        return [DropEtcd(), *super()._start_bootstrap(now, self._before)]


class RestartsWithDamagedData(ClusterMember):
    """Restarts an unsafe etcd with its data."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"keeps_data": True})


@pytest.mark.parametrize(
    ("size", "broken"),
    [
        (3, {"member": RejoinsWithoutData}),
        (3, {"member": RestartsWithDamagedData, "keeps_data": lambda _: False}),
        (5, {"one_at_a_time": False}),  # Rule 2.
    ],
)
def test_a_broken_rule_splits_the_cluster(size: int, broken: dict[str, Any]) -> None:
    def run_seeds() -> None:
        for seed in range(SEEDS_MAX):
            run_faults(World(seed, size, **broken), FAULTS_S)

    with pytest.raises(Split):
        run_seeds()


class OpensAtOnce(ClusterMember):
    """Lets the nodes use the cluster once a majority serves."""

    def _protect(self, now: float) -> list[MemberEffect]:
        self._expected.clear()
        return super()._protect(now)


def test_opening_without_a_machine_that_responds_is_detected() -> None:
    def run_seeds() -> None:
        for seed in range(SEEDS_MAX):
            run_faults(World(seed, 3, member=OpensAtOnce), FAULTS_S)

    with pytest.raises(OpenedEarly):
        run_seeds()


# The same with the nodes of a job on those machines.


class DropsNeededData(ClusterMember):
    """Drops its data when etcd has exited twice in a row, even if no other member has it."""

    def _etcd_ended(self, now: float) -> list[MemberEffect]:
        effects = super()._etcd_ended(now)
        if self.state is not MemberState.BACKING_OFF:
            return effects
        self.cluster = ""
        return [DropEtcd()]


@pytest.mark.parametrize("broken", [RejoinsWithoutData, DropsNeededData])
def test_broken_member_rule_is_detected_in_a_job_with_nodes(broken: type[ClusterMember]) -> None:
    machines = Machines(cluster_member=broken)
    runs = (
        simulate(seed, nodes=3, profile="majorities", driver="etcd", machines=machines)
        for seed in range(SEEDS_MAX)
    )
    assert any(run.violation.startswith("Split") for run in runs)
