"""Every invariant holds, whatever fails: many seeds over all fault profiles.

A seed that fails is shown again by the command in the message. More of them, one command:
`holdfast simulate --seeds 1:10000`.
"""

from __future__ import annotations

import pytest

from holdfast.testing.sim import PROFILES, mixed, simulate

MINUTES = 1.6
SEEDS_IN_A_TEST = 40
SEEDS = 320


def held(seed: int, *, nodes: int, profile: str, minutes: float = MINUTES) -> int:
    result = simulate(seed, nodes=nodes, minutes=minutes, profile=profile)
    assert not result.violation, (
        f"{result.invariant}: {result.violation}; {result.command}\n"
        + "\n".join(result.story[-40:])
    )
    return result.steps


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_IN_A_TEST))
def test_every_invariant_holds(first: int) -> None:
    steps = 0
    for seed in range(first, first + SEEDS_IN_A_TEST):
        profile, nodes = mixed(seed)
        steps += held(seed, nodes=nodes, profile=profile)
    assert steps > SEEDS_IN_A_TEST * 300, "next to nothing happened"


@pytest.mark.parametrize("profile", PROFILES)
def test_every_invariant_holds_with_many_nodes(profile: str) -> None:
    held(7, nodes=32, profile=profile)


def test_every_invariant_holds_for_longer() -> None:
    assert held(11, nodes=16, profile="everything", minutes=8.0) > 10_000


def test_seeds_in_a_row_have_all_profiles_and_few_and_many_nodes() -> None:
    kinds = [mixed(seed) for seed in range(SEEDS)]
    assert {profile for profile, _ in kinds} == set(PROFILES)
    assert {3, 12, 32} <= {nodes for _, nodes in kinds}
    assert {nodes for profile, nodes in kinds if profile == "everything"} >= set(range(3, 13))
