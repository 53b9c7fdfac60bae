from __future__ import annotations

from holdfast.core.etcd.calls import Problem, ProblemKind
from holdfast.etcd.async_client import CONNECT_S, LEADERLESS_PAUSE_S, Attempts
from holdfast.etcd.json_gateway import GatewayRefusal, Reaction

AWAY = Problem(ProblemKind.UNREACHABLE, "connection refused")
DENIED = Problem(ProblemKind.DENIED, "its certificate is not trusted")
NO_LEADER = GatewayRefusal(Problem(ProblemKind.UNREACHABLE, "no leader"), Reaction.ELSEWHERE)
TIMED_OUT = GatewayRefusal(Problem(ProblemKind.UNREACHABLE, "request timed out"), Reaction.UNSURE)
STALE = GatewayRefusal(Problem(ProblemKind.DENIED, "invalid auth token"), Reaction.RENEW_TOKEN)
TOO_LARGE = GatewayRefusal(Problem(ProblemKind.REFUSED, "request is too large"))


def tries(endpoints: int = 3, *, may_repeat: bool = False) -> Attempts:
    return Attempts(endpoints, 10.0, may_repeat=may_repeat)


def test_every_endpoint_is_tried_once_starting_with_the_current_one() -> None:
    t = tries()
    for current, expected in ((1, 1), (2, 2), (2, 0)):
        assert t.next_endpoint(0.0, current) == expected
        t.failed(expected, AWAY, written=False)
    assert t.next_endpoint(0.0, 1) is None
    assert t.problem == AWAY


def test_sent_request_is_repeated_only_if_it_is_idempotent() -> None:
    t = tries()
    t.failed(0, AWAY, written=True)
    assert t.next_endpoint(0.0, 1) is None
    t = tries(may_repeat=True)
    t.failed(0, AWAY, written=True)
    assert t.next_endpoint(0.0, 1) == 1


def test_ambiguous_response_ends_a_call_that_is_not_idempotent() -> None:
    t = tries()
    assert not t.refused(0, TIMED_OUT, can_renew=False)
    assert t.next_endpoint(0.0, 1) is None
    assert t.problem == TIMED_OUT.problem
    t = tries(may_repeat=True)
    t.refused(0, TIMED_OUT, can_renew=False)
    assert t.next_endpoint(0.0, 1) == 1


def test_without_a_leader_all_endpoints_are_retried_until_the_limit() -> None:
    t = tries(2)
    t.refused(0, NO_LEADER, can_renew=False)
    assert (t.next_endpoint(1.0, 1), t.pause_s) == (1, 0.0)
    t.failed(1, AWAY, written=False)
    assert (t.next_endpoint(1.0, 0), t.pause_s) == (0, LEADERLESS_PAUSE_S)
    t.refused(0, NO_LEADER, can_renew=False)
    assert t.next_endpoint(9.999, 1) is None  # The remaining time is too short for another attempt.
    assert t.is_late(9.999)
    # It is more useful than the problem of the other endpoint.
    assert t.problem == NO_LEADER.problem
    # If all endpoints are unreachable, there is only one more round.
    assert t.next_endpoint(9.0, 1) == 1
    t.failed(1, AWAY, written=False)
    assert t.next_endpoint(9.0, 0) == 0
    t.failed(0, AWAY, written=False)
    assert t.next_endpoint(9.0, 1) == 1
    t.failed(1, AWAY, written=False)
    assert t.next_endpoint(9.0, 0) is None


def test_permanent_refusal_ends_the_call() -> None:
    t = tries()
    t.refused(0, NO_LEADER, can_renew=False)
    t.refused(1, TOO_LARGE, can_renew=True)
    assert t.next_endpoint(0.0, 2) is None
    assert t.problem == TOO_LARGE.problem


def test_token_is_renewed_once() -> None:
    t = tries()
    assert t.refused(0, STALE, can_renew=True)
    assert t.next_endpoint(0.0, 0) == 0
    assert not t.refused(0, STALE, can_renew=True)
    assert t.next_endpoint(0.0, 1) is None
    assert t.problem == STALE.problem
    t = tries()
    assert not t.refused(0, STALE, can_renew=False)


def test_failure_is_not_permanent_while_one_endpoint_may_recover() -> None:
    for order in ((AWAY, DENIED), (DENIED, AWAY)):
        t = tries(2)
        for at, problem in enumerate(order):
            t.failed(at, problem, written=False)
        assert t.problem == AWAY
    t = tries(1)
    t.failed(0, DENIED, written=False)
    assert t.problem == DENIED


def test_endpoints_share_the_limit() -> None:
    t = tries()
    assert t.connect_s(0.0) == CONNECT_S
    assert t.connect_s(7.0) == 1.0
    assert t.answer_s(7.0) == 3.0  # No other endpoint is left to try.
    t.failed(0, AWAY, written=False)
    assert t.connect_s(9.0) == 0.5
    t = tries(may_repeat=True)
    assert t.answer_s(7.0) == 1.0
    assert t.answer_s(11.0) > 0
