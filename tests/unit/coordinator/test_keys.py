from __future__ import annotations

from typing import Any

import pytest

from holdfast.coordinator import kv as module
from holdfast.coordinator.kv import JobStores
from holdfast.wire.messages import StoreCall, StoreOp, StoreResult


class Calls:
    """Makes calls of one caller at a time, and remembers every answer by caller and number."""

    def __init__(self, **limits: int) -> None:
        self.keys = JobStores(**limits)
        self.answers: dict[tuple[object, int], StoreResult] = {}
        self._count = 0

    def __call__(
        self, op: StoreOp, *keys: str, by: str = "me", at: float = 0.0, **fields: Any
    ) -> StoreResult | None:
        self._count += 1
        fields = {"run_id": "job"} | fields
        call = StoreCall(id=self._count, op=op, keys=keys, **fields)
        self.take(self.keys.call(at, by, call))
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


def refusal(result: StoreResult | None) -> str:
    assert result is not None
    assert not result.ok
    return result.why


def test_a_value_is_got_as_it_was_set(calls: Calls) -> None:
    ok(calls("set", "k", value=b"\0v"))
    assert ok(calls("get", "k")).value == b"\0v"
    assert ok(calls("num_keys")).amount == 1
    assert ok(calls("check", "k")).amount == 1
    assert ok(calls("check", "k", "l")).amount == 0
    assert ok(calls("delete", "k")).amount == 1
    assert ok(calls("delete", "k")).amount == 0
    assert ok(calls("num_keys")).amount == 0


def test_counters(calls: Calls) -> None:
    assert ok(calls("add", "n", amount=3)).amount == 3
    assert ok(calls("add", "n", amount=-5)).amount == -2
    assert ok(calls("get", "n")).value == b"-2"
    calls("set", "text", value=b"x")
    assert "text is not a number" in refusal(calls("add", "text", amount=1))
    calls("set", "large", value=str(2**63 - 1).encode())
    assert "64 bits" in refusal(calls("add", "large", amount=1))


@pytest.mark.parametrize(
    ("held", "expected", "after", "swapped"),
    [
        (None, b"", b"new", 1),
        (None, b"x", b"x", 0),
        (b"old", b"old", b"new", 1),
        (b"old", b"x", b"old", 0),
        (b"old", b"", b"old", 0),
        (b"", b"", b"new", 1),
        (b"", b"x", b"", 0),
    ],
)
def test_compare_set(
    calls: Calls, held: bytes | None, expected: bytes, after: bytes, swapped: int
) -> None:
    if held is not None:
        calls("set", "k", value=held)
    result = ok(calls("compare_set", "k", expected=expected, value=b"new"))
    assert (result.value, result.amount) == (after, swapped)
    assert ok(calls("check", "k")).amount == (held is not None or swapped)


def test_get_is_answered_when_the_value_comes(calls: Calls) -> None:
    assert calls("get", "k", by="you", timeout_s=5) is None
    calls("set", "other", value=b"x")
    assert ("you", 1) not in calls.answers
    calls("set", "k", value=b"v")
    assert calls.answers["you", 1].value == b"v"
    assert calls.keys.next_deadline() is None


def test_wait_is_answered_when_all_values_are_there(calls: Calls) -> None:
    calls("set", "a")
    assert calls("wait", "a", "b", "c", by="you", timeout_s=5) is None
    calls("add", "b", amount=1)
    calls("delete", "a")
    calls("compare_set", "c", value=b"x")
    assert ("you", 2) not in calls.answers  # What was there is gone again.
    calls("set", "a")
    assert calls.answers["you", 2].ok


def test_a_wait_ends_at_its_time_and_names_what_is_missing(calls: Calls) -> None:
    calls("set", "a")
    calls("wait", "a", "b", by="you", at=10, timeout_s=5)
    calls("get", "c", by="me", at=10, timeout_s=7)
    assert calls.keys.next_deadline() == 15
    calls.take(calls.keys.tick(14.9))
    assert ("you", 2) not in calls.answers
    calls.take(calls.keys.tick(15))
    assert refusal(calls.answers["you", 2]) == "no value came within 5 s for: b"
    assert calls.answers["you", 2].amount == 1
    assert calls.keys.next_deadline() == 17
    calls("set", "c")
    assert calls.answers["me", 3].ok
    assert calls.keys.tick(100) == []


def test_a_wait_without_time_is_answered_at_once(calls: Calls) -> None:
    assert "for: k" in refusal(calls("get", "k"))
    many = [f"key {number}" for number in range(9)]
    assert "and 4 more" in refusal(calls("wait", *many))


def test_scopes_and_jobs_are_apart(calls: Calls) -> None:
    calls("set", "k", value=b"1", scope="a")
    calls("set", "k", value=b"2", scope="b")
    calls("set", "k", value=b"3", scope="a", run_id="other")
    assert ok(calls("get", "k", scope="a")).value == b"1"
    assert ok(calls("get", "k", scope="b")).value == b"2"
    assert ok(calls("num_keys", scope="c")).amount == 0


def test_a_job_that_is_over_takes_its_keys_along(calls: Calls) -> None:
    calls("set", "k")
    calls("get", "never", by="you", timeout_s=5)
    calls("set", "k", run_id="other")
    calls.take(calls.keys.keep_only({"other"}))
    assert "the job is over" in refusal(calls.answers["you", 2])
    assert calls.keys.next_deadline() is None
    assert ok(calls("num_keys")).amount == 0
    assert ok(calls("num_keys", run_id="other")).amount == 1


def test_a_caller_who_is_gone_is_forgotten(calls: Calls) -> None:
    calls("get", "k", by="you", timeout_s=5)
    calls("get", "k", by="me", timeout_s=5)
    calls.keys.forget_caller("you")
    calls.keys.forget_caller("nobody")
    calls("set", "k")
    assert ("you", 1) not in calls.answers
    assert calls.answers["me", 2].ok


def test_limits() -> None:
    calls = Calls(keys_max=2, bytes_max=10)
    ok(calls("set", "a", value=b"123"))
    assert "10 bytes" in refusal(calls("set", "b", value=b"1234567"))
    ok(calls("set", "b", value=b"1"))
    assert "2 keys" in refusal(calls("set", "c", value=b""))
    ok(calls("set", "a", value=b"1"))  # Less is always possible.
    ok(calls("delete", "b"))
    ok(calls("set", "c", value=b"12345"))


def test_the_number_of_calls_that_wait_is_limited() -> None:
    calls = Calls(waiting_max=1)
    assert calls("get", "x", timeout_s=1) is None
    assert "wait already" in refusal(calls("get", "x", timeout_s=1))


def test_keys_that_are_waited_for_take_room() -> None:
    name = "x" * 1000
    calls = Calls(bytes_max=2 * (len(name) + module.WAITED_KEY_BYTES))
    assert calls("get", name, timeout_s=1) is None
    assert calls("wait", name, by="you", timeout_s=2) is None
    assert "store is full" in refusal(calls("wait", name, timeout_s=1))
    assert "store is full" in refusal(calls("set", "k"))
    calls.take(calls.keys.tick(1.0))
    ok(calls("set", "k"))
    calls.keys.forget_caller("you")
    ok(calls("delete", "k"))
    assert calls("wait", name, name, timeout_s=1) is None
    calls.take(calls.keys.keep_only(()))
    assert calls("wait", name, name, timeout_s=1) is None


def test_there_is_a_limit_over_all_jobs() -> None:
    calls = Calls(bytes_max=10, total_bytes_max=15)
    ok(calls("set", "k", value=b"123456789"))
    assert "all jobs are full: 15" in refusal(calls("set", "k", value=b"12345", run_id="other"))
    ok(calls("set", "k", value=b"1234", run_id="other"))
    calls.take(calls.keys.keep_only({"other"}))
    ok(calls("set", "k", value=b"123456789", run_id="third"))


def test_of_too_many_scopes_the_one_unused_for_longest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SCOPES_MAX", 2)
    calls = Calls(keys_max=2)
    for scope in "ab":
        ok(calls("set", "k", scope=scope))
    ok(calls("get", "k", scope="a"))
    ok(calls("num_keys", scope="never"))  # To look makes no scope.
    ok(calls("set", "k", scope="c"))
    assert [ok(calls("num_keys", scope=scope)).amount for scope in "abc"] == [1, 0, 1]


def test_who_waits_in_a_scope_that_goes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCOPES_MAX", 1)
    calls = Calls()
    assert calls("get", "k", by="you", scope="a", timeout_s=5) is None
    ok(calls("set", "k", scope="b"))
    assert "over 1 scopes" in refusal(calls.answers["you", 1])
    assert calls.keys.next_deadline() is None


@pytest.mark.parametrize("op", ["get", "set", "add", "compare_set", "delete"])
def test_calls_for_one_key_take_one(calls: Calls, op: StoreOp) -> None:
    assert "takes one key" in refusal(calls(op, "a", "b"))
    assert "takes one key" in refusal(calls(op))


def test_calls_that_are_answered_do_not_pile_up() -> None:
    calls = Calls(waiting_max=10)
    for number in range(100):
        calls("get", f"k{number}", timeout_s=1000)
        calls("set", f"k{number}")
    assert len(calls.keys._deadlines) <= 21
