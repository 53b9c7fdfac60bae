"""The stores of a coordinator: limits and waits."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.coordinator import job_stores
from holdfast.coordinator.job_stores import JobStores
from holdfast.wire.messages import StoreCall, StoreOp, StoreResult
from holdfast.wire.wire_limits import STORE_VALUE_BYTES_MAX


class Calls:
    """Makes calls of one caller at a time, and records every result by caller and number."""

    def __init__(self, **limits: int) -> None:
        self.stores = JobStores(**limits)
        self.answers: dict[tuple[object, int], StoreResult] = {}
        self._count = 0

    def __call__(
        self, op: StoreOp, *keys: str, by: str = "me", at: float = 0.0, **fields: Any
    ) -> StoreResult | None:
        self._count += 1
        call = StoreCall(id=self._count, op=op, keys=keys, **({"run_id": "job"} | fields))
        self.take(self.stores.call(at, by, call))
        return self.answers.get((by, self._count))

    def take(self, answers: list[tuple[object, StoreResult]]) -> None:
        for caller, result in answers:
            assert (caller, result.id) not in self.answers
            self.answers[caller, result.id] = result


@pytest.fixture
def calls() -> Calls:
    return Calls()


def ok(result: StoreResult | None) -> StoreResult:
    assert result is not None
    assert result.ok, result.why
    return result


def is_refused(result: StoreResult | None) -> bool:
    return result is not None and not result.ok and not result.timed_out and bool(result.why)


def test_rejected_call_changes_nothing(calls: Calls) -> None:
    ok(calls("set", "text", value=b"x"))
    assert is_refused(calls("add", "text", amount=1))
    ok(calls("set", "large", value=str(2**63 - 1).encode()))
    assert is_refused(calls("add", "large", amount=1))
    ok(calls("set", "long", value=b"v" * STORE_VALUE_BYTES_MAX))
    assert is_refused(calls("append", "long", value=b"v"))
    assert ok(calls("get", "text")).value == b"x"
    one_key: tuple[StoreOp, ...] = ("get", "set", "add", "compare_set", "append", "delete")
    for op in one_key:
        assert is_refused(calls(op, "a", "b"))
        assert is_refused(calls(op))


def test_wait_returns_when_all_keys_have_values(calls: Calls) -> None:
    calls("set", "a")
    assert calls("wait", "a", "b", "c", by="you", timeout_s=5) is None
    calls("add", "b", amount=1)
    calls("delete", "a")
    calls("compare_set", "c", value=b"x")
    assert ("you", 2) not in calls.answers  # The first key was deleted again.
    calls("get", "a", by="gone", timeout_s=5)
    calls("get", "a", by="her", timeout_s=5)
    calls.stores.forget_caller("gone")
    calls.stores.forget_caller("nobody")
    calls("set", "a", value=b"v")
    assert calls.answers["you", 2].ok
    assert calls.answers["her", 7].value == b"v"
    assert ("gone", 6) not in calls.answers
    assert calls.stores.next_deadline() is None


def test_wait_times_out_and_names_missing_keys(calls: Calls) -> None:
    calls("set", "a")
    calls("wait", "a", *(f"b{number}" for number in range(7)), by="you", at=10, timeout_s=5)
    calls("get", "c", by="me", at=10, timeout_s=7)
    assert calls.stores.next_deadline() == 15
    calls.take(calls.stores.tick(14.9))
    assert ("you", 2) not in calls.answers
    calls.take(calls.stores.tick(15))
    result = calls.answers["you", 2]
    assert result.timed_out
    assert "b0, b1, b2, b3, b4, and 2 more" in result.why
    assert calls.stores.next_deadline() == 17
    calls("set", "c")
    assert calls.answers["me", 3].ok
    assert calls.stores.tick(100) == []
    now = calls("get", "k")  # With a timeout of 0.
    assert now is not None
    assert now.timed_out


def test_finished_job_loses_its_keys(calls: Calls) -> None:
    calls("set", "k")
    calls("get", "never", by="you", timeout_s=5)
    calls("set", "k", run_id="other")
    assert ok(calls("num_keys", scope="another")).amount == 0
    calls.take(calls.stores.drop_others({"other"}))
    assert is_refused(calls.answers["you", 2])
    assert calls.stores.next_deadline() is None
    assert ok(calls("num_keys")).amount == 0
    assert ok(calls("num_keys", run_id="other")).amount == 1


def test_bytes_are_limited_per_job_and_in_total() -> None:
    calls = Calls(bytes_max=1000, total_bytes_max=1500)
    ok(calls("set", "a", value=b"x" * 700))
    assert is_refused(calls("set", "b", value=b"x" * 300))
    ok(calls("set", "a", value=b"x" * 600))  # A smaller value is always accepted.
    assert is_refused(calls("set", "k", value=b"x" * 700, run_id="other"))
    ok(calls("set", "k", value=b"x" * 400, run_id="other"))
    calls.take(calls.stores.drop_others({"other"}))
    ok(calls("set", "k", value=b"x" * 700, run_id="third"))
    ok(calls("delete", "k", run_id="third"))
    ok(calls("set", "k", value=b"x" * 800, run_id="third"))


def test_waiting_uses_space_and_releases_it() -> None:
    name = "x" * 1000
    calls = Calls(bytes_max=2 * (len(name) + job_stores.WAITED_KEY_BYTES))
    for _ in range(3):
        assert calls("get", name, timeout_s=1) is None
        assert calls("wait", name, by="you", timeout_s=2) is None
        assert is_refused(calls("wait", name, timeout_s=1))
        assert is_refused(calls("set", "k"))
        calls.take(calls.stores.tick(1.0))
        ok(calls("set", "k"))
        calls.stores.forget_caller("you")
        ok(calls("delete", "k"))
        assert is_refused(calls("wait", name, name + "y", timeout_s=1))
        calls.take(calls.stores.drop_others(()))


def test_waiting_calls_are_limited_and_answered_ones_are_removed() -> None:
    calls = Calls(waiting_max=10)
    for number in range(100):
        calls("get", f"k{number}", timeout_s=1000)
        calls("set", f"k{number}")
    assert len(calls.stores._deadlines) <= 21
    for _ in range(10):
        assert calls("get", "x", timeout_s=1) is None
    assert is_refused(calls("get", "x", timeout_s=1))


def test_least_recently_used_scope_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_stores, "SCOPES_MAX", 2)
    calls = Calls()
    ok(calls("set", "k", scope="a"))
    assert calls("get", "never", by="you", scope="b", timeout_s=5) is None
    ok(calls("get", "k", scope="a"))
    ok(calls("num_keys", scope="never"))  # Reading creates no scope.
    ok(calls("set", "k", scope="c"))
    assert [ok(calls("num_keys", scope=scope)).amount for scope in "abc"] == [1, 0, 1]
    assert is_refused(calls.answers["you", 2])
    assert calls.stores.next_deadline() is None
