"""Every checker sees what it is meant to see: rules broken on purpose are caught by it alone."""

from __future__ import annotations

import broken_rules as broken
import pytest

from simulator import CHECKERS, Checker, Machines, simulate
from simulator.checkers import (
    BudgetKept,
    ClosedIsFinal,
    CountersNeverDecrease,
    DrainedRests,
    EarlierCoordinatorIgnored,
    FencedStaysOut,
    FlappingDamped,
    GenerationGrows,
    JobEnds,
    LiveNodeKeepsId,
    LossIsNotCharged,
    NoNeedlessRestart,
    NoOlderWorkers,
    OneGenerationPerNode,
    OneRound,
    RanksAreUnique,
    RanksStable,
    RequestAppliedOnce,
    RequestsAnswered,
    RoundForms,
    RoundFormsInTime,
    SameRound,
    SizeInBounds,
    SlowIsNotLost,
    StuckNodeIsLost,
)

SEEDS_MAX = 40

ON_ETCD: list[tuple[Machines, type[Checker], str]] = [
    (Machines(rounds=broken.AnybodyTakesOver), LiveNodeKeepsId, "churn"),
    (Machines(etcd_session=broken.DeposedLeadersWrite), GenerationGrows, "pauses"),
    (Machines(etcd_session=broken.NobodyIsToldAgain), JobEnds, "everything"),
    (Machines(etcd_session=broken.NobodyLeadsAgain), RoundForms, "crashes"),
    (Machines(etcd_session=broken.SilenceIsRefusal), NoOlderWorkers, "partitions"),
    (Machines(etcd_session=broken.AnyRefusalCounts), NoOlderWorkers, "calm"),
    (Machines(rounds=broken.FencedComesBack), FencedStaysOut, "partitions"),
    (Machines(rounds=broken.LossesCost), BudgetKept, "crashes"),
    (Machines(session=broken.NeverExpires), NoOlderWorkers, "partitions"),
    (Machines(rounds=broken.EveryReturnIsWelcome), FlappingDamped, "flapping"),
    (Machines(rounds=broken.DoneAgain), RequestAppliedOnce, "requests"),
    (Machines(rounds=broken.DrainsInName), DrainedRests, "requests"),
    (Machines(rounds=broken.UndrainsInName), RoundForms, "requests"),
]

ON_BACKEND: list[tuple[Machines, type[Checker], str]] = [
    (Machines(rounds=broken.AnybodyTakesOver), LiveNodeKeepsId, "churn"),
    (Machines(rounds=broken.StartsAtOnce), NoOlderWorkers, "calm"),
    (Machines(shared_state=broken.ConflictsAreIgnored), SameRound, "lossy"),
    (Machines(shared_state=broken.StandstillIsLife), RoundForms, "crashes"),
    (Machines(shared_state=broken.OldStatesCount), GenerationGrows, "lossy"),
    (Machines(rounds=broken.FreeRestarts), BudgetKept, "calm"),
    (Machines(rounds=broken.LossesCost), BudgetKept, "crashes"),
    (Machines(rounds=broken.RoundChangesUnseen), OneRound, "churn"),
    (Machines(rounds=broken.FencedComesBack), FencedStaysOut, "partitions"),
    (Machines(rounds=broken.NeverAdopts), NoNeedlessRestart, "coordinator"),
    (Machines(rounds=broken.ClosedOpensAgain), ClosedIsFinal, "churn"),
    (Machines(rounds=broken.NeverDone), JobEnds, "calm"),
    (Machines(rounds=broken.RanksTurnedRound), RanksStable, "churn"),
    (Machines(rounds=broken.NoMaximum), SizeInBounds, "calm"),
    (Machines(rounds=broken.LostKeepsItsRank), RoundForms, "crashes"),
    (Machines(rounds=broken.SameGenerationAgain), GenerationGrows, "churn"),
    (Machines(rounds=broken.AdoptsAnIncompleteRound), OneRound, "coordinator"),
    (Machines(rounds=broken.JoinersAreLeftOut), RoundForms, "crashes"),
    (Machines(rounds=broken.OneIsEnough), ClosedIsFinal, "calm"),
    (Machines(supervision=broken.StartsBesideTheOld), OneGenerationPerNode, "calm"),
    (Machines(rounds=broken.EveryReturnIsWelcome), FlappingDamped, "flapping"),
    (Machines(rounds=broken.DoneAgain), RequestAppliedOnce, "requests"),
    (Machines(rounds=broken.DrainsInName), DrainedRests, "requests"),
]

CASES: list[tuple[Machines, type[Checker], str]] = [
    (Machines(rounds=broken.AnybodyTakesOver), LiveNodeKeepsId, "churn"),
    (Machines(rounds=broken.FencesBeginAnew), CountersNeverDecrease, "coordinator"),
    (Machines(coordinator=broken.ForgetsItsMemory), CountersNeverDecrease, "everything"),
    (Machines(coordinator=broken.HoldsNoFailure), LossIsNotCharged, "crashes"),
    (Machines(session=broken.AllPlacesAreAlike), EarlierCoordinatorIgnored, "take_over"),
    (Machines(rounds=broken.StartsAtOnce), NoOlderWorkers, "calm"),
    (Machines(session=broken.NeverExpires), NoOlderWorkers, "pauses"),
    (Machines(rounds=broken.FreeRestarts), BudgetKept, "calm"),
    (Machines(rounds=broken.LossesCost), BudgetKept, "crashes"),
    (Machines(rounds=broken.LostKeepsItsRank), RoundForms, "crashes"),
    (Machines(rounds=broken.SameGenerationAgain), GenerationGrows, "churn"),
    (Machines(rounds=broken.RoundChangesUnseen), OneRound, "churn"),
    (Machines(rounds=broken.FencedComesBack), FencedStaysOut, "partitions"),
    (Machines(rounds=broken.AdoptsAnIncompleteRound), OneRound, "coordinator"),
    (Machines(rounds=broken.NeverAdopts), NoNeedlessRestart, "coordinator"),
    (Machines(session=broken.OldViewsCount), GenerationGrows, "lossy"),
    (Machines(supervision=broken.StartsBesideTheOld), OneGenerationPerNode, "calm"),
    (Machines(rounds=broken.JoinersAreLeftOut), RoundForms, "churn"),
    (Machines(rounds=broken.ClosedOpensAgain), ClosedIsFinal, "churn"),
    (Machines(rounds=broken.OneIsEnough), ClosedIsFinal, "calm"),
    (Machines(rounds=broken.NeverDone), JobEnds, "calm"),
    (Machines(rounds=broken.RanksTurnedRound), RanksStable, "churn"),
    (Machines(rounds=broken.RankZeroForTwo), RanksAreUnique, "calm"),
    (Machines(rounds=broken.SizeIsGuessed), SameRound, "churn"),
    (Machines(rounds=broken.NoMaximum), SizeInBounds, "calm"),
    (Machines(coordinator=broken.NobodyIsEverLost), RoundForms, "crashes"),
    (Machines(rounds=broken.StuckIsNoMatter), StuckNodeIsLost, "wedged"),
    (Machines(parts=broken.SentWhole), SlowIsNotLost, "slow"),
    (Machines(rounds=broken.EveryReturnIsWelcome), FlappingDamped, "flapping"),
    (Machines(rounds=broken.SettlesForEver), RoundFormsInTime, "flapping"),
    (Machines(rounds=broken.DoneAgain), RequestAppliedOnce, "requests"),
    (Machines(rounds=broken.DrainsInName), DrainedRests, "requests"),
    (Machines(rounds=broken.UndrainsInName), RoundForms, "requests"),
    (Machines(rounds=broken.SaysNothing), RequestsAnswered, "requests"),
    (Machines(rounds=broken.RestartsCost), BudgetKept, "requests"),
    (Machines(rounds=broken.StopsUnasked), ClosedIsFinal, "requests"),
]


def name_of(machines: Machines) -> str:
    changed = [value for name, value in vars(machines).items() if value != vars(Machines())[name]]
    return " ".join(one.__name__ for one in changed)


@pytest.mark.parametrize(
    ("driver", "machines", "checker", "profile"),
    [
        pytest.param(driver, *case, id=f"{driver}-{name_of(case[0])}")
        for driver, cases in (("coordinator", CASES), ("etcd", ON_ETCD), ("backend", ON_BACKEND))
        for case in cases
    ],
)
def test_broken_rules_are_caught(
    driver: str, machines: Machines, checker: type[Checker], profile: str
) -> None:
    nodes = 5 if driver == "coordinator" else 9
    if profile == "flapping":  # The more of them, the more come while others wait.
        nodes = 12
    if driver == "etcd" and profile == "everything":  # And the more writes a leader dies between.
        nodes = 20
    minutes = 1.7
    if profile == "take_over":  # Somebody must take over, and be wrong about it.
        nodes, minutes = 9, 3.0
    for seed in range(SEEDS_MAX):
        result = simulate(
            seed,
            nodes=nodes,
            minutes=minutes,
            profile=profile,
            driver=driver,
            machines=machines,
            checkers=[checker],
        )
        if result.violation:
            assert result.invariant == checker.__name__
            assert result.story
            return
    pytest.fail(f"{checker.__name__} saw nothing in {SEEDS_MAX} runs")


def test_every_checker_is_shown_to_see() -> None:
    assert {checker for _, checker, _ in CASES} == set(CHECKERS)
