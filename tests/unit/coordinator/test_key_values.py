"""Against real coordinators it is tested in tests/integration; here is what those cannot show."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from holdfast.coordinator import kv
from holdfast.coordinator.kv import JobStores, KeyValueStore

if TYPE_CHECKING:
    from holdfast.wire.messages import StoreCall, StoreResult


class Direct:
    """Calls a store in this process; one whose answer would have to wait gets none."""

    run_id = "job"
    where = "head:29400"

    def __init__(self) -> None:
        self.keys = JobStores()
        self.down = ""
        self.forgotten: list[Future[StoreResult]] = []

    def begin_call(self, call: StoreCall) -> Future[StoreResult]:
        answer: Future[StoreResult] = Future()
        if not self.down:
            for _, result in self.keys.call(0.0, self, call):
                answer.set_result(result)
        return answer

    def forget_call(self, answer: Future[StoreResult]) -> None:
        self.forgotten.append(answer)

    def problem(self) -> str:
        return self.down


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Direct:
    monkeypatch.setattr(kv, "SLACK_S", 0.01)
    return Direct()


def test_an_answer_that_does_not_come_is_a_timeout(direct: Direct) -> None:
    store = KeyValueStore(direct, "s", timeout_s=0.01)
    with pytest.raises(TimeoutError, match=r"within 0\.01 s about: k"):
        store.get("k")
    assert len(direct.forgotten) == 1


def test_a_coordinator_that_is_away_is_a_connection_error(direct: Direct) -> None:
    direct.down = "no coordinator at head:29400 for 3 s: connection refused"
    with pytest.raises(ConnectionError, match="head:29400"):
        KeyValueStore(direct, "s", timeout_s=0.01).set("k", "v")


def test_a_connection_that_breaks_names_the_endpoint(direct: Direct) -> None:
    broken: Future[StoreResult] = Future()
    broken.set_exception(ConnectionError("the connection broke"))
    direct.begin_call = lambda call: broken  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="head:29400: the connection broke"):
        KeyValueStore(direct, "s").add("k", 1)


def test_a_wait_may_be_shorter_than_the_stores_time(direct: Direct) -> None:
    with pytest.raises(TimeoutError, match="for: a"):
        KeyValueStore(direct, "s", timeout_s=3600).wait(["a"], timedelta(0))


def test_appending_adds_to_what_others_appended(direct: Direct) -> None:
    """Also if the same was appended twice, or the key was deleted in between."""
    store = KeyValueStore(direct, "s")
    for _ in range(3):
        store.append("k", "x")
    store.append("k", b"")
    assert store.get("k") == b"xxx"
    store.delete_key("k")
    store.append("k", "y")
    assert store.get("k") == b"y"


@pytest.mark.parametrize(
    ("keys", "value"), [(["k" * 4001], b""), (["k"] * 10_001, b""), (["k"], b"x" * 500_000)]
)
def test_what_no_coordinator_takes_is_not_sent(
    direct: Direct, keys: list[str], value: bytes
) -> None:
    store = KeyValueStore(direct, "s")
    with pytest.raises(ValueError, match="over"):
        store.wait(keys) if not value else store.set(keys[0], value)
