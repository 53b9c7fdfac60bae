"""What a leader makes of what it hears: taking over, roll calls, and what must be stored."""

from __future__ import annotations

import msgspec
import pytest

from fake_node import RUN, FakeNode, a_job_of, a_node
from holdfast.core.etcd.leader import LedJob
from holdfast.core.protocol import JobOutcome, JobSettings, NodeInfo, NodeRole, Status, View
from holdfast.core.rounds import Job, JobPhase, NodeLost, Rounds

THREE = a_job_of(2, 3, max_restarts=3, settle_s=0.5)
STEP_S = 1.0


class Led:
    """A leader and nodes that do as they are told; `calls` has what each node has heard."""

    def __init__(self, names: str, settings: JobSettings = THREE, **more: object) -> None:
        self.settings = settings
        self.nodes: dict[str, FakeNode] = {}
        self.calls: dict[str, int] = {}
        self.lead = LedJob(0.0, Job(run_id=RUN), step_s=STEP_S, **more)  # type: ignore[arg-type]
        for name in names:
            self.join(name)

    @property
    def job(self) -> Job:
        return self.lead.job

    def join(self, name: str) -> list[View]:
        node = a_node(name, self.settings, len(self.nodes) + 1)
        self.nodes[name] = node
        self.calls[name] = self.lead.call
        return self.say(node.status())

    def say(self, status: Status) -> list[View]:
        return self.hear(self.lead.said(0.0, status, self.calls[status.info.node]))

    def fail(self, name: str) -> list[View]:
        return self.say(self.nodes[name].fail())

    def answer(self, name: str) -> list[View]:
        """Have a node say the same again, with the number of the last call."""
        self.calls[name] = self.lead.call
        return self.say(self.nodes[name].last_status())

    def lose(self, *names: str) -> list[View]:
        lost = [NodeLost(name, self.nodes[name].info.incarnation, "silence") for name in names]
        return self.hear(self.lead.lost(0.0, lost))

    def hear(self, told: list[View]) -> list[View]:
        for view in told:
            node = self.nodes[view.node]
            if node.hear(view) and node.follow():
                assert self.say(node.status()) == []
        return told

    def stored(self) -> Job:
        """Return a copy of the job, as a successor finds it."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self.job), type=Job)

    def succeed_by(self, job: Job, there: str, shown: dict[str, int] | None = None) -> list[View]:
        """Let another leader take over a job that was stored, from those who are there."""
        job.term += 1
        self.lead = LedJob(0.0, job, step_s=STEP_S, call=self.lead.call)
        statuses = [(self.nodes[name].last_status(), self.calls[name]) for name in there]
        revisions = {name: self.nodes[name].revision for name in there} | (shown or {})
        seen = {(name, self.nodes[name].info.incarnation): at for name, at in revisions.items()}
        return self.hear(self.lead.begin(0.0, statuses, seen, "it is gone"))


def roles(told: list[View]) -> dict[str, NodeRole]:
    return {view.node: view.role for view in told}


# Roll calls.


def test_a_failure_waits_until_all_other_members_have_answered() -> None:
    led = Led("abc")
    assert led.fail("a") == []
    assert (led.lead.call, led.job.generation, led.job.restarts) == (1, 0, 0)
    assert led.answer("b") == []
    assert led.job.generation == 0
    assert roles(led.answer("c")) == dict.fromkeys("abc", NodeRole.MEMBER)
    assert (led.job.generation, led.job.restarts) == (1, 1)


def test_an_old_number_is_no_answer() -> None:
    led = Led("abc")
    led.fail("a")
    led.answer("b")
    assert led.say(led.nodes["c"].status()) == []
    assert led.job.generation == 0


def test_a_round_of_one_has_nobody_to_wait_for() -> None:
    led = Led("a", a_job_of(1, 1, max_restarts=1))
    assert roles(led.fail("a")) == {"a": NodeRole.MEMBER}
    assert (led.job.generation, led.job.restarts) == (1, 1)


def test_a_failure_due_to_a_loss_is_not_charged() -> None:
    led = Led("abc")
    led.fail("a")
    led.answer("b")
    assert roles(led.lose("c")) == dict.fromkeys("ab", NodeRole.MEMBER)
    assert (led.job.generation, led.job.restarts, led.job.round) == (1, 0, 1)
    assert "c was lost" in led.job.why


def test_a_loss_that_is_noticed_first_of_all_is_the_reason_too() -> None:
    led = Led("abc")
    led.lose("c")
    led.nodes["a"].generation = 0  # Its workers failed before it heard of the new round.
    assert led.fail("a") == []
    assert (led.job.generation, led.job.restarts) == (1, 0)
    assert led.lead.call == 0, "there is nothing to find out"


def test_the_leaders_own_node_need_not_answer() -> None:
    led = Led("abc")
    led.lead.own = led.nodes["b"].info.incarnation
    led.fail("a")
    assert roles(led.answer("c")) == dict.fromkeys("abc", NodeRole.MEMBER)


def test_who_is_done_is_not_awaited() -> None:
    led = Led("abc")
    led.say(led.nodes["b"].succeed())
    led.fail("a")
    assert roles(led.answer("c")) == dict.fromkeys("abc", NodeRole.MEMBER)


def test_a_standby_is_not_awaited() -> None:
    led = Led("abcd")
    assert led.nodes["d"].role is NodeRole.STANDBY
    led.fail("a")
    led.answer("b")
    led.answer("c")
    assert led.job.generation == 1


def test_a_failure_of_another_member_is_an_answer() -> None:
    led = Led("abc")
    led.fail("a")
    led.answer("b")
    assert roles(led.fail("c")) == dict.fromkeys("abc", NodeRole.MEMBER)
    assert led.lead.call == 1, "one call is enough for one generation"
    assert (led.job.generation, led.job.restarts) == (1, 1)


def test_success_and_loss_during_a_call_are_answers() -> None:
    led = Led("abc")
    led.fail("a")
    assert led.say(led.nodes["b"].succeed()) == []
    assert roles(led.answer("c")) == dict.fromkeys("abc", NodeRole.MEMBER)
    led.fail("a")
    led.answer("b")
    assert led.lose("c")
    assert (led.job.generation, led.job.restarts) == (2, 1), "the loss is the reason"


def test_what_an_answer_costs_does_not_grow_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    is_awaited = LedJob._is_awaited

    def counted(lead: LedJob, info: NodeInfo) -> bool:
        looked_at.append(info)
        return is_awaited(lead, info)

    monkeypatch.setattr(LedJob, "_is_awaited", counted)
    names = "abcdefghijklmnopqrst"
    led = Led(names, a_job_of(20, 20, max_restarts=3))
    led.fail("a")
    for name in names[1:]:
        led.answer(name)
    assert led.job.generation == 1
    assert len(looked_at) == len(names), "each was looked at once, when the call went out"


def test_each_generation_has_a_call_of_its_own() -> None:
    led = Led("ab", a_job_of(2, 2, max_restarts=3))
    led.fail("a")
    led.answer("b")
    assert led.job.generation == 1
    led.fail("b")
    assert led.lead.call == 2
    assert led.job.generation == 1
    led.answer("a")
    assert led.job.generation == 2


def test_a_failure_of_the_last_generation_is_no_sign_of_life_in_this_one() -> None:
    led = Led("abc", a_job_of(1, 4, max_restarts=3, settle_s=0.5))
    led.lead.tick(0.0)
    led.hear(led.lead.tick(1.0))
    assert len(led.job.members) == 3
    led.fail("a")
    led.lose("b")  # Nobody knows of `c` yet: what `a` said still waits.
    assert led.job.generation == 1
    led.fail("c")
    assert led.job.generation == 1, "whether `a` is there is not known"
    led.answer("a")
    assert led.job.generation == 2


def test_the_last_word_of_who_is_lost_itself_counts_for_nothing() -> None:
    led = Led("abc")
    led.fail("a")
    led.lose("a")
    assert (led.job.generation, led.job.restarts) == (1, 0)
    led.answer("b")
    led.answer("c")
    assert (led.job.generation, led.job.restarts) == (1, 0)


def test_a_failure_without_a_restart_left_ends_the_job_after_the_call() -> None:
    led = Led("ab", a_job_of(2, 2))
    assert led.fail("a") == []
    assert roles(led.answer("b")) == dict.fromkeys("ab", NodeRole.CLOSED)
    assert led.job.outcome is JobOutcome.FAILED
    led.nodes["a"].report = b"the whole story"
    led.lead.is_changed = False
    assert led.say(led.nodes["a"].status()) == [], "it is not held back once the job is over"
    assert led.job.report == b"the whole story"
    assert led.lead.is_changed, "and must outlast this leader"


def test_numbers_of_calls_that_were_heard_are_not_given_twice() -> None:
    led = Led("ab", a_job_of(2, 2, max_restarts=3))
    led.calls = {"a": 7, "b": 7}  # The last number went with the lease of the job.
    led.say(led.nodes["b"].last_status())
    led.fail("a")
    assert led.lead.call == 8
    assert led.job.generation == 0
    led.answer("b")
    assert led.job.generation == 1


# Taking over.


def test_what_the_predecessor_had_no_time_to_tell_is_told() -> None:
    led = Led("abc")
    job = led.stored()
    assert led.succeed_by(job, "abc") == [], "everybody knows everything"
    (view,) = led.succeed_by(led.stored(), "abc", shown={"b": led.job.revision - 1})
    assert (view.node, view.role, view.generation) == ("b", NodeRole.MEMBER, 0)
    told = led.succeed_by(led.stored(), "abc", shown=dict.fromkeys("abc", -1))
    assert roles(told) == dict.fromkeys("abc", NodeRole.MEMBER)


def test_lost_and_new_and_failed_nodes_cost_one_round() -> None:
    led = Led("abc")
    job = led.stored()
    led.nodes["a"].fail()
    led.nodes["d"] = a_node("d", THREE, 4)
    led.nodes["d"].status()
    led.calls["d"] = 0
    told = led.succeed_by(job, "abd")
    assert roles(told) == dict.fromkeys("abd", NodeRole.MEMBER)
    assert len(told) == 3, "each node is told once"
    assert (led.job.round, led.job.generation, led.job.restarts) == (1, 1, 0)
    assert "it is gone" in led.job.why
    led.answer("b")
    assert (led.job.round, led.job.generation) == (1, 1)


def test_a_failure_while_nobody_led_is_charged_after_a_call() -> None:
    led = Led("ab", a_job_of(2, 2, max_restarts=3))
    job = led.stored()
    led.nodes["a"].fail()
    led.succeed_by(job, "ab")
    assert (led.lead.call, led.job.generation) == (1, 0)
    led.answer("b")
    assert (led.job.generation, led.job.restarts) == (1, 1)


def test_all_done_while_nobody_led_ends_the_job_well() -> None:
    led = Led("ab", a_job_of(2, 2))
    job = led.stored()
    for node in led.nodes.values():
        node.succeed()
    assert roles(led.succeed_by(job, "ab")) == dict.fromkeys("ab", NodeRole.CLOSED)
    assert led.job.outcome is JobOutcome.SUCCEEDED


def test_numbers_that_a_take_over_gives_are_stored() -> None:
    led = Led("ab", a_job_of(3, 3))  # They wait; `a` was told that it is alone.
    job = led.stored()
    (view,) = led.succeed_by(job, "ab")
    assert (view.node, view.present, view.role) == ("a", 2, NodeRole.WAITING)
    assert led.lead.is_changed, "the next to take over would give the same number again"
    assert led.job.revision == view.revision


# What must be stored, and what time brings.


def test_only_what_must_outlast_the_leader_has_to_be_stored() -> None:
    led = Led("abc")
    assert led.lead.is_changed
    led.lead.is_changed = False
    led.say(led.nodes["a"].status())
    led.answer("b")
    led.fail("c")
    assert not led.lead.is_changed, "nodes say that again themselves"
    led.answer("a")
    led.answer("b")
    assert led.lead.is_changed
    led.lead.is_changed = False
    led.say(led.nodes["a"].succeed())
    assert led.lead.is_changed


def test_who_waits_and_is_lost_is_struck_out_in_what_is_stored() -> None:
    led = Led("ab", a_job_of(3, 3))
    led.lead.is_changed = False
    assert led.lose("b") == []
    assert led.lead.is_changed


def test_losing_nobody_is_nothing() -> None:
    led = Led("abc")
    led.lead.is_changed = False
    assert led.lead.lost(0.0, []) == []
    assert led.lead.lost(0.0, [NodeLost("z", 9, "silence")]) == []
    assert not led.lead.is_changed


def test_a_wait_counts_from_when_it_began_and_only_while_somebody_looks() -> None:
    led = Led("ab", a_job_of(1, 3, settle_s=2.5))
    assert led.lead.next_deadline(0.0) == pytest.approx(STEP_S)
    assert led.lead.tick(100.0) == [], "of a long absence one step counts"
    assert led.lead.next_deadline(100.0) == pytest.approx(101.0)
    assert led.lead.tick(101.0) == []
    assert led.lead.next_deadline(101.0) == pytest.approx(101.5)
    assert roles(led.lead.tick(101.5)) == dict.fromkeys("ab", NodeRole.MEMBER)
    assert led.lead.next_deadline(101.5) is None
    assert led.lead.tick(200.0) == []


def test_a_wait_that_a_predecessor_began_is_begun_anew() -> None:
    led = Led("ab", a_job_of(1, 3, settle_s=0.5))
    led.succeed_by(led.stored(), "ab")
    assert led.lead.next_deadline(0.0) == pytest.approx(0.5)
    assert roles(led.lead.tick(0.5)) == dict.fromkeys("ab", NodeRole.MEMBER)


def test_decisions_are_told_to_who_wants_to_know() -> None:
    led = Led("a")
    assert led.lead.decisions is None
    led.lead.decisions = []
    led.join("b")
    led.join("c")
    (first, waiting), (second, formed) = led.lead.decisions[:2]
    assert isinstance(first, Status)
    assert isinstance(second, Status)
    assert [first.info.node, second.info.node] == ["b", "c"]
    assert [*waiting.nodes] == ["a", "b"], "the job as it was then"
    assert [*formed.nodes] == ["a", "b", "c"]


class Broken(Rounds):
    def check(self) -> None:
        if len(self.job.nodes) > 1:
            raise ValueError("too many")


def test_a_job_that_breaks_its_rules_is_closed_in_words() -> None:
    led = Led("a", rounds=Broken)
    assert roles(led.join("b")) == dict.fromkeys("ab", NodeRole.CLOSED)
    assert led.lead.broken == "ValueError: too many"
    assert "bug in Holdfast" in led.job.why
    assert (led.job.phase, led.lead.is_changed) == (JobPhase.CLOSED, True)
    assert roles(led.join("c")) == {"c": NodeRole.CLOSED}, "it is told once, and goes on"


def test_in_a_test_the_error_is_raised() -> None:
    with pytest.raises(ValueError, match="too many"):
        Led("ab", rounds=Broken, strict=True)
