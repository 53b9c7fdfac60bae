"""Which endpoint a call tries next, and when it gives up. Pure: times are arguments.

A request that may have been performed is not sent again unless doing it twice is harmless. If an endpoint
reports that there is no leader now, all are tried again after a pause, until the limit. If none
responds at all, the call ends after one round: its caller decides whether to retry.
"""

from __future__ import annotations

from holdfast.core.etcd.calls import Problem, ProblemKind
from holdfast.etcd.json_gateway import Handling, Refusal

CONNECT_S = 2.0
"""The limit for a connection to one endpoint, TLS included. TCP retransmits after a second, so one lost packet
is no failure."""
LEADERLESS_PAUSE_S = 0.1
"""The pause before all endpoints are tried again if none has a leader; elections take about a second."""
TRY_S_MIN = 0.01
"""An endpoint is not tried with less time than this: it could only fail."""
SHARE_S_MIN = 0.001

NO_TIME = Problem(ProblemKind.UNREACHABLE, "there was no time for a request")


class Attempts:
    """The endpoints that one call has tried, and the outcomes."""

    def __init__(self, endpoints: int, deadline: float, *, may_repeat: bool) -> None:
        self.over = False
        self.pause_s = 0.0
        """How long to wait before the next endpoint."""
        self._endpoints = endpoints
        self._deadline = deadline
        self._may_repeat = may_repeat
        self._asked: set[int] = set()
        self._leaderless: Problem | None = None
        self._ask_again = False
        self._renewed = False
        self._problem: Problem | None = None

    @property
    def problem(self) -> Problem:
        """Why there is no response."""
        return self._leaderless or self._problem or NO_TIME

    def next_endpoint(self, now: float, current: int) -> int | None:
        """Return the endpoint to try: the current one, or the next untried one; None at the end."""
        self.pause_s = 0.0
        if self.over or self.is_late(now):
            return None
        if len(self._asked) == self._endpoints:
            if not self._ask_again or self.is_late(now + LEADERLESS_PAUSE_S):
                return None
            self._asked.clear()
            self._ask_again = False
            self.pause_s = LEADERLESS_PAUSE_S
        return next(
            at
            for at in ((current + i) % self._endpoints for i in range(self._endpoints))
            if at not in self._asked
        )

    def is_late(self, now: float) -> bool:
        """Whether there is no time left for another attempt."""
        return self._deadline - now <= (0 if self._problem is None else TRY_S_MIN)

    def connect_s(self, now: float) -> float:
        """Return how long to wait for a connection, so that the other endpoints get their share."""
        share_s = (self._deadline - now) / (self._endpoints - len(self._asked))
        return max(min(share_s, CONNECT_S), SHARE_S_MIN)

    def answer_s(self, now: float) -> float:
        """Return how long to wait for a response: all the time left if no other endpoint may be tried then."""
        left_s = self._deadline - now
        if self._may_repeat:
            left_s /= self._endpoints - len(self._asked)
        return max(left_s, SHARE_S_MIN)

    def failed(self, at: int, problem: Problem, *, written: bool) -> None:
        """Note that an endpoint did not respond."""
        self._asked.add(at)
        self._note(problem)
        if written and not self._may_repeat:
            self._leaderless, self.over = None, True

    def refused(self, at: int, refusal: Refusal, *, can_renew: bool) -> bool:
        """Note a refusal; return whether to renew the token."""
        handling = refusal.handling
        if handling is Handling.RENEW_TOKEN and can_renew and not self._renewed:
            self._renewed = True
            return True
        self._asked.add(at)
        self._note(refusal.problem)
        if handling is Handling.ELSEWHERE or (handling is Handling.UNSURE and self._may_repeat):
            if refusal.problem.kind is ProblemKind.UNREACHABLE:
                self._leaderless, self._ask_again = refusal.problem, True
        else:
            self._leaderless, self._problem = None, refusal.problem
            self.over = True
        return False

    def _note(self, problem: Problem) -> None:
        """Keep the most useful problem: while one endpoint may recover, the problem is not permanent."""
        if (
            self._problem is None
            or self._problem.kind is not ProblemKind.UNREACHABLE
            or problem.kind is ProblemKind.UNREACHABLE
        ):
            self._problem = problem
