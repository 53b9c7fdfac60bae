"""The decision about a failure, by the budget and by whether it is retryable."""

from __future__ import annotations

import pytest

from holdfast.core.policy import RestartBudget, Verdict, judge


@pytest.mark.parametrize(
    ("limit", "used", "retryable", "verdict"),
    [
        (2, 1, True, Verdict.RESTART),
        (2, 2, True, Verdict.GIVE_UP),
        (2, 0, False, Verdict.GIVE_UP),
        (0, 0, True, Verdict.GIVE_UP),
        (-1, 0, True, Verdict.GIVE_UP),
    ],
)
def test_a_failure_restarts_while_the_budget_lasts(
    limit: int, used: int, retryable: bool, verdict: Verdict
) -> None:
    assert judge(RestartBudget(limit, used), retryable=retryable) is verdict


def test_a_spent_budget_refuses_another_charge() -> None:
    spent = RestartBudget(1).charge()
    assert spent == RestartBudget(1, 1)
    with pytest.raises(ValueError, match="all 1 restarts are used"):
        spent.charge()


def test_a_lower_limit_caps_the_restarts_used() -> None:
    assert RestartBudget(5, 3).limited() == RestartBudget(5, 3)
    assert RestartBudget(2, 3).limited() == RestartBudget(2, 2)
    assert RestartBudget(-1, 3).limited() == RestartBudget(-1, 0)
    assert RestartBudget(2, 3).is_exceeded
