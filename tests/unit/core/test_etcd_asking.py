"""Requests under way: each answer comes to who asked, once, while somebody waits for it."""

from __future__ import annotations

from holdfast.core.etcd.calls import (
    Answer,
    Asking,
    Change,
    Grant,
    Granted,
    KeepAlive,
    KeptAlive,
    SendRequest,
    StartWatch,
    StopWatch,
)

CHANGES = (Change(b"k", b"v", 5),)


class Listener:
    """Writes down what it is brought; has nothing to say to it but that."""

    def __init__(self) -> None:
        self.answers: list[tuple[float, Answer]] = []
        self.changes: list[tuple[float, tuple[Change, ...]]] = []

    def answered(self, now: float, answer: Answer) -> list[str]:
        self.answers.append((now, answer))
        return ["answered"]

    def changed(self, now: float, changes: tuple[Change, ...]) -> list[str]:
        self.changes.append((now, changes))
        return ["changed"]


def test_answers_come_to_who_asked_in_whatever_order() -> None:
    asking, first, second = Asking(), Listener(), Listener()
    one = asking.ask(Grant(5), first.answered)
    two = asking.ask(KeepAlive(7), second.answered)
    assert (one.request, two.request) == (Grant(5), KeepAlive(7))
    assert asking.answered(1.0, two.number, KeptAlive(5)) == ["answered"]
    assert asking.answered(2.0, one.number, Granted(9, 5)) == ["answered"]
    assert first.answers == [(2.0, Granted(9, 5))]
    assert second.answers == [(1.0, KeptAlive(5))]


def test_an_answer_counts_once() -> None:
    asking, listener = Asking(), Listener()
    ask = asking.ask(Grant(5), listener.answered)
    asking.answered(1.0, ask.number, Granted(9, 5))
    assert asking.answered(1.1, ask.number, Granted(9, 5)) == []
    assert asking.answered(1.1, 99, Granted(9, 5)) == []
    assert len(listener.answers) == 1


def test_who_is_answered_may_ask_again() -> None:
    asking = Asking()

    def again(_now: float, answer: Answer) -> list[SendRequest]:
        return [asking.ask(Grant(5), again)] if answer == KeptAlive(0) else []

    first = asking.ask(KeepAlive(7), again)
    (second,) = asking.answered(1.0, first.number, KeptAlive(0))
    assert second == SendRequest(first.number + 1, Grant(5))
    assert asking.answered(1.0, second.number, Granted(9, 5)) == []


def test_a_watch_tells_until_it_is_ended() -> None:
    asking, listener = Asking(), Listener()
    watch = asking.watch(b"a", b"b", 12, listener.changed)
    assert watch == StartWatch(watch.number, b"a", b"b", 12)
    assert asking.is_watching(watch.number)
    assert asking.changed(1.0, watch.number, CHANGES) == ["changed"]
    assert asking.changed(2.0, watch.number, CHANGES) == ["changed"]
    assert asking.unwatch(watch.number) == [StopWatch(watch.number)]
    assert not asking.is_watching(watch.number)
    assert asking.changed(3.0, watch.number, CHANGES) == []
    assert asking.unwatch(watch.number) == []
    assert [at for at, _ in listener.changes] == [1.0, 2.0]


def test_what_was_forgotten_means_nothing_any_more() -> None:
    asking, listener = Asking(), Listener()
    ask = asking.ask(Grant(5), listener.answered)
    watches = [asking.watch(b"a", b"b", 1, listener.changed) for _ in range(2)]
    assert asking.forget() == [StopWatch(one.number) for one in watches]
    assert asking.forget() == []
    assert asking.answered(1.0, ask.number, Granted(9, 5)) == []
    assert asking.changed(1.0, watches[0].number, CHANGES) == []
    later = asking.ask(Grant(5), listener.answered)
    assert later.number > watches[1].number, "a late answer would come to somebody else"
