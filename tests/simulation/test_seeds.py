"""All invariants hold under all faults: many seeds over all profiles.

The message of a failure has the command that repeats it. To run more seeds: `python -m simulator --seeds 1:10000`.
"""

from __future__ import annotations

import pytest

from simulator import DRIVERS, PROFILES, mixed, simulate

MINUTES = 1.6
SEEDS_IN_A_TEST = 40
SEEDS = range(0, 200, SEEDS_IN_A_TEST)
SEEDS_ON_BACKENDS = range(12, 92, SEEDS_IN_A_TEST)
"""Polling nodes take five times as many steps, and the first seeds have 32 nodes."""


def held(
    seed: int, *, nodes: int, profile: str, minutes: float = MINUTES, driver: str = "coordinator"
) -> int:
    result = simulate(seed, nodes=nodes, minutes=minutes, profile=profile, driver=driver)
    assert not result.violation, (
        f"{result.invariant}: {result.violation}; {result.command}\n"
        + "\n".join(result.story[-40:])
    )
    return result.steps


@pytest.mark.parametrize(
    ("driver", "first"),
    [
        (driver, first)
        for driver in DRIVERS
        for first in (SEEDS_ON_BACKENDS if driver == "backend" else SEEDS)
    ],
)
def test_every_invariant_holds(driver: str, first: int) -> None:
    steps = 0
    for seed in range(first, first + SEEDS_IN_A_TEST):
        profile, nodes = mixed(seed)
        steps += held(seed, nodes=nodes, profile=profile, driver=driver)
    assert steps > SEEDS_IN_A_TEST * 300, "the runs had too few steps"


@pytest.mark.parametrize("driver", DRIVERS)
def test_every_invariant_holds_for_longer(driver: str) -> None:
    steps = held(11, nodes=16, profile="everything", minutes=8.0, driver=driver)
    assert steps > 10_000


# In the same runs, sending reports without parts makes nodes lost: `test_broken_rules`.
def test_long_reports_over_slow_links_do_not_lose_a_node() -> None:
    for seed in range(SEEDS_IN_A_TEST):
        held(seed, nodes=5, profile="slow", minutes=1.7)


# Fixed faults: writes that were performed late overwrote newer ones; nodes that joined just after the job had
# failed did not learn of its end; nodes that reported often did not renew their leases. Two seeds concern
# faults in checkers: the late end of a lease that etcd had renewed, and a failure that was reported to a new
# leader. In the three before the last, members of the job's own etcd dropped data that the others lacked. In
# the last, a node joined with a request to drain another one, and members changed their ranks.
@pytest.mark.parametrize(
    ("seed", "profile", "nodes"),
    [
        (18, "flapping", 4),
        (65, "pauses", 9),
        (73, "crashes", 10),
        (831, "lossy", 6),
        (1375, "pauses", 10),
        (2083, "crashes", 11),
        (201396, "churn", 12),
        (203135, "pauses", 6),
        (216, "members", 3),
        (231, "majorities", 10),
        (378, "majorities", 5),
        (433, "requests", 11),
    ],
)
def test_fixed_faults_on_etcd_do_not_recur(seed: int, profile: str, nodes: int) -> None:
    held(seed, nodes=nodes, profile=profile, driver="etcd")


# Nodes that joined just after the job had failed did not learn of its end. Two seeds concern faults in
# checkers: one considered a running node stopped because its store did not respond; the last one did not excuse
# a replaced node that was lost later. In seed 433 a node joined with a request to drain another one, and
# members changed their ranks.
@pytest.mark.parametrize(
    ("seed", "profile", "nodes", "minutes"),
    [
        (135, "pauses", 6, MINUTES),
        (155, "pauses", 8, MINUTES),
        (207, "wedged", 64, MINUTES),
        (5018, "pauses", 7, MINUTES),
        (433, "requests", 11, MINUTES),
        (1484, "everything", 11, 2.0),
    ],
)
def test_fixed_faults_on_a_backend_do_not_recur(
    seed: int, profile: str, nodes: int, minutes: float
) -> None:
    held(seed, nodes=nodes, profile=profile, minutes=minutes, driver="backend")


# An agent that replaced a member did not get its rank after a new coordinator had resumed the round; failures
# were charged although a member was lost. The last two concern faults in checkers: one mistook a node that
# left for a removed node; the other excused a disconnected and lost node only until it reconnected, although
# it was stopped then.
@pytest.mark.parametrize(
    ("seed", "profile", "nodes"),
    [
        (443300116, "everything", 5),
        (1579, "everything", 10),
        (3413, "everything", 10),
        (5571, "everything", 10),
        (3013, "everything", 10),
        (282, "majorities", 11),
        (5792, "everything", 64),
    ],
)
def test_fixed_faults_with_a_coordinator_do_not_recur(seed: int, profile: str, nodes: int) -> None:
    held(seed, nodes=nodes, profile=profile, minutes=2.0)


def test_consecutive_seeds_have_all_profiles_and_few_and_many_nodes() -> None:
    kinds = [mixed(seed) for seed in range(SEEDS.stop)]
    assert {profile for profile, _ in kinds} == set(PROFILES)
    assert {3, 12, 32} <= {nodes for _, nodes in kinds}
    assert {nodes for profile, nodes in kinds if profile == "everything"} >= set(range(3, 13))
