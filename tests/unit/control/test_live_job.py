"""A viewer's state of a running job: rates, marks, generations, and its bounds."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.control.history import Generation, GenerationEnd, NodeHistory, RunEnd
from holdfast.control.live_job import (
    EVENTS_MAX,
    GENERATIONS_MAX,
    HISTORY_NODES_MAX,
    SAMPLES_MAX,
    JobEnd,
    LiveJob,
)
from holdfast.control.series import Series, series_of_node
from holdfast.processes.workers.pages import CurvePoint
from holdfast.wire.messages import EventKind, EventRecord
from live_jobs import STEPS_PER_S, steady, summary


def watched(seconds: int, **fields: Any) -> LiveJob:
    """Return a job that was polled every second."""
    job = LiveJob()
    for at in range(1, seconds + 1):
        job.add_summary(1000.0 + at, summary(float(at), **fields))
    return job


def test_rates_use_the_clock_of_each_node() -> None:
    job = watched(5)
    assert [(row.rank, row.node) for row in job.ranks] == [
        (rank, f"node{rank // 2:03d}") for rank in range(6)
    ]
    assert {row.rate for row in job.ranks} == {STEPS_PER_S}
    assert {row.cpu for row in job.ranks} == {0.5}
    assert (job.header.step_min, job.header.step_max, job.header.running) == (50, 50, 6)
    assert job.header.goodput == pytest.approx(0.9)
    assert (job.nodes[1].ranks_text, job.nodes[1].rss_bytes) == ("2-3", 200_000_000)


def test_repeated_report_changes_no_rate() -> None:
    job = watched(5)
    for late in range(60):
        job.add_summary(1006.0 + late, summary(5.0))
    assert {row.rate for row in job.ranks} == {STEPS_PER_S}
    assert {row.cpu for row in job.ranks} == {0.5}
    again = summary(5.0)
    report = again.nodes[0].report
    assert report is not None
    # The agent's clock and the workers' steps are not read at the same moment.
    again.nodes[0] = replace(again.nodes[0], report=replace(report, elapsed_s=4.9999))
    job.add_summary(1070.0, again)
    assert {row.rate for row in job.ranks} == {STEPS_PER_S}


def test_slow_and_lagging_ranks_are_marked() -> None:
    def step_of(rank: int, at_s: float) -> int:
        if rank == 1:
            return steady(rank, at_s / 2)
        return steady(rank, at_s) - (25 if rank == 4 else 0)

    job = watched(6, step_of=step_of)
    assert {row.rank: (row.mark, row.lag) for row in job.ranks if row.mark} == {
        1: ("slow", 30),
        4: ("behind", 25),
    }
    assert [node.mark for node in job.nodes] == ["slow", "", "behind"]
    assert job.header.marked == 2


def test_stalled_rank_is_marked_until_it_continues() -> None:
    def step_of(rank: int, at_s: float) -> int:
        return steady(rank, min(at_s, 5.0) if rank == 3 and at_s < 20 else at_s)

    job = LiveJob()
    for at in range(1, 10):
        one = summary(float(at), step_of=step_of)
        report = one.nodes[1].report
        assert report is not None
        stuck = replace(report.workers[1], step_age_s=max(0.0, at - 5.0))
        one.nodes[1] = replace(
            one.nodes[1], report=replace(report, workers=[report.workers[0], stuck])
        )
        job.add_summary(at, one)
    assert [row.rank for row in job.ranks if row.mark == "stalled"] == [3]
    for at in range(20, 24):
        job.add_summary(at, summary(float(at), step_of=step_of))
    assert not any(row.mark == "stalled" for row in job.ranks)


def test_job_has_the_longest_eta_and_the_mean_loss() -> None:
    job = watched(3, more={"total": 900, "eta_s": 60.0, "loss": 2.0}, gpus=4)
    assert (job.header.total, job.header.eta_s, job.header.loss, job.header.gpu) == (
        900, 60.0, 2.0, 0.75,
    )  # fmt: skip
    assert [node.gpu for node in job.nodes] == [0.75] * 3
    late = summary(4.0, more={"total": 900, "eta_s": 60.0, "loss": 2.0})
    report = late.nodes[1].report
    assert report is not None
    workers = [replace(report.workers[0], eta_s=-1.0, loss="nan"), report.workers[1]]
    late.nodes[1] = replace(late.nodes[1], report=replace(report, workers=workers))
    job.add_summary(1004.0, late)
    assert (job.header.eta_s, job.header.loss, job.header.gpu) == (None, "nan", None)
    workers = [replace(workers[0], state="succeeded"), replace(workers[1], eta_s=90.0)]
    late.nodes[1] = replace(late.nodes[1], report=replace(report, workers=workers))
    job.add_summary(1005.0, late)
    assert job.header.eta_s == 90.0
    assert watched(3).header.eta_s is None


def test_series_begins_before_the_viewer_and_survives_a_lost_node() -> None:
    job = watched(60)
    curve = [CurvePoint(at * 10**9, 4 * at, None) for at in range(400, 1000)]
    series = series_of_node([[curve]], (), Series(), 1000.0)
    job.add_history(1060.0, "node000", [NodeHistory(now=1060.0, series=series)])
    found = job.series
    assert job.series is found
    assert found.rates[2] == 4.0
    assert found.rates[-3] == STEPS_PER_S
    assert found.rss[-3] == 600_000_000
    job.add_summary(1063.0, summary(63.0, nodes=2))
    assert job.series.rates[2] == 4.0
    job.add_summary(1064.0, summary(1.0, generation=-1))
    assert not any(job.series.rates), "another job of the same name"


def test_new_process_resets_its_rates() -> None:
    job = watched(5)
    assert [one.number for one in job.generations] == [0]
    job.add_summary(1006.0, summary(6.0, generation=1, pid=500, step_of=lambda *_: 3))
    assert [(one.number, one.is_over) for one in job.generations] == [(1, False), (0, True)]
    assert {(row.rate, row.cpu, row.step, row.pid - row.rank) for row in job.ranks} == {
        (None, None, 3, 500)
    }


def test_reports_of_an_older_generation_mark_no_rank() -> None:
    late = summary(6.0, generation=1, pid=500, step_of=lambda *_: 3)
    late.nodes[2] = replace(summary(5.5).nodes[1], node="node002", rank=2, first_rank=4)
    job = watched(5)
    job.add_summary(1006.0, late)
    assert [row.rank for row in job.ranks] == [*range(6)]
    assert {(row.mark, row.lag) for row in job.ranks} == {("", 0)}


def test_restart_combines_the_histories_of_nodes() -> None:
    job = watched(5)
    first = Generation(
        number=0, started_at=900.0, failed_at=989.0, stopping_at=990.0, stopped_at=990.5,
        reason="a worker failed", cause="rank 3 failed: exit code 1",
    )  # fmt: skip
    other = replace(
        first,
        failed_at=None,
        stopped_at=992.0,
        reason="the job changed the generation",
        cause="",
    )
    second = Generation(number=1, left_at=992.0, met_at=994.5, started_at=994.7, warm_at=997.7)
    both = [other, replace(second, left_at=992.0)]
    job.add_history(2000.0, "node001", [NodeHistory(now=1000.0, generations=both)])
    # Another host's clock, and a message that takes a tenth of a second.
    ahead = [one.shifted(70.0) for one in (first, replace(second, left_at=990.5))]
    job.add_history(2000.1, "node000", [NodeHistory(now=1070.0, generations=ahead)])
    job.add_summary(2001.0, summary(100.0, generation=1, restarts=1))
    newest, oldest = job.generations
    assert (newest.number, newest.started_at, newest.is_over) == (1, 1994.7, False)
    assert newest.stages == pytest.approx(
        {"detect": 1.0, "stop": 2.0, "regroup": 2.5, "start": 0.2, "warmup": 3.0}
    )
    assert newest.down_s == pytest.approx(8.7)
    assert (oldest.number, oldest.stages, oldest.ended_by) == (0, {}, "rank 3 failed: exit code 1")
    assert [(one.stage, round(one.end - one.begin, 3)) for one in job.spans] == [
        ("useful", 89.0), ("detect", 1.0), ("stop", 2.0), ("regroup", 2.5), ("start", 0.2),
        ("useful", 6.3),
    ]  # fmt: skip
    because = [replace(one, why="node2 was lost", restarts=one.number) for one in ahead]
    job.add_history(2002.0, "node000", [NodeHistory(now=1072.0, generations=because)])
    assert job.generations[1].ended_by == "node2 was lost"


def test_nodes_leave_and_become_standbys() -> None:
    job = watched(3)
    smaller = summary(4.0, nodes=2)
    drained = replace(summary(4.0).nodes[2], rank=-1, first_rank=-1, drained=True)
    job.add_summary(4.0, replace(smaller, nodes=[drained, *smaller.nodes]))
    assert [(one.node, one.state, len(one.ranks)) for one in job.nodes] == [
        ("node000", "running", 2),
        ("node001", "running", 2),
        ("node002", "drained", 0),
    ]
    silent = replace(summary(5.0).nodes[2], report=None)
    job.add_summary(5.0, replace(smaller, nodes=[*smaller.nodes, silent]))
    assert [(row.rank, row.step) for row in job.nodes[2].ranks] == [(4, 30), (5, 30)]


def test_new_job_of_the_same_name_starts_empty() -> None:
    job = watched(5, generation=4)
    job.add_event(EventRecord(wall=1.0, text="x"))
    job.add_summary(9.0, summary(1.0, generation=0))
    assert (job.header.generation, len(job.events), len(job.generations)) == (0, 0, 1)
    job.add_summary(10.0, summary(2.0, outcome="failed"))
    assert job.header.state == "failed"


def test_job_is_over_when_all_its_nodes_are() -> None:
    job = watched(3, nodes=2)
    for kind in (EventKind.RUN_ENDED, EventKind.RUN_STARTED):
        job.add_event(EventRecord(wall=1.0, source="node000", kind=kind))
    job.add_event(EventRecord(wall=1.0, source="node001", kind=EventKind.RUN_ENDED, text="left"))
    assert not job.is_over
    job.add_summary(4.0, summary(4.0, nodes=1))
    assert [one.is_over for one in job.generations] == [False], "the viewer keeps what it knows"
    ended = EventRecord(
        wall=2.0, source="node000", kind=EventKind.RUN_ENDED, outcome="succeeded", text="done"
    )
    job.add_event(ended)
    assert job.end == JobEnd(outcome=RunEnd.SUCCEEDED, why="done", wall=2.0)
    assert [one.end for one in job.generations] == [GenerationEnd.SUCCEEDED]


def test_end_of_a_failed_job_shows_the_failure() -> None:
    job = watched(3, nodes=1)
    for kind, text in ((EventKind.WORKERS_FAILED, "rank 1 failed"), (EventKind.RUN_ENDED, "over")):
        job.add_event(EventRecord(wall=5.0, kind=kind, outcome="failed", text=text))
    assert job.end == JobEnd(outcome=RunEnd.FAILED, why="rank 1 failed", wall=5.0)


def test_end_according_to_the_coordinator_decides() -> None:
    job = watched(3, nodes=2)
    ended = EventRecord(
        wall=7.0, kind=EventKind.JOB_ENDED, outcome="stopped", text="the job was stopped: enough"
    )
    job.add_event(ended)
    assert job.end == JobEnd(outcome=RunEnd.STOPPED, why=ended.text, wall=7.0)
    job.add_summary(9.0, summary(3.0, nodes=2, outcome="stopped", why="enough"))
    assert job.end == JobEnd(outcome=RunEnd.STOPPED, why="enough", wall=7.0)


def test_end_has_the_reason_of_the_last_message() -> None:
    job = watched(3, nodes=1)
    ended = EventRecord(wall=9.0, kind=EventKind.RUN_ENDED, outcome="stopped", text="stopped")
    job.add_event(ended)
    job.ended("lost", "all its agents have exited", 9.5)
    assert job.end == JobEnd(outcome=RunEnd.STOPPED, why="stopped", wall=9.0)
    job = watched(3, nodes=1)
    job.add_event(ended)
    job.ended("stopped", "stop requested by ann@login: enough", 9.5)
    assert job.end == JobEnd(
        outcome=RunEnd.STOPPED, why="stop requested by ann@login: enough", wall=9.0
    )


def test_last_generation_ran_until_the_job_ended() -> None:
    job = watched(3, nodes=1)
    running = Generation(number=0, started_at=1001.0)
    job.add_history(1003.0, "node000", [NodeHistory(now=1003.0, generations=[running])])
    job.ended("stopped", "enough", 9.5)
    assert [(one.is_over, one.ran_s) for one in job.generations] == [(True, 2.0)]


def test_only_failed_and_lost_generations_are_failures() -> None:
    job = LiveJob()
    for number, why in enumerate(("all joined", "ann asked", "b was lost", "c joined")):
        job.add_summary(float(number), summary(1.0 + number, generation=number))
        one = Generation(number=number, started_at=float(number), stopping_at=number + 0.5, why=why)
        job.add_history(float(number), "node000", [NodeHistory(now=number, generations=[one])])
    job.add_event(EventRecord(wall=1.0, kind=EventKind.JOB_CHANGED, generation=0))
    lost = EventRecord(wall=2.0, kind=EventKind.JOB_CHANGED, generation=1, is_problem=True)
    job.add_event(lost)
    ends = [one.end for one in reversed(job.generations)]
    assert ends[:3] == [GenerationEnd.REGROUPED, GenerationEnd.LOST, GenerationEnd.REGROUPED]


def test_memory_of_a_viewer_is_bounded() -> None:
    job = LiveJob()
    for at in range(3 * GENERATIONS_MAX):
        job.add_summary(at, summary(float(at + 1), generation=at))
        part = NodeHistory(now=at, generations=[Generation(number=at, started_at=at)])
        job.add_history(at, "node000", [part])
        job.add_event(EventRecord(wall=1.0, text=str(at)))
    assert len(job.generations) == GENERATIONS_MAX
    assert len(job.events) == EVENTS_MAX
    assert all(len(one.steps) <= SAMPLES_MAX for one in job._samples.values())
    job.add_summary(1e6, summary(1e6, nodes=1, generation=3 * GENERATIONS_MAX))
    assert (len(job._samples), len(job._rank_rows)) == (2, 2)


def test_histories_come_from_the_first_members_and_from_nodes_that_reported_failures() -> None:
    job = LiveJob()
    job.add_summary(1.0, summary(1.0, nodes=40))
    first = [one.node for one in job.history_sources]
    assert len(first) == HISTORY_NODES_MAX
    for node in ("node030", "node001"):
        job.add_event(EventRecord(wall=1.0, source=node, kind=EventKind.WORKERS_FAILED))
    assert [one.node for one in job.history_sources] == [*first, "node030"]
    job.add_summary(2.0, summary(2.0, nodes=40))
    assert (job.header.measured, job.header.members) == (HISTORY_NODES_MAX + 1, 40)


def test_slow_message_does_not_shift_a_nodes_clock() -> None:
    job = LiveJob()
    generation = Generation(number=0, started_at=5.0)
    for received_at, sent_at in ((110.0, 10.0), (120.5, 20.0)):
        job.add_history(received_at, "a", [NodeHistory(now=sent_at, generations=[generation])])
    assert [one.started_at for one in job.generations] == [105.0]


def test_job_that_has_not_started_shows_what_delays_it() -> None:
    job = LiveJob()
    one = summary(0.0, nodes=1, min_nodes=2, phase="forming").nodes[0]
    assert one.report is not None
    waits = replace(one, report=replace(one.report, activity="preloading torch, 3 s"))
    job.add_summary(0.0, summary(0.0, nodes=1, min_nodes=2, phase="forming"))
    assert job.header.delay == "waiting for nodes: 1 of 2"
    job.add_summary(
        1.0, replace(summary(1.0, nodes=1, phase="forming", min_nodes=2), nodes=[waits])
    )
    assert job.header.delay == "waiting for nodes: 1 of 2; node000: preloading torch, 3 s"
    job.add_summary(2.0, summary(2.0, nodes=2))
    assert job.header.delay == ""


def test_end_that_the_last_message_told_is_that_of_the_job_unless_its_nodes_report_more() -> None:
    job = LiveJob()
    job.add_summary(0.0, summary(0.0, nodes=2))
    job.ended("stopped", "signals stopped all its agents", 7.0)
    assert job.end is not None
    assert (job.end.outcome, job.end.wall) == ("stopped", 7.0)
    job.add_summary(1.0, summary(1.0, nodes=2, generation=1))
    assert job.end is None, "another job has the name"
