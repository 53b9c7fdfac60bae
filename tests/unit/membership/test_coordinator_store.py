"""The client's side of the coordinator's store: connections that break, calls that time out."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta

import pytest

from holdfast.coordinator.job_stores import JobStores
from holdfast.membership import coordinator_store
from holdfast.membership.coordinator_store import CoordinatorStore, StoreCalls
from holdfast.wire.messages import StoreCall, StoreOp, StoreResult


class Connection:
    """A connection that may be down, and the calls that were sent over it."""

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
def test_only_repeatable_calls_are_sent_again(
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


def test_answers_reach_their_callers(connection: Connection) -> None:
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


def test_invalid_calls_fail(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        connection.begin(key="\ud800").result(0)
    monkeypatch.setattr(coordinator_store, "PENDING_MAX", 1)
    connection.begin()
    with pytest.raises(RuntimeError):
        connection.begin().result(0)
    assert len(connection.sent) == 1


class Direct:
    """Calls a store in this process; a call that must wait gets no result."""

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


def test_missing_answer_is_a_timeout_or_connection_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator_store, "SLACK_S", 0.01)
    direct = Direct()
    store = CoordinatorStore(direct, "s", timeout_s=0.01)
    with pytest.raises(TimeoutError, match=r"\bk$"):
        store.get("k")
    assert len(direct.forgotten) == 1
    with pytest.raises(TimeoutError, match=r"a$"):
        CoordinatorStore(direct, "s", timeout_s=3600).wait(["a"], timedelta(0))
    direct.down = "no connection to the coordinator at head:29400 for 3 s: connection refused"
    with pytest.raises(ConnectionError, match="head:29400"):
        store.set("k", "v")
    broken: Future[StoreResult] = Future()
    broken.set_exception(ConnectionError("it broke"))
    direct.begin_call = lambda call: broken  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="head:29400: it broke"):
        store.add("k", 1)


def test_oversized_call_is_not_sent() -> None:
    store = CoordinatorStore(Direct(), "s")
    with pytest.raises(ValueError, match="longer than 4000"):
        store.wait(["k" * 4001])
    with pytest.raises(ValueError, match="10001"):
        store.wait(["k"] * 10_001)
    with pytest.raises(ValueError, match="500000"):
        store.set("k", b"x" * 500_000)
