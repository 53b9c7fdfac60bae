"""Who leads: one at a time, found out whichever way the news of it comes."""

from __future__ import annotations

import pytest

from etcd_machines import GONE, settled
from holdfast.core.etcd.calls import (
    Answer,
    Asking,
    Change,
    Delete,
    EtcdEffect,
    Get,
    Grant,
    Granted,
    KeyValue,
    Problem,
    ProblemKind,
    Put,
    Revoke,
    SendRequest,
    Txn,
    TxnDone,
)
from holdfast.core.etcd.election import Election
from holdfast.testing.sim.etcd import SimEtcd

KEY = b"/leader"


class Candidate:
    """A node that wants to lead; its watch is on, what it hears is up to the test."""

    def __init__(self, etcd: SimEtcd, name: str) -> None:
        self.etcd = etcd
        self.asking = Asking()
        self.happened: list[str] = []
        self.asked: list[SendRequest] = []
        self.answers: list[tuple[int, Answer]] = []
        self.news: list[Change] = []
        self.lease = self.new_lease()
        self.election = Election(
            asking=self.asking,
            key=KEY,
            name=name,
            won=lambda: self._note("won"),
            lost=lambda: self._note("lost"),
            fail=lambda problem: self._note(problem.why),
        )
        etcd.subscribe(KEY, b"", 0, lambda _revision, changes: self.news.extend(changes))

    def _note(self, what: str) -> list[EtcdEffect]:
        self.happened.append(what)
        return []

    def ask(self, effects: list[EtcdEffect]) -> None:
        self.asked += [effect for effect in effects if isinstance(effect, SendRequest)]

    def new_lease(self) -> int:
        granted = self.etcd.perform(0.0, Grant(5))
        assert isinstance(granted, Granted)
        return granted.lease

    def look(self) -> KeyValue | None:
        done = self.etcd.perform(0.0, Txn((), (Get(KEY),)))
        assert isinstance(done, TxnDone)
        return done.results[0][0] if done.results[0] else None

    def up(self) -> None:
        """Take part, with what is there now."""
        self.ask(self.election.up(self.lease, self.look()))

    def carry_out(self) -> None:
        ask = self.asked.pop(0)
        self.answers.append((ask.number, self.etcd.perform(0.0, ask.request)))

    def answer(self, answer: Answer | None = None) -> None:
        number, real = self.answers.pop(0)
        self.ask(self.asking.answered(0.0, number, answer or real))

    def campaign(self) -> None:
        self.carry_out()
        self.answer()

    def hear(self) -> None:
        self.ask(self.election.leader_changed(self.news.pop(0)))

    def still_leads(self) -> bool:
        done = self.etcd.perform(0.0, Txn((self.election.still(),)))
        assert isinstance(done, TxnDone)
        return done.succeeded


@pytest.fixture
def etcd() -> SimEtcd:
    return SimEtcd(revision=40)


@pytest.fixture
def a(etcd: SimEtcd) -> Candidate:
    return Candidate(etcd, "a")


@pytest.fixture
def b(etcd: SimEtcd) -> Candidate:
    return Candidate(etcd, "b")


def elected(a: Candidate) -> Candidate:
    a.up()
    a.campaign()
    a.news.clear()
    return a


def test_won_by_the_answer(a: Candidate) -> None:
    a.up()
    assert a.election.is_campaigning
    a.carry_out()
    a.answer()
    assert a.happened == ["won"]
    assert a.election.term == a.etcd.revision
    assert a.still_leads()
    assert not a.election.is_campaigning
    a.hear()
    assert a.happened == ["won"], "the watch says nothing new"


def test_won_and_heard_by_the_watch_first(a: Candidate) -> None:
    a.up()
    a.carry_out()
    a.hear()
    assert a.happened == ["won"]
    assert a.still_leads()
    a.answer()
    assert (a.happened, a.asked) == (["won"], [])


def test_won_but_the_answer_was_lost(a: Candidate) -> None:
    a.up()
    a.carry_out()
    a.answer(GONE)
    assert a.happened == [GONE.why]
    a.election.down()
    a.up()  # With a new session, and the same lease.
    assert a.happened == [GONE.why, "won"]
    assert a.still_leads()


def test_won_late_by_a_request_that_was_given_up(a: Candidate) -> None:
    a.up()
    (late,) = a.asked
    a.asked.clear()
    a.election.down()
    a.asking.forget()
    a.up()
    a.etcd.perform(0.0, late.request)
    a.carry_out()
    a.answer()
    assert a.happened == ["won"]
    assert a.still_leads()
    a.hear()
    assert a.happened == ["won"]


def test_who_finds_a_leader_does_not_campaign(a: Candidate, b: Candidate) -> None:
    elected(a)
    b.up()
    assert (b.asked, b.happened) == ([], [])


def test_one_of_two_wins(a: Candidate, b: Candidate) -> None:
    a.up()
    b.up()
    a.carry_out()
    b.carry_out()
    b.answer()
    a.answer()
    assert (a.happened, b.happened) == (["won"], [])
    assert not b.election.is_campaigning
    assert b.election.term == 0
    for one in (a, b):
        one.hear()
    assert (a.happened, b.happened) == (["won"], [])
    assert a.still_leads()


def test_when_the_leader_is_gone_another_leads(a: Candidate, b: Candidate) -> None:
    elected(a)
    b.up()
    a.etcd.perform(0.0, Revoke(a.lease))
    b.news = b.news[-1:]
    b.hear()
    b.campaign()
    assert b.happened == ["won"]
    assert b.election.term > a.election.term
    assert b.still_leads()
    assert not a.still_leads(), "a deposed leader's transactions do nothing"
    a.hear()
    assert a.happened == ["won", "lost"]


def test_the_leader_is_gone_while_another_campaigns(a: Candidate, b: Candidate) -> None:
    a.up()
    b.up()
    a.campaign()
    b.carry_out()  # It lost; before it hears so, the leader is gone.
    a.etcd.perform(0.0, Revoke(a.lease))
    b.hear()
    b.hear()
    b.answer()
    assert b.happened == []
    b.campaign()
    assert b.happened == ["won"]


def test_old_news_of_another_leader_do_not_depose_this_one(a: Candidate, b: Candidate) -> None:
    b.up()
    elected(a)
    a.etcd.perform(0.0, Txn((), (Delete(KEY),)))
    b.campaign()
    assert b.happened == ["won"]
    b.hear()
    b.hear()
    assert b.happened == ["won"], "all of that was before it led"


def test_news_of_an_end_that_was_is_no_end_of_a_campaign(a: Candidate, b: Candidate) -> None:
    elected(a)
    b.up()
    a.etcd.perform(0.0, Txn((), (Delete(KEY),)))
    b.news = b.news[-1:]
    b.hear()
    b.carry_out()
    a.etcd.perform(0.0, Txn((), (Delete(KEY),)))  # Of whoever leads now.
    b.answer()
    assert b.happened == ["won"]
    while b.news:
        b.hear()
    assert b.happened == ["won", "lost"]
    b.campaign()
    assert b.happened == ["won", "lost", "won"]


def test_the_lease_is_gone_while_it_campaigns(a: Candidate) -> None:
    a.up()
    a.etcd.perform(0.0, Revoke(a.lease))
    a.campaign()
    assert a.happened == [], "of its lease the session hears itself"
    a.lease = a.new_lease()
    a.ask(a.election.leased(a.lease))
    a.campaign()
    assert a.happened == ["won"]


def test_won_with_a_lease_that_is_known_to_be_gone(a: Candidate) -> None:
    a.up()
    a.carry_out()
    a.etcd.perform(0.0, Revoke(a.lease))
    a.election.down()  # Of the end of its lease it hears before it hears of its victory.
    a.answer()
    assert a.happened == []
    assert a.election.term == 0


def test_a_key_on_another_lease_is_not_its_own(a: Candidate) -> None:
    elected(a)
    a.election.down()
    a.lease = a.new_lease()
    a.up()
    assert a.happened == ["won", "lost"]
    assert a.asked == [], "its own earlier key is there, until that lease ends"
    assert a.election.term == 0


def test_without_a_lease_there_is_no_campaign(a: Candidate) -> None:
    a.up()
    a.asked.clear()
    a.election.down()
    a.ask(a.election.leader_changed(Change(KEY, None, 60)))
    assert a.asked == []


def test_resigned_while_it_campaigns_and_won_all_the_same(a: Candidate) -> None:
    a.up()
    a.carry_out()
    a.election.is_open = False
    a.answer()
    assert a.happened == ["won"], "it must know, to give it back"
    a.etcd.perform(0.0, Txn((a.election.still(),), (Delete(KEY),)))
    a.hear()
    a.hear()
    assert a.happened == ["won", "lost"]
    assert a.asked == [], "it does not want to lead again"


@pytest.mark.parametrize(
    "kind", [ProblemKind.UNREACHABLE, ProblemKind.NO_SPACE, ProblemKind.DENIED]
)
def test_a_campaign_that_fails_ends_the_session(a: Candidate, kind: ProblemKind) -> None:
    a.up()
    a.carry_out()
    problem: Problem = settled(kind)
    a.answer(problem)
    assert a.happened == [problem.why]
    assert not a.election.is_campaigning


def test_another_value_under_the_key_deposes(a: Candidate) -> None:
    elected(a)
    a.etcd.perform(0.0, Txn((), (Put(KEY, b"somebody else"),)))
    a.hear()
    assert a.happened == ["won", "lost"]
    assert a.election.term == 0


def test_stepping_down_is_told_once(a: Candidate) -> None:
    elected(a)
    a.election.step_down()
    a.election.step_down()
    a.election.down()
    assert a.happened == ["won", "lost"]
