"""What a node can tell of others by a state they share, in virtual time."""

from __future__ import annotations

import pytest

from holdfast.core.protocol import JobOutcome, JobSettings, NodeInfo, NodePhase
from holdfast.core.rounds import Job, JobPhase, Node, NodeLost, NodesLost, Rounds, WaitEnded
from holdfast.core.shared_state import Observer, known_as

NOW = 1000.0
INTERVAL_S = 1.0
LOST_AFTER_S = 5.0
LOOK_S = 0.5


def a_job(*names: str) -> Job:
    nodes = {
        name: Node(NodeInfo(node=name, incarnation=7), 0, NodePhase.READY, -1, beat=1)
        for name in names
    }
    return Job(run_id="job", settings=JobSettings(min_nodes=9, max_nodes=9), nodes=nodes)


@pytest.fixture
def observer() -> Observer:
    return Observer(NOW, "me", interval_s=INTERVAL_S, lost_after_s=LOST_AFTER_S)


def look(observer: Observer, job: Job, start: float, seconds: float) -> float:
    """Look at the same state for so long; return what time it is then."""
    now = start
    while now < start + seconds:
        now += LOOK_S
        observer.observe(now, Rounds(job))
    return now


def test_those_whose_counters_stand_still_are_lost_together(observer: Observer) -> None:
    job = a_job("me", "a", "b", "c")
    observer.observe(NOW, Rounds(job))
    now = look(observer, job, NOW, LOST_AFTER_S - 1)
    assert observer.judge(now, Rounds(job)) == []
    job.nodes["b"].beat += 1
    now = look(observer, job, now, 1)
    why = "no sign of life for 5 s"
    lost = [NodesLost((NodeLost("a", 7, why), NodeLost("c", 7, why)))]
    assert observer.judge(now, Rounds(job)) == lost
    assert observer.judge(now, Rounds(job)) == lost, "it counts only once it is stored"


def test_a_node_that_moves_again_is_not_lost(observer: Observer) -> None:
    job = a_job("me", "a")
    observer.observe(NOW, Rounds(job))
    now = look(observer, job, NOW, LOST_AFTER_S)
    job.nodes["a"].beat += 1
    observer.observe(now, Rounds(job))
    assert observer.judge(now, Rounds(job)) == []


def test_one_that_slept_itself_accuses_nobody(observer: Observer) -> None:
    job = a_job("me", "a")
    observer.observe(NOW, Rounds(job))
    now = NOW + 100 * LOST_AFTER_S
    observer.observe(now, Rounds(job))
    assert observer.judge(now, Rounds(job)) == []


def test_a_wait_counts_from_when_it_was_first_seen(observer: Observer) -> None:
    job = a_job("me")
    job.waiting, job.wait_seq = True, 3
    observer.observe(NOW, Rounds(job))
    assert observer.judge(NOW + 0.9, Rounds(job)) == []
    assert observer.judge(NOW + 1.0, Rounds(job)) == [WaitEnded(3)]
    job.wait_seq = 4
    observer.observe(NOW + 1.5, Rounds(job))
    assert observer.judge(NOW + 2.0, Rounds(job)) == []
    assert observer.judge(NOW + 2.5, Rounds(job)) == [WaitEnded(4)]


def test_nothing_is_judged_once_the_job_is_over(observer: Observer) -> None:
    job = a_job("me", "a")
    observer.observe(NOW, Rounds(job))
    now = look(observer, job, NOW, LOST_AFTER_S)
    job.phase, job.outcome = JobPhase.CLOSED, JobOutcome.FAILED
    assert observer.judge(now, Rounds(job)), "the report may still be waited for"
    job.final = True
    assert observer.judge(now, Rounds(job)) == []


def test_signs_of_life_are_due_once_in_an_interval(observer: Observer) -> None:
    job = a_job("me")
    observer.observe(NOW, Rounds(job))
    assert not observer.is_beat_due(NOW + 0.9)
    assert observer.is_beat_due(NOW + INTERVAL_S)
    observer.note_own(NOW + INTERVAL_S, job.nodes["me"])
    assert not observer.is_beat_due(NOW + INTERVAL_S)
    observer.note_own(NOW + 5 * INTERVAL_S, job.nodes["me"])
    assert observer.is_beat_due(NOW + 5 * INTERVAL_S), "it did not move"


@pytest.mark.parametrize(
    ("nodes", "pace_s", "silence_s"), [(2, 1.0, 5.0), (30, 1.5, 5.0), (100, 5.0, 15.0)]
)
def test_in_large_jobs_signs_of_life_are_rarer_and_missed_later(
    observer: Observer, nodes: int, pace_s: float, silence_s: float
) -> None:
    job = a_job(*map(str, range(nodes)))
    observer.observe(NOW, Rounds(job))
    assert not observer.is_beat_due(NOW + pace_s - 0.01)
    assert observer.is_beat_due(NOW + pace_s + 0.01)
    now = look(observer, job, NOW, silence_s - 2 * LOOK_S)
    assert observer.judge(now, Rounds(job)) == []
    now = look(observer, job, now, 2 * LOOK_S)
    assert len(observer.judge(now, Rounds(job))) == 1


def test_a_node_is_known_by_its_incarnation() -> None:
    job = a_job("a")
    assert known_as(job, "a", 7) is job.nodes["a"]
    assert known_as(job, "a", 8) is None
    assert known_as(job, "b", 7) is None
