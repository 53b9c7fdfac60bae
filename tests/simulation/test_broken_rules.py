"""Every checker sees what it is meant to see: rules broken on purpose are caught by it alone."""

from __future__ import annotations

import broken_rules as broken
import pytest

from holdfast.testing.sim import CHECKERS, Checker, Rules, simulate
from holdfast.testing.sim.checkers import (
    BudgetKept,
    ClosedIsFinal,
    FencedStaysOut,
    GenerationGrows,
    JobEnds,
    NoNeedlessRestart,
    OneGenerationPerNode,
    OneRound,
    RankOnce,
    RanksStable,
    RoundForms,
    SameRound,
    SizeInBounds,
)

SEEDS_MAX = 40

ON_ETCD: list[tuple[Rules, type[Checker], str]] = [
    (Rules(session=broken.DeposedLeadersWrite), GenerationGrows, "pauses"),
    (Rules(session=broken.NobodyIsToldAgain), RoundForms, "lossy"),
    (Rules(session=broken.NobodyLeadsAgain), RoundForms, "crashes"),
    (Rules(rounds=broken.FencedComesBack), FencedStaysOut, "partitions"),
    (Rules(rounds=broken.LossesCost), BudgetKept, "crashes"),
]

CASES: list[tuple[Rules, type[Checker], str]] = [
    (Rules(rounds=broken.FreeRestarts), BudgetKept, "calm"),
    (Rules(rounds=broken.LossesCost), BudgetKept, "crashes"),
    (Rules(rounds=broken.LostKeepsItsRank), RoundForms, "crashes"),
    (Rules(rounds=broken.SameGenerationAgain), GenerationGrows, "churn"),
    (Rules(rounds=broken.RoundChangesUnseen), OneRound, "churn"),
    (Rules(rounds=broken.FencedComesBack), FencedStaysOut, "partitions"),
    (Rules(rounds=broken.AdoptsAnIncompleteRound), OneRound, "coordinator"),
    (Rules(rounds=broken.NeverAdopts), NoNeedlessRestart, "coordinator"),
    (Rules(membership=broken.OldViewsCount), GenerationGrows, "lossy"),
    (Rules(teamwork=broken.StartsBesideTheOld), OneGenerationPerNode, "calm"),
    (Rules(rounds=broken.JoinersAreLeftOut), RoundForms, "churn"),
    (Rules(rounds=broken.ClosedOpensAgain), ClosedIsFinal, "churn"),
    (Rules(rounds=broken.OneIsEnough), ClosedIsFinal, "calm"),
    (Rules(rounds=broken.NeverDone), JobEnds, "calm"),
    (Rules(rounds=broken.RanksTurnedRound), RanksStable, "churn"),
    (Rules(rounds=broken.RankZeroForTwo), RankOnce, "calm"),
    (Rules(rounds=broken.SizeIsGuessed), SameRound, "churn"),
    (Rules(rounds=broken.NoMaximum), SizeInBounds, "calm"),
    (Rules(hosting=broken.NobodyIsEverLost), RoundForms, "crashes"),
]


def name_of(rules: Rules) -> str:
    changed = [value for name, value in vars(rules).items() if value != vars(Rules())[name]]
    return " ".join(one.__name__ for one in changed)


@pytest.mark.parametrize(
    ("rules", "checker", "profile"), CASES, ids=[name_of(rules) for rules, _, _ in CASES]
)
def test_broken_rules_are_caught(rules: Rules, checker: type[Checker], profile: str) -> None:
    is_caught(rules, checker, profile, on_etcd=False)


@pytest.mark.parametrize(
    ("rules", "checker", "profile"), ON_ETCD, ids=[name_of(rules) for rules, _, _ in ON_ETCD]
)
def test_rules_that_are_broken_on_etcd_are_caught(
    rules: Rules, checker: type[Checker], profile: str
) -> None:
    is_caught(rules, checker, profile, on_etcd=True)


def is_caught(rules: Rules, checker: type[Checker], profile: str, *, on_etcd: bool) -> None:
    for seed in range(SEEDS_MAX):
        result = simulate(
            seed,
            nodes=9 if on_etcd else 5,
            minutes=1.7,
            profile=profile,
            on_etcd=on_etcd,
            rules=rules,
            checkers=[checker],
        )
        if result.violation:
            assert result.invariant == checker.__name__
            assert result.story
            return
    pytest.fail(f"{checker.__name__} saw nothing in {SEEDS_MAX} runs")


def test_every_checker_is_shown_to_see() -> None:
    assert {checker for _, checker, _ in CASES} == set(CHECKERS)
