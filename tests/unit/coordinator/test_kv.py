"""What tests/integration cannot show: limits, waits, and connections that break."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest

from holdfast.coordinator import kv
from holdfast.coordinator.kv import JobStores, KeyValueStore, StoreCalls
from holdfast.wire.limits import STORE_VALUE_BYTES_MAX
from holdfast.wire.messages import StoreCall, StoreOp, StoreResult


class Calls:
    """Makes calls of one caller at a time, and remembers every answer by caller and number."""

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


def test_what_cannot_be_done_is_refused_and_changes_nothing(calls: Calls) -> None:
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


def test_wait_is_answered_when_all_values_are_there(calls: Calls) -> None:
    calls("set", "a")
    assert calls("wait", "a", "b", "c", by="you", timeout_s=5) is None
    calls("add", "b", amount=1)
    calls("delete", "a")
    calls("compare_set", "c", value=b"x")
    assert ("you", 2) not in calls.answers  # What was there is gone again.
    calls("get", "a", by="gone", timeout_s=5)
    calls("get", "a", by="her", timeout_s=5)
    calls.stores.forget_caller("gone")
    calls.stores.forget_caller("nobody")
    calls("set", "a", value=b"v")
    assert calls.answers["you", 2].ok
    assert calls.answers["her", 7].value == b"v"
    assert ("gone", 6) not in calls.answers
    assert calls.stores.next_deadline() is None


def test_a_wait_ends_at_its_time_and_names_what_is_missing(calls: Calls) -> None:
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
    now = calls("get", "k")  # Without time.
    assert now is not None
    assert now.timed_out


def test_a_job_that_is_over_takes_its_keys_along(calls: Calls) -> None:
    calls("set", "k")
    calls("get", "never", by="you", timeout_s=5)
    calls("set", "k", run_id="other")
    assert ok(calls("num_keys", scope="another")).amount == 0
    calls.take(calls.stores.keep_only({"other"}))
    assert is_refused(calls.answers["you", 2])
    assert calls.stores.next_deadline() is None
    assert ok(calls("num_keys")).amount == 0
    assert ok(calls("num_keys", run_id="other")).amount == 1


def test_bytes_are_limited_per_job_and_over_all() -> None:
    calls = Calls(bytes_max=1000, total_bytes_max=1500)
    ok(calls("set", "a", value=b"x" * 700))
    assert is_refused(calls("set", "b", value=b"x" * 300))
    ok(calls("set", "a", value=b"x" * 600))  # Less is always possible.
    assert is_refused(calls("set", "k", value=b"x" * 700, run_id="other"))
    ok(calls("set", "k", value=b"x" * 400, run_id="other"))
    calls.take(calls.stores.keep_only({"other"}))
    ok(calls("set", "k", value=b"x" * 700, run_id="third"))
    ok(calls("delete", "k", run_id="third"))
    ok(calls("set", "k", value=b"x" * 800, run_id="third"))


def test_what_is_waited_for_takes_room_and_gives_it_back() -> None:
    name = "x" * 1000
    calls = Calls(bytes_max=2 * (len(name) + kv.WAITED_KEY_BYTES))
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
        calls.take(calls.stores.keep_only(()))


def test_the_number_of_waiting_calls_is_limited_and_answered_ones_do_not_pile_up() -> None:
    calls = Calls(waiting_max=10)
    for number in range(100):
        calls("get", f"k{number}", timeout_s=1000)
        calls("set", f"k{number}")
    assert len(calls.stores._deadlines) <= 21
    for _ in range(10):
        assert calls("get", "x", timeout_s=1) is None
    assert is_refused(calls("get", "x", timeout_s=1))


def test_of_too_many_scopes_the_one_unused_for_longest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv, "SCOPES_MAX", 2)
    calls = Calls()
    ok(calls("set", "k", scope="a"))
    assert calls("get", "never", by="you", scope="b", timeout_s=5) is None
    ok(calls("get", "k", scope="a"))
    ok(calls("num_keys", scope="never"))  # To look makes no scope.
    ok(calls("set", "k", scope="c"))
    assert [ok(calls("num_keys", scope=scope)).amount for scope in "abc"] == [1, 0, 1]
    assert is_refused(calls.answers["you", 2])
    assert calls.stores.next_deadline() is None


# The client's side.


class Connection:
    """A connection that may be down, and what was sent over it."""

    def __init__(self) -> None:
        self.up = True
        self.sent: list[StoreCall] = []
        self.calls = StoreCalls(self.send)

    def send(self, call: StoreCall) -> bool:
        if self.up:
            self.sent.append(call)
        return self.up

    def begin(self, op: StoreOp = "get", key: str = "k") -> Future[StoreResult]:
        answer: Future[StoreResult] = Future()
        self.calls.begin(StoreCall(id=0, run_id="job", op=op, keys=(key,)), answer)
        return answer

    def breaks(self) -> None:
        self.up = False
        self.calls.disconnected()

    def is_back(self) -> None:
        self.up = True
        self.calls.connected()


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.mark.parametrize(
    ("op", "is_repeatable"),
    [("set", True), ("get", True), ("wait", True), ("check", True), ("num_keys", True),
     ("add", False), ("compare_set", False), ("append", False), ("delete", False)],
)  # fmt: skip
def test_only_what_changes_nothing_when_repeated_is_sent_again(
    connection: Connection, op: StoreOp, is_repeatable: bool
) -> None:
    answer = connection.begin(op)
    connection.breaks()
    later = connection.begin(op)  # It was never sent.
    connection.is_back()
    assert [call.id for call in connection.sent] == ([1, 1, 2] if is_repeatable else [1, 2])
    assert not later.done()
    if not is_repeatable:
        with pytest.raises(ConnectionError):
            answer.result(0)


def test_answers_reach_their_callers_until_the_end(connection: Connection) -> None:
    first, second, late = connection.begin(), connection.begin(), connection.begin()
    connection.calls.forget(late)
    connection.calls.forget(late)
    for number in (3, 2, 1, 1):
        connection.calls.answered(StoreResult(id=number, ok=True, amount=number))
    assert (first.result(0).amount, second.result(0).amount) == (1, 2)
    assert not late.done()
    before = connection.begin()
    connection.calls.fail("it is over")
    for answer in (before, connection.begin()):
        with pytest.raises(ConnectionError, match="it is over"):
            answer.result(0)


def test_calls_that_cannot_be_made(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        connection.begin(key="\ud800").result(0)
    monkeypatch.setattr(kv, "PENDING_MAX", 1)
    connection.begin()
    with pytest.raises(RuntimeError):
        connection.begin().result(0)
    assert len(connection.sent) == 1


class Direct:
    """Calls a store in this process; one whose answer would have to wait gets none."""

    run_id = "job"
    where = "head:29400"

    def __init__(self) -> None:
        self.stores = JobStores()
        self.down = ""
        self.forgotten: list[Future[StoreResult]] = []

    def begin_call(self, call: StoreCall) -> Future[StoreResult]:
        answer: Future[StoreResult] = Future()
        if not self.down:
            for _, result in self.stores.call(0.0, self, call):
                answer.set_result(result)
        return answer

    def forget_call(self, answer: Future[StoreResult]) -> None:
        self.forgotten.append(answer)

    def problem(self) -> str:
        return self.down


def test_an_answer_that_does_not_come_is_a_timeout_or_a_connection_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv, "SLACK_S", 0.01)
    direct = Direct()
    store = KeyValueStore(direct, "s", timeout_s=0.01)
    with pytest.raises(TimeoutError, match=r"\bk$"):
        store.get("k")
    assert len(direct.forgotten) == 1
    with pytest.raises(TimeoutError, match=r"a$"):
        KeyValueStore(direct, "s", timeout_s=3600).wait(["a"], timedelta(0))
    direct.down = "no coordinator at head:29400 for 3 s: connection refused"
    with pytest.raises(ConnectionError, match="head:29400"):
        store.set("k", "v")
    broken: Future[StoreResult] = Future()
    broken.set_exception(ConnectionError("it broke"))
    direct.begin_call = lambda call: broken  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="head:29400: it broke"):
        store.add("k", 1)


def test_what_no_coordinator_takes_is_not_sent() -> None:
    store = KeyValueStore(Direct(), "s")
    with pytest.raises(ValueError, match="over 4000"):
        store.wait(["k" * 4001])
    with pytest.raises(ValueError, match="10001"):
        store.wait(["k"] * 10_001)
    with pytest.raises(ValueError, match="500000"):
        store.set("k", b"x" * 500_000)
