from __future__ import annotations

from concurrent.futures import Future

import pytest

from holdfast.coordinator import kv
from holdfast.coordinator.kv import StoreCalls
from holdfast.wire.frames import FrameReader
from holdfast.wire.messages import StoreCall, StoreOp, StoreResult, decode


class Line:
    """A link that may be down, and what was sent over it."""

    def __init__(self) -> None:
        self.up = True
        self.sent: list[StoreCall] = []
        self.calls = StoreCalls(self.send)

    def send(self, frame: bytes) -> bool:
        if self.up:
            for body in FrameReader().feed(frame):
                message = decode(body)
                assert isinstance(message, StoreCall)
                self.sent.append(message)
        return self.up

    def begin(self, op: StoreOp = "get", key: str = "k") -> Future[StoreResult]:
        answer: Future[StoreResult] = Future()
        self.calls.begin(StoreCall(id=0, run_id="job", op=op, keys=(key,)), answer)
        return answer

    def cut(self) -> None:
        self.up = False
        self.calls.link_down()

    def mend(self) -> None:
        self.up = True
        self.calls.link_up()


@pytest.fixture
def line() -> Line:
    return Line()


def test_each_answer_reaches_who_asked(line: Line) -> None:
    first, second = line.begin(), line.begin()
    assert [call.id for call in line.sent] == [1, 2]
    line.calls.answered(StoreResult(id=2, ok=True, value=b"2"))
    line.calls.answered(StoreResult(id=1, ok=True, value=b"1"))
    line.calls.answered(StoreResult(id=1, ok=True, value=b"again"))
    assert (first.result(0).value, second.result(0).value) == (b"1", b"2")


def test_a_call_made_while_the_link_is_down_is_sent_when_it_is_up(line: Line) -> None:
    line.cut()
    line.begin("add")
    assert line.sent == []
    line.mend()
    assert [call.op for call in line.sent] == ["add"]


@pytest.mark.parametrize("op", ["set", "get", "wait", "check", "num_keys"])
def test_what_changes_nothing_when_repeated_is_sent_again(line: Line, op: StoreOp) -> None:
    answer = line.begin(op)
    line.cut()
    line.mend()
    assert [call.id for call in line.sent] == [1, 1]
    assert not answer.done()


@pytest.mark.parametrize("op", ["add", "compare_set", "delete"])
def test_what_must_not_be_done_twice_fails(line: Line, op: StoreOp) -> None:
    answer = line.begin(op)
    line.cut()
    with pytest.raises(ConnectionError, match="before the answer came"):
        answer.result(0)
    line.mend()
    assert len(line.sent) == 1


def test_the_end_fails_all_calls_now_and_later(line: Line) -> None:
    before = line.begin()
    line.calls.fail("it is over")
    for answer in (before, line.begin()):
        with pytest.raises(ConnectionError, match="it is over"):
            answer.result(0)


def test_a_call_whose_time_is_over_is_forgotten(line: Line) -> None:
    answer = line.begin()
    line.calls.forget(answer)
    line.calls.forget(answer)
    line.cut()
    line.mend()
    assert len(line.sent) == 1


def test_what_cannot_be_sent_is_the_callers_error(line: Line) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        line.begin(key="\ud800").result(0)
    assert line.sent == []


def test_the_number_of_calls_is_limited(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "PENDING_MAX", 1)
    line.begin()
    with pytest.raises(RuntimeError, match="wait already"):
        line.begin().result(0)
