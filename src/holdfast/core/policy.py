"""The policy after a worker failure: restart the workers, or end the job.

Both machines that decide about failures use it: `core.supervision` on a single node, and `core.rounds`
in a job of several nodes. The rules:

1.  If a restart would only repeat the failure, the job ends.
2.  Otherwise the workers restart if the budget has a restart left, which is then used. If none is left,
    the job ends.
3.  The budget belongs to the job. Only failures are charged. A regroup, a lost node and a restart that
    an operator requests are not.
"""

from __future__ import annotations

from enum import Enum

from holdfast.core.values import Value


class Verdict(Enum):
    """The decision about a failure."""

    RESTART = "restart"
    GIVE_UP = "give up"


class RestartBudget(Value):
    """The number of restarts that a job may use, and has used. A limit below 0 counts as 0."""

    max_restarts: int
    used: int = 0

    @property
    def left(self) -> int:
        """Return how many restarts remain."""
        return max(0, self.max_restarts - self.used)

    @property
    def is_exceeded(self) -> bool:
        """Whether more restarts were used than allowed, which is a bug."""
        return not 0 <= self.used <= max(0, self.max_restarts)

    def charge(self) -> RestartBudget:
        """Return the budget after one more restart; raise `ValueError` if none is left."""
        if self.left == 0:
            raise ValueError(f"all {self.max_restarts} restarts are used")
        return RestartBudget(self.max_restarts, self.used + 1)

    def limited(self) -> RestartBudget:
        """Return the budget with the used restarts capped at the limit, which may have changed."""
        return RestartBudget(self.max_restarts, min(self.used, max(0, self.max_restarts)))


def judge(budget: RestartBudget, *, retryable: bool) -> Verdict:
    """Decide about a failure. `retryable` is false if a restart would only repeat it."""
    return Verdict.RESTART if retryable and budget.left > 0 else Verdict.GIVE_UP
