"""The history of a run, folded from its lifecycle events, live or recorded."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.control.history import (
    CURVE_POINTS_MAX,
    GENERATIONS_AT_ONCE,
    PROGRESS_MAX,
    RESTART_STAGES,
    Generation,
    GenerationEnd,
    Goodput,
    History,
    JobState,
    NodeEnd,
    NodeState,
    NodeTime,
    RunEnd,
    Stage,
    end_of,
    goodput_of,
    job_end,
    merge,
    restart_stages,
    spans_of,
    state_of,
    useful_s,
)
from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle
from holdfast.observe.timeline import TimelineRecorder
from holdfast.views.report import records
from holdfast.wire.messages import NodeReport, NodeSummary
from recorded_runs import ended, exited, failure, first_start, rendezvoused, started, success

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.observe.lifecycle import LifecycleEvent

WORKERS = tuple(lifecycle.WorkerInfo(rank, rank, rank, 2, 100 + rank) for rank in (0, 1))


def history_of(events: Iterable[LifecycleEvent], **how: Any) -> History:
    history = History(10.0, **how)
    for event in events:
        history.add(event)
    return history


def starts(at: float, generation: int, why: str = "") -> lifecycle.GenerationStarted:
    return lifecycle.GenerationStarted(at, at, 0.1, generation, 0, 0, 1, WORKERS, 2, 1, why)


def steps(at: float, generation: int, *made: tuple[int, int, float]) -> lifecycle.ProgressSampled:
    return lifecycle.ProgressSampled(at, generation, made)


def fails(at: float, generation: int, stopped: float) -> list[LifecycleEvent]:
    return [
        lifecycle.WorkerEnded(at, at, generation, WORKERS[1], failed=True),
        lifecycle.GenerationStopping(at + 0.5, generation, StopReason.WORKER_FAILED),
        lifecycle.GenerationStopped(stopped, generation),
    ]


def described(
    rank: int, wall: float = 0.0, *, consequence: bool = False
) -> lifecycle.WorkerFailure:
    return lifecycle.WorkerFailure(
        rank, rank, 100 + rank, 1, wall, consequence, "exit code 1", "", "", "E\nValueError: x", ""
    )


def one_restart() -> list[LifecycleEvent]:
    """A run that forms a round by 12, runs from 13, fails at 30, and runs again from 37."""
    return [
        lifecycle.RunStarted(10.0, 10.0, "job", "default", "c10d", "python", 2, 3),
        rendezvoused(12.0, 2.0),
        starts(13.0, 0),
        lifecycle.FirstHeartbeat(13.5, 0, WORKERS[0]),
        steps(20.0, 0, (0, 1, 15.0)),
        steps(21.0, 0, (0, 5, 20.5), (1, 1, 16.0)),
        *fails(30.0, 0, 32.5),
        steps(32.5, 0, (0, 14, 29.0), (1, 14, 29.5)),
        rendezvoused(36.5, 4.0),
        starts(37.0, 1, "rank 1 failed"),
        lifecycle.WorkersFailed(37.1, 0, (described(1), described(0, consequence=True))),
        lifecycle.FirstHeartbeat(38.0, 1, WORKERS[0]),
    ]


def test_a_restart_has_five_stages_from_the_failure_to_the_first_step() -> None:
    history = history_of(one_restart())
    first, second = history.generations.values()
    assert restart_stages(None, first) == {"regroup": 2.0, "start": 1.0, "warmup": 3.0}
    assert restart_stages(first, second) == {
        "detect": 0.5, "stop": 2.0, "regroup": 4.0, "start": 0.5, "warmup": 1.0,
    }  # fmt: skip
    assert [*restart_stages(first, second)] == [*RESTART_STAGES]
    assert end_of(first, second) == ("failed", "rank 1 failed: exit code 1: ValueError: x")
    assert (first.is_warm, second.is_warm) == (True, False)
    history.add(steps(39.0, 1, (0, 6, 38.5), (1, 6, 39.0)))
    assert second.stages[Stage.WARMUP] == 2.0


def test_steps_that_a_later_generation_repeats_are_not_useful() -> None:
    events = [
        starts(10.0, 0),
        steps(11.0, 0, (0, 1, 11.0), (1, 1, 11.0)),
        steps(21.0, 0, (0, 11, 21.0), (1, 11, 20.0)),
        *fails(22.0, 0, 23.0),
        starts(24.0, 1),
    ]
    history = history_of(events)
    assert history.counts_steps
    assert history.useful_s(24.0) == 11.0
    history.add(steps(25.0, 1, (0, 7, 25.0)))
    assert history.useful_s(25.0) == pytest.approx(4.5), "until step 6, at the rate of rank 1"
    history.add(steps(26.0, 1, (1, 1, 25.0)))
    assert history.useful_s(26.0) == 1.0, "all of the first generation is repeated"


def test_step_that_decreases_within_a_generation_is_not_a_repeat() -> None:
    events = [
        starts(10.0, 0),
        steps(11.0, 0, (0, 1, 11.0)),
        steps(20.0, 0, (0, 9, 20.0)),
        steps(21.0, 0, (0, 1, 21.0)),
        *fails(22.0, 0, 23.0),
        starts(24.0, 1),
        steps(25.0, 1, (0, 1, 25.0)),
    ]
    history = history_of(events)
    assert history.generations[0].goes_back
    assert history.generations[0].repeated_at is None


def test_a_last_step_known_only_from_the_stop_is_not_a_first_step() -> None:
    events = [starts(10.0, 0), *fails(30.0, 0, 32.0)[:2], steps(30.6, 0, (0, 90, 29.0))]
    history = history_of(events)
    one = history.generations[0]
    assert (one.last_step, one.first_step, one.warm_at) == (90, None, None)
    assert not history.counts_steps
    assert history.useful_s(30.6) == 20.0


def test_hang_is_dated_back_to_the_last_step() -> None:
    events = [
        starts(13.0, 0),
        lifecycle.GenerationStopping(90.0, 0, StopReason.UNHEALTHY, "no step for 60 s"),
        steps(90.1, 0, (0, 7, 29.0), (1, 7, 30.0)),
    ]
    one = history_of(events).generations[0]
    assert one.stages[Stage.DETECT] == 60.0
    assert end_of(one, None) == ("failed", "no step for 60 s")


def test_failure_long_after_the_last_step_is_dated_back_to_that_step() -> None:
    events = [
        lifecycle.RunStarted(10.0, 10.0, "job", "default", "c10d", "python", 2, 3),
        starts(13.0, 0),
        steps(14.0, 0, (0, 1, 14.0), (1, 1, 14.0)),
        steps(29.0, 0, (0, 16, 29.0), (1, 7, 20.0)),
        *fails(30.0, 0, 32.0),
        lifecycle.WorkersFailed(32.1, 0, (described(1),)),
    ]
    assert history_of(events).generations[0].problem_at == 20.0


def test_stop_because_of_another_node_does_not_date_the_failure() -> None:
    for reason, detect in ((StopReason.GENERATION_CHANGED, None), (StopReason.REGROUP, 0.0)):
        stopping = lifecycle.GenerationStopping(20.0, 0, reason)
        one = history_of([starts(13.0, 0), stopping]).generations[0]
        assert one.stages.get(Stage.DETECT) == detect


def test_stop_has_the_request_that_caused_it_as_detail() -> None:
    stopping = lifecycle.GenerationStopping(20.0, 0, StopReason.REQUESTED)
    requested = lifecycle.RequestCarriedOut(20.0, 20.0, "id", "restart requested by me: new data")
    for events in ([stopping, requested], [requested, stopping]):
        history = history_of([starts(13.0, 0), *events, starts(21.0, 1)])
        first, second = history.generations.values()
        assert end_of(first, second) == ("regrouped", requested.what)


@pytest.mark.parametrize(
    ("ends", "job"),
    [
        ([], RunEnd.LOST),
        ([NodeEnd(RunEnd.LOST, 0, 9.0), NodeEnd(RunEnd.LEFT, 1, 8.0)], RunEnd.STOPPED),
        ([NodeEnd(RunEnd.LEFT, 0, 9.0), NodeEnd(RunEnd.LOST, 1, 8.0)], RunEnd.LOST),
        ([NodeEnd(RunEnd.LEFT, 1, 5.0), NodeEnd(RunEnd.ERROR, 1, 9.0)], RunEnd.ERROR),
        ([NodeEnd(RunEnd.LEFT, 1, 9.0), NodeEnd(RunEnd.ERROR, 1, 5.0)], RunEnd.STOPPED),
        ([NodeEnd(RunEnd.LEFT, -1, 5.0), NodeEnd(RunEnd.STANDBY, -1, 9.0)], RunEnd.STOPPED),
        ([NodeEnd(RunEnd.STANDBY, -1, 9.0)], RunEnd.STANDBY),
        ([NodeEnd(RunEnd.STOPPED, 1, 5.0), NodeEnd(RunEnd.RUNNING, 1, 9.0)], RunEnd.STOPPED),
        ([NodeEnd(RunEnd.ERROR, 1, 9.0), NodeEnd(RunEnd.RUNNING, 1, 5.0)], RunEnd.RUNNING),
    ],
)
def test_job_ends_as_its_last_member_did_unless_an_end_applies_to_all(
    ends: list[NodeEnd], job: RunEnd
) -> None:
    assert job_end(ends, 1) is job


@pytest.mark.parametrize(
    ("reason", "job", "how"),
    [
        (None, RunEnd.RUNNING, GenerationEnd.RUNNING),
        (None, RunEnd.LOST, GenerationEnd.UNKNOWN),
        (None, RunEnd.SUCCEEDED, GenerationEnd.SUCCEEDED),
        (None, RunEnd.FAILED, GenerationEnd.FAILED),
        (None, RunEnd.STOPPED, GenerationEnd.STOPPED),
        (StopReason.SUCCEEDED, RunEnd.LOST, GenerationEnd.SUCCEEDED),
        (StopReason.WORKER_FAILED, RunEnd.RUNNING, GenerationEnd.FAILED),
        (StopReason.REGROUP, RunEnd.RUNNING, GenerationEnd.REGROUPED),
        (StopReason.GENERATION_CHANGED, RunEnd.ERROR, GenerationEnd.REGROUPED),
        (StopReason.GENERATION_CHANGED, RunEnd.FAILED, GenerationEnd.FAILED),
        (StopReason.GENERATION_CHANGED, RunEnd.STOPPED, GenerationEnd.STOPPED),
        (StopReason.SIGNAL, RunEnd.LEFT, GenerationEnd.STOPPED),
    ],
)
def test_newest_generation_ends_with_the_job(
    reason: StopReason | None, job: RunEnd, how: GenerationEnd
) -> None:
    stops = [lifecycle.GenerationStopping(20.0, 0, reason)] if reason is not None else []
    one = history_of([starts(13.0, 0), *stops]).generations[0]
    assert end_of(one, None, job).how is how
    is_over = how is not GenerationEnd.RUNNING
    assert end_of(one, None, job, "the reason").why == ("the reason" if is_over else "")


def test_assigning_ranks_before_the_stop_ends_takes_no_time() -> None:
    events = [
        *first_start(),
        lifecycle.GenerationStopping(20.0, 0, StopReason.REGROUP),
        rendezvoused(22.0, 1.0),
        lifecycle.GenerationStopped(24.0, 0),
        started(25.0, 1.0, 1),
    ]
    assert restart_stages(*history_of(events).generations.values()) == {
        "detect": 0.0, "stop": 4.0, "regroup": 0.0, "start": 1.0,
    }  # fmt: skip


def test_a_generation_whose_start_was_not_seen_began_with_the_run() -> None:
    events = [
        lifecycle.GenerationStopping(20.0, 3, StopReason.WORKER_FAILED),
        lifecycle.GenerationStopped(21.0, 3),
    ]
    (one,) = history_of(events).generations.values()
    assert (one.number, one.started_at) == (3, 10.0)
    assert one.stages == {Stage.DETECT: 0.0, Stage.STOP: 1.0}


def test_node_and_worker_states_follow_the_events() -> None:
    history = History()
    seen: list[object] = []
    for event in [*first_start(), *failure(20.0), started(30.0, 1.0, 1), *success(40.0, 3)]:
        history.add(event)
        if not seen or seen[-1] != (history.node_state, history.job_state):
            seen.append((history.node_state, history.job_state))
    assert seen == [
        (NodeState.JOINING, JobState.STARTING),
        (NodeState.STARTING, JobState.STARTING),
        (NodeState.RUNNING, JobState.RUNNING),
        (NodeState.RUNNING, JobState.RECOVERING),
        (NodeState.STOPPING, JobState.RECOVERING),
        (NodeState.JOINING, JobState.RECOVERING),
        (NodeState.RUNNING, JobState.RUNNING),
        (NodeState.STOPPING, JobState.RUNNING),
        (NodeState.LEAVING, JobState.RUNNING),
        (NodeState.DONE, JobState.SUCCEEDED),
    ]
    assert {state for _, state in history.workers.values()} == {"succeeded"}


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("left", JobState.STOPPED),
        ("stopped", JobState.STOPPED),
        ("error", JobState.FAILED),
        ("standby", JobState.RUNNING),
    ],
)
def test_only_an_error_of_the_agent_fails_the_job(how: str, state: JobState) -> None:
    end = lifecycle.RunEnded(20.0, 20.0, 10.0, "", 0, 3, 3, 0, 2, error="E: x", cut_short=how)
    history = history_of([*first_start(), end])
    assert (history.run_end, history.job_state) == (how, state)


def test_a_worker_that_fails_after_the_stop_began_was_terminated() -> None:
    run = [*first_start(), *failure(20.0)[:3], exited(21.0, 0, failed=True)]
    states = {rank: state for rank, (_, state) in history_of(run).workers.items()}
    assert states == {0: "terminated", 1: "failed"}


def test_a_node_whose_workers_are_done_is_useful_until_the_run_ends() -> None:
    history = history_of([*first_start(), *success(20.0, 3)[:-1]])
    assert history.useful_s(25.0) == 12.0
    history.add(ended(30.0, "succeeded", 3))
    assert (history.useful_s(99.0), history.elapsed_s(99.0)) == (17.0, 20.0)


def test_standby_time_is_counted() -> None:
    run = [*first_start()[:1], lifecycle.StandbyChanged(11.0, is_standby=True)]
    assert history_of(run).standby_s(15.0) == 4.0
    run.append(lifecycle.StandbyChanged(16.0, is_standby=False))
    assert history_of(run).standby_s(99.0) == 5.0


def test_goodput_is_an_upper_bound_unless_a_node_counts_steps() -> None:
    def time(useful_s: float, generation: int = 1, *, counts_steps: bool = False) -> NodeTime:
        return NodeTime(generation, 12.0, 2.0, useful_s, counts_steps)

    assert goodput_of([]) is None
    assert goodput_of([time(0.0, -1)]) is None, "it has not started workers"
    assert goodput_of([time(9.0), time(1.0, 0), time(0.0, -1)]) == Goodput(0.9, is_upper_bound=True)
    exact = goodput_of([time(5.0), time(7.0, counts_steps=True)])
    assert exact == Goodput(0.7, is_upper_bound=False), "only this node knows what was repeated"
    assert exact.name == "goodput"


def test_job_loses_as_much_time_as_the_node_that_lost_most() -> None:
    def time(elapsed_s: float, standby_s: float, useful_s: float) -> NodeTime:
        return NodeTime(1, elapsed_s, standby_s, useful_s, counts_steps=False)

    first, late = time(100.0, 0.0, 90.0), time(50.0, 10.0, 36.0)
    assert goodput_of([first, late]) == Goodput(0.9, is_upper_bound=True)
    hung = time(99.0, 0.0, 79.0)
    assert goodput_of([first, late, hung]) == Goodput(0.8, is_upper_bound=True)


def test_states_drained_and_standby_take_precedence() -> None:
    report = NodeReport(run_id="job", node="a", state="running")
    one = NodeSummary(node="a", phase="ready", rank=0)
    assert state_of(one, "active") == "ready"
    running = NodeSummary(node="a", phase="ready", rank=0, report=report)
    assert state_of(running, "active") == "running"
    outside = NodeSummary(node="a", rank=-1, report=report)
    assert state_of(outside, "active") == "standby"
    assert state_of(outside, "forming") == "joining"
    assert state_of(NodeSummary(node="a", rank=-1, drained=True), "forming") == "drained"
    imports = msgspec.structs.replace(report, state="preloading")
    assert state_of(NodeSummary(node="a", rank=-1, report=imports), "forming") == "preloading"


def test_finished_nodes_wait_for_the_others_but_any_other_stop_applies_to_all() -> None:
    done = StopReason.SUCCEEDED.value
    first = Generation(number=0, started_at=3.0, stopping_at=20.0, stopped_at=21.0, reason=done)
    second = Generation(number=0, started_at=3.0, stopping_at=30.0, stopped_at=31.0, reason=done)
    assert merge([first, second]).stages[Stage.STOP] == 1.0
    second.reason = StopReason.WORKER_FAILED.value
    both = merge([first, second])
    assert (both.stopping_at, both.reason) == (30.0, second.reason)


def test_a_node_that_joins_late_does_not_make_the_others_regroup_longer() -> None:
    old = Generation(number=4, left_at=10.0, met_at=14.0, started_at=15.0)
    new = Generation(number=4, is_first=True, left_at=13.0, met_at=14.0, started_at=15.0)
    assert merge([new, old]).stages[Stage.REGROUP] == 4.0
    assert merge([new]).stages[Stage.REGROUP] == 1.0


def test_memory_does_not_grow_with_the_run() -> None:
    small, large = History(generations_max=8), History(generations_max=10_000)
    for number in range(100):
        at = 100.0 * number
        for event in (
            starts(at, number),
            *(
                steps(at + 1 + one, number, (0, 30 * number + one, at + 1 + one))
                for one in range(30)
            ),
            *fails(at + 40, number, at + 50),
        ):
            small.add(event)
            large.add(event)
    assert (len(small.generations), len(large.generations)) == (8, 100)
    assert small.useful_s(9_999.0) == pytest.approx(large.useful_s(9_999.0))
    assert len(large._progress) == PROGRESS_MAX
    many = History()
    for at in range(10 * CURVE_POINTS_MAX):
        many.add(steps(float(at), 0, (0, at, float(at))))
    assert len(many._progress[0].curve) <= CURVE_POINTS_MAX
    assert [len(part.generations) for part in large.parts(0.0)] == [32, 32, 32, 4]
    assert GENERATIONS_AT_ONCE == 32


# Any run, live and recorded.

Time = st.integers(0, 4_000).map(lambda at: at / 8.0)


@st.composite
def runs(draw: st.DrawFn) -> list[LifecycleEvent]:
    now = 10.0

    def later() -> float:
        nonlocal now
        now += draw(Time)
        return now

    run: list[LifecycleEvent] = [
        lifecycle.RunStarted(10.0, 1000.0, "job", "default", "c10d", "python", 2, 3)
    ]
    step = 0
    for number in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            run += [
                lifecycle.StandbyChanged(later(), is_standby=True),
                lifecycle.StandbyChanged(later(), is_standby=False),
            ]
        for error in draw(st.sampled_from([("",), ("no answer", ""), ("no answer",)])):
            run.append(rendezvoused(later(), 1.0, error))
        run.append(starts(later(), number, draw(st.sampled_from(["", "b was lost"]))))
        step = max(0, step - draw(st.integers(0, 20)))
        for rank in draw(st.sampled_from([(), (0,), (0, 1)])):
            run.append(lifecycle.FirstHeartbeat(later(), number, WORKERS[rank]))
        for _ in range(draw(st.integers(0, 3))):
            step += draw(st.integers(-1, 9))
            at = later()
            run.append(steps(at, number, (draw(st.integers(0, 1)), step, at - draw(Time) % 1)))
        reason = draw(st.sampled_from([*StopReason]))
        if reason is StopReason.WORKER_FAILED:
            run.append(lifecycle.WorkerEnded(later(), 0.0, number, WORKERS[1], failed=True))
        if reason is StopReason.REQUESTED:
            run.append(lifecycle.RequestCarriedOut(later(), 0.0, "id", "restart requested by me"))
        if draw(st.booleans()):
            run.append(lifecycle.GenerationStopping(later(), number, reason))
            run.append(steps(now, number, (0, step, now)))
            run.append(lifecycle.GenerationStopped(later(), number))
            if draw(st.booleans()):
                run.append(lifecycle.WorkersFailed(later(), number, (described(1, 990.0 + now),)))
    if draw(st.booleans()):
        run.append(ended(later(), draw(st.sampled_from(["succeeded", "failed"])), 3))
    return run


@given(runs())
def test_the_recorded_timeline_of_a_run_has_the_same_history(run: list[LifecycleEvent]) -> None:
    lines: list[bytes] = []
    recorder = TimelineRecorder(lambda line: lines.append(line.serialize().encode()))
    live = History()
    for event in run:
        recorder(event)
        live.add(event)
    live.end_record()
    (node,) = records.parse(lines)
    recorded = node.history
    assert [*recorded.generations.values()] == [*live.generations.values()]
    for now in (0.0, 50.0, 9_000.0):
        assert recorded.useful_s(now) == live.useful_s(now)
        assert recorded.elapsed_s(now) == live.elapsed_s(now)
        assert recorded.standby_s(now) == live.standby_s(now)
    assert recorded.counts_steps == live.counts_steps
    assert (recorded.node_state, recorded.job_state) == (live.node_state, live.job_state)


@given(runs())
def test_every_moment_of_a_run_belongs_to_one_stage(run: list[LifecycleEvent]) -> None:
    history = history_of(run)
    end = max(getattr(event, "at", 0.0) for event in run) + 1.0
    generations = [*history.generations.values()]
    spans = spans_of(generations, 10.0, end, by_steps=history.counts_steps)
    assert (spans[0].begin, spans[-1].end) == (10.0, end)
    assert all(one.end == other.begin for one, other in pairwise(spans))
    assert all(one.begin < one.end for one in spans)
    assert 0.0 <= useful_s(spans) <= end - 10.0
    assert all(seconds >= 0 for one in generations for seconds in one.stages.values())


@given(runs(), st.floats(-5.0, 5.0))
def test_timelines_with_different_clocks_merge(run: list[LifecycleEvent], by: float) -> None:
    for one in history_of(run).generations.values():
        for part in (one, one.shifted(64.0).shifted(-64.0), merge([one, one])):
            assert part.stages == pytest.approx(one.stages)
        assert one.shifted(by).stages == pytest.approx(one.stages, abs=1e-6)
