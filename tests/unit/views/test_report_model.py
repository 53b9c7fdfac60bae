"""The content of a report, from timelines with known times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.control.step_rates import RANKS_SHOWN, SLOWEST_SHOWN
from holdfast.core.supervision import StopReason
from holdfast.views.report import records
from holdfast.views.report.model import Report, describe
from timelines import Timeline, one_restart

if TYPE_CHECKING:
    from pathlib import Path

SIGNALLED = "Traceback:\nholdfast.SignalException: agent 7 received SIGTERM"


def report_of(*nodes: Timeline) -> Report:
    [job] = records.jobs_in([run for node in nodes for run in node.runs()])
    return describe(job)


def costs_of(report: Report) -> dict[str, float]:
    return {cost.stage: round(cost.seconds, 3) for cost in report.costs if cost.seconds}


def test_report_shows_the_stages_of_a_restart() -> None:
    report = report_of(one_restart())
    assert costs_of(report) == {
        "start": 1.0 + 1.0,
        "warmup": 2.0 + 3.0,
        "useful": 15.0 + 15.0,  # Steps 1 to 15 of the first generation; all of the second.
        "repeated": 10.0,
        "detect": 1.0,
        "stop": 2.0 + 1.0,
        "regroup": 2.0 + 1.0,
        "end": 1.0,
    }
    assert report.measure == "progress"
    assert report.goodput == pytest.approx(30.0 / 55.0, abs=1e-4)
    first, second = report.generations
    assert (first.end, second.end) == ("failed", "succeeded")
    assert (first.detect_s, first.stop_s, first.repeated_s) == pytest.approx((1.0, 2.0, 10.0))
    stages = (second.regroup_s, second.start_s, second.warmup_s)
    assert stages == pytest.approx((1.0, 1.0, 3.0))
    assert [(one.rank, one.generation, one.at_s) for one in report.failures] == [(1, 0, 30.0)]
    assert report.outcome.state == "succeeded"


def test_nodes_are_shifted_so_that_generations_start_together() -> None:
    first, second = Timeline("a", (0, 1)), Timeline("b", (2, 3), ahead=3600.0, rank=1)
    for node in (first, second):
        node.run(1.0 if node is second else 0.0)
        node.generation(0, 2.0, 3.0, nodes=2)
        node.stops(0, 20.0, 21.0, StopReason.SUCCEEDED)
        node.end(22.0)
    report = report_of(first, second)
    assert [node.clock_ahead_s for node in report.nodes] == pytest.approx([0.0, 3600.0])
    assert [node.began_s for node in report.nodes] == pytest.approx([0.0, 1.0])
    assert report.duration_s == pytest.approx(22.0)
    assert any("3600.000 s" in note for note in report.notes)


def test_nodes_without_a_folder_are_named_by_the_members_of_their_round() -> None:
    stays = Timeline("a", (0, 1))
    stays.run()
    stays.generation(0, 2.0, 3.0, nodes=3, members=("a", "b", "c"))
    stays.stops(0, 20.0, 21.0, StopReason.GENERATION_CHANGED)
    stays.generation(1, 22.0, 23.0, nodes=2, restarts=0, members=("a", "c"))
    stays.stops(1, 40.0, 41.0, StopReason.SUCCEEDED)
    stays.end(42.0)
    report = report_of(stays)
    assert report.generations[0].end_reason == "node b was lost"
    assert any("the other nodes (b, c) only from these folders" in note for note in report.notes)


@pytest.mark.parametrize(("restarts", "nodes", "end"), [(1, 2, "failed"), (0, 3, "regrouped")])
def test_next_generation_shows_why_the_coordinator_ended_one(
    restarts: int, nodes: int, end: str
) -> None:
    node = Timeline()
    node.run()
    node.generation(0, 2.0, 3.0, nodes=2)
    node.stops(0, 20.0, 21.0, StopReason.GENERATION_CHANGED)
    node.generation(1, 22.0, 23.0, nodes=nodes, restarts=restarts, why="a reason in words")
    report = report_of(node)
    assert (report.generations[0].end, report.generations[0].end_reason) == (
        end,
        "a reason in words",
    )


def test_killed_job_ends_with_its_last_entry() -> None:
    node = Timeline()
    node.run()
    node.generation(0, 2.0, 3.0)
    node.steps(0, 5.0, 0, 25, 1.0)
    report = report_of(node)
    assert report.outcome.state == "lost"
    assert report.duration_s == pytest.approx(30.0)
    assert report.generations[0].end == "unknown"
    assert costs_of(report)["useful"] == 25.0


def test_job_ended_by_a_signal_is_stopped() -> None:
    node = Timeline()
    node.run()
    node.generation(0, 2.0, 3.0)
    node.stops(0, 20.0, 21.0, StopReason.SIGNAL)
    node.end(22.0, "left", SIGNALLED)
    report = report_of(node)
    assert (report.outcome.state, report.generations[0].end) == ("stopped", "stopped")
    assert report.outcome.reason == "agent 7 received SIGTERM"
    assert [one.state for one in report.nodes] == ["stopped"]


# How node a ends after node b has left, what the report says of the job, and of node a.
AFTER_A_NODE_LEFT = {
    "succeeded": ("succeeded", "all workers succeeded; 1 node left the job", "succeeded"),
    "failed": ("failed", "workers failed", "failed"),
    "stopped": ("stopped", "the job was stopped", "stopped"),
    "left": ("stopped", "agent 7 received SIGTERM", "stopped"),
    "error": ("error", "only 1 of 2 nodes came", "error"),
    "": ("lost", "no end is recorded: its agents were killed, or run on other machines", "lost"),
}


@pytest.mark.parametrize("how", AFTER_A_NODE_LEFT)
def test_job_continues_after_a_node_left(how: str) -> None:
    stays, leaves = Timeline("a", (0, 1)), Timeline("b", (2, 3), rank=1)
    for node in (stays, leaves):
        node.run()
        node.generation(0, 2.0, 3.0, nodes=2)
    leaves.stops(0, 20.0, 20.5, StopReason.SIGNAL)
    leaves.end(20.6, "left", SIGNALLED)
    stays.stops(0, 20.7, 21.0, StopReason.GENERATION_CHANGED)
    stays.generation(1, 22.0, 23.0, nodes=1, restarts=0, why="b left")
    errors = {
        "stopped": "holdfast.JobStopped: the job was stopped",
        "left": SIGNALLED,
        "error": "holdfast.RendezvousTimeoutError: only 1 of 2 nodes came",
    }
    if how:
        stays.end(40.0, how, errors.get(how, ""))
    report = report_of(stays, leaves)
    state, reason, state_of_a = AFTER_A_NODE_LEFT[how]
    assert (report.outcome.state, report.outcome.reason) == (state, reason)
    assert {one.name: one.state for one in report.nodes} == {"a": state_of_a, "b": "left"}
    assert (report.generations[0].end, report.generations[0].end_reason) == ("regrouped", "b left")


def test_record_of_the_node_that_left_does_not_show_how_the_job_ended() -> None:
    leaves = Timeline("b", (2, 3), rank=1)
    leaves.run()
    leaves.generation(0, 2.0, 3.0, nodes=2)
    leaves.stops(0, 20.0, 20.5, StopReason.SIGNAL)
    leaves.end(20.6, "left", SIGNALLED)
    report = report_of(leaves)
    assert report.outcome.state == "left"
    assert report.outcome.reason.startswith("b left the job: agent 7 received SIGTERM")
    stays = Timeline("a", (0, 1))
    stays.run()
    stays.generation(0, 2.0, 3.0, nodes=2)
    stays.stops(0, 20.7, 21.0, StopReason.GENERATION_CHANGED)
    stays.generation(1, 22.0, 23.0, nodes=1, restarts=0, why="b left")
    stays.end(40.0)
    assert [one.end for one in report_of(stays).generations] == ["regrouped", "succeeded"]


def test_job_without_a_round_has_a_report() -> None:
    node = Timeline()
    node.run()
    node.end(60.0, "error", "Traceback:\nholdfast.RendezvousTimeoutError: only 1 of 2 nodes came")
    report = report_of(node)
    assert (report.outcome.state, report.goodput) == ("error", None)
    assert costs_of(report) == {"regroup": 60.0}


def test_straggler_is_named() -> None:
    node = Timeline(ranks=(0, 1, 2))
    node.run()
    node.generation(0, 2.0, 3.0)
    for rank, each_s in ((0, 1.0), (1, 1.0), (2, 2.0)):
        one = Timeline(ranks=(rank,))
        one.steps(0, 5.0, 0, int(40 / each_s), each_s)
        node.lines += one.lines
    progress = report_of(node).progress
    assert progress is not None
    assert [one.rank for one in progress.slowest][:1] == [2]
    assert progress.slowest[0].behind == 20
    middle = len(progress.times_s) // 2
    assert [series.rates[middle] for series in progress.ranks] == pytest.approx([1.0, 1.0, 0.5])
    assert [row[middle] for row in progress.heat] == pytest.approx([1.0, 1.0, 0.5])


def test_report_size_does_not_grow_with_ranks() -> None:
    ranks = tuple(range(5 * RANKS_SHOWN))
    node = Timeline(ranks=ranks)
    node.run()
    node.generation(0, 2.0, 3.0)
    node.steps(0, 5.0, 0, 40, 1.0)
    progress = report_of(node).progress
    assert progress is not None
    assert (progress.reporting, len(progress.ranks)) == (len(ranks), SLOWEST_SHOWN)
    assert len(progress.heat) == len(progress.heat_ranks) == RANKS_SHOWN
    assert progress.heat_ranks[0] == "0-4"


def test_fences_distinguish_jobs_of_the_same_name() -> None:
    """The same run id twice: the nodes of the second job are its own, whatever their clocks say."""
    old, new, late = Timeline("a"), Timeline("a"), Timeline("b", (2, 3), ahead=-9e6, rank=1)
    for node, number in ((old, 0), (new, 5), (late, 5)):
        node.run(100.0 * number)
        node.generation(number, 100.0 * number + 2.0, 100.0 * number + 3.0)
        node.end(100.0 * number + 10.0)
    jobs = records.jobs_in([*old.runs(), *new.runs(), *late.runs()])
    assert sorted(len(job) for job in jobs) == [1, 2]
    assert {run.run.node for job in jobs if len(job) == 2 for run in job} == {"a", "b"}


def test_runs_in_one_folder_are_grouped_by_job(tmp_path: Path) -> None:
    """Two jobs share a run id, a third has another one. A standby has no generation, so only its time counts."""

    def run(node: str, begin: float, end: float, run_id: str, *numbers: int) -> None:
        one = Timeline(node)
        one.run(begin, run_id)
        for number in numbers:
            one.generation(number, begin + 1.0 + number, begin + 2.0 + number)
        one.end(end)
        one.write(tmp_path / node)

    run("first", 0.0, 15.0, "nightly", 0, 1)
    run("joins", 5.0, 15.0, "nightly", 1, 2)  # It connects `first` and `later`.
    run("later", 5.5, 15.0, "nightly", 2)
    run("early standby", 6.0, 10.0, "nightly")
    run("standby", 12.0, 22.0, "nightly")
    run("short standby", 13.0, 14.0, "nightly")
    run("late standby", 21.0, 25.0, "nightly")  # It overlaps only `standby`.
    run("next day", 100.0, 120.0, "nightly", 7)
    run("next standby", 110.0, 130.0, "nightly")
    run("other", 0.0, 130.0, "other")
    jobs = records.jobs_in(records.read([str(tmp_path)]))
    assert [{run.run.node for run in job} for job in jobs] == [
        {"next day", "next standby"},
        {"first", "joins", "later", "early standby", "standby", "short standby", "late standby"},
        {"other"},
    ]
