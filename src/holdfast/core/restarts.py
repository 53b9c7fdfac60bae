"""Whether a failure is answered by a new start, and what that costs.

A budget belongs to the job. Only failures are charged to it: a node that comes or goes costs
nothing. Some failures no restart can mend, and those end the job while budget is left.
"""

from __future__ import annotations

from enum import Enum

from holdfast.core.values import Value


class Verdict(Enum):
    """What a failure leads to."""

    RESTART = "restart"
    GIVE_UP = "give up"


class Budget(Value):
    """How many restarts a job may have, and how many it had."""

    max_restarts: int
    used: int = 0

    @property
    def left(self) -> int:
        """Restarts that may still be spent."""
        return max(0, self.max_restarts - self.used)

    def charge(self) -> Budget:
        """Return the budget after one more restart. Ask `left` before."""
        if self.left == 0:
            raise ValueError(f"all {self.max_restarts} restarts are spent")
        return Budget(self.max_restarts, self.used + 1)


def judge(budget: Budget, *, retryable: bool) -> Verdict:
    """Decide on a failure. `retryable` is false for what a new start would only repeat."""
    return Verdict.RESTART if retryable and budget.left > 0 else Verdict.GIVE_UP
