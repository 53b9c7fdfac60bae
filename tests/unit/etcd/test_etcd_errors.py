from __future__ import annotations

from holdfast.core.etcd.calls import Problem, ProblemKind
from holdfast.errors import HoldfastError
from holdfast.etcd.sync_client import EtcdError

AWAY = Problem(ProblemKind.UNREACHABLE, "connection refused")


def test_the_message_names_the_endpoints() -> None:
    error = EtcdError(AWAY, "h1:1,h2:2", {"h1:1": "connection refused"})
    assert str(error) == "etcd at h1:1,h2:2: connection refused"
    assert (error.kind, error.why) == (ProblemKind.UNREACHABLE, "connection refused")
    assert isinstance(error, HoldfastError)
    assert error.exit_code == 78


def test_endpoints_that_fail_in_different_ways_are_all_told_of() -> None:
    error = EtcdError(AWAY, "h1:1,h2:2", {"h1:1": "no leader", "h2:2": "connection refused"})
    assert str(error) == "etcd at h1:1,h2:2: h1:1: no leader; h2:2: connection refused"


def test_an_answer_is_told_whatever_was_wrong_elsewhere() -> None:
    full = Problem(ProblemKind.NO_SPACE, "no space")
    error = EtcdError(full, "h1:1,h2:2", {"h1:1": "no leader", "h2:2": "connection refused"})
    assert str(error) == "etcd at h1:1,h2:2: no space"
