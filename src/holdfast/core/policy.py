"""What a failure of the workers leads to: another start, or the end of the job.

Every machine that decides about a failure decides here: `core.supervision` for one node,
`core.rounds` for a job of many. The rules:

1.  If a new start would only repeat the failure, the job ends.
2.  Otherwise the workers restart while the budget lasts, and the restart is charged to it. If the
    budget is spent, the job ends.
3.  The budget belongs to the job. Only failures are charged: a regroup, a lost node and a restart
    that an operator requests are free.
"""

from __future__ import annotations

from enum import Enum

from holdfast.core.values import Value


class Verdict(Enum):
    """What a failure leads to."""

    RESTART = "restart"
    GIVE_UP = "give up"


class RestartBudget(Value):
    """How many restarts a job may have, and how many it has used. A limit below 0 counts as 0."""

    max_restarts: int
    used: int = 0

    @property
    def left(self) -> int:
        """Return how many restarts remain."""
        return max(0, self.max_restarts - self.used)

    @property
    def is_exceeded(self) -> bool:
        """Whether more restarts were used than allowed, which no decision leads to."""
        return not 0 <= self.used <= max(0, self.max_restarts)

    def charge(self) -> RestartBudget:
        """Return the budget after one more restart; raise `ValueError` if none is left."""
        if self.left == 0:
            raise ValueError(f"all {self.max_restarts} restarts are used")
        return RestartBudget(self.max_restarts, self.used + 1)

    def limited(self) -> RestartBudget:
        """Return the budget with no more restarts used than allowed: the limit may have changed."""
        return RestartBudget(self.max_restarts, min(self.used, max(0, self.max_restarts)))


def judge(budget: RestartBudget, *, retryable: bool) -> Verdict:
    """Decide about a failure. `retryable` is false if a new start would only repeat it."""
    return Verdict.RESTART if retryable and budget.left > 0 else Verdict.GIVE_UP
