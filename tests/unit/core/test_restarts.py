from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.restarts import Budget, Verdict, judge

untimed = settings(deadline=None)  # Others may need the machine meanwhile.


def test_a_new_budget_is_unused() -> None:
    budget = Budget(3)
    assert budget.used == 0
    assert budget.left == 3


@untimed
@given(st.integers(0, 100))
def test_a_budget_can_be_charged_exactly_so_often(max_restarts: int) -> None:
    budget = Budget(max_restarts)
    for used in range(max_restarts):
        assert budget == Budget(max_restarts, used)
        assert budget.left == max_restarts - used
        budget = budget.charge()
    assert budget.left == 0
    with pytest.raises(ValueError, match=f"all {max_restarts} restarts are spent"):
        budget.charge()


def test_charging_leaves_the_budget_before_as_it_was() -> None:
    budget = Budget(2)
    budget.charge()
    assert budget == Budget(2, used=0)


@untimed
@given(st.integers(-100, 0), st.integers(0, 3))
def test_a_budget_below_zero_is_none(max_restarts: int, used: int) -> None:
    budget = Budget(max_restarts, used)
    assert budget.left == 0
    with pytest.raises(ValueError, match="spent"):
        budget.charge()


def test_a_failure_is_answered_by_a_restart_while_the_budget_lasts() -> None:
    budget = Budget(1)
    assert judge(budget, retryable=True) is Verdict.RESTART
    assert judge(budget.charge(), retryable=True) is Verdict.GIVE_UP


@untimed
@given(st.integers(0, 100))
def test_what_no_restart_mends_is_given_up_whatever_the_budget(max_restarts: int) -> None:
    assert judge(Budget(max_restarts), retryable=False) is Verdict.GIVE_UP


@untimed
@given(st.integers(-3, 10), st.integers(0, 10), st.booleans())
def test_a_restart_that_is_decided_can_be_charged(
    max_restarts: int, used: int, retryable: bool
) -> None:
    budget = Budget(max_restarts, used)
    if judge(budget, retryable=retryable) is Verdict.RESTART:
        assert budget.charge().used == used + 1
