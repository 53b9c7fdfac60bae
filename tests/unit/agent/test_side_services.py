from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from holdfast.agent import side_services
from holdfast.agent.lifecycle_reporter import LifecycleReporter
from holdfast.agent.side_services import HEALTH_PORT_ENV, SideServices
from holdfast.observe import lifecycle
from holdfast.observe.health.loop_probe import FRESH_S
from holdfast.processes.failures.failure import ProcessFailure
from observed_jobs import fetch

if TYPE_CHECKING:
    from holdfast.agent.spec import WorkerGroup


def services() -> SideServices:
    group: WorkerGroup = None  # type: ignore[assignment] # Nothing is reported here.
    return SideServices("job", LifecycleReporter(group))


def test_failing_probe_is_reported_once_and_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(HEALTH_PORT_ENV, "0")
    made = services()
    made.begin(lambda: None)
    try:
        [descriptor] = made.descriptors()
        made.poll(time.monotonic())
        nothing = os.open("/dev", os.O_RDONLY)  # Reading or writing it fails.
        os.dup2(nothing, descriptor)
        os.close(nothing)
        time.sleep(FRESH_S)
        port = made._health.port  # type: ignore[union-attr]
        assert fetch(port, "/livez")[0] == 503
        caplog.clear()
        for _ in range(2):
            made.poll(time.monotonic())
        assert len(caplog.messages) == 1
        assert made.descriptors() == []
        assert fetch(port, "/livez") == (200, "ok\n")
    finally:
        made.end()


def test_sampling_interval_grows_and_needs_reported_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = services()
    reporter = made._reporter
    samples: list[tuple[tuple[int, int, float], ...]] = []
    monkeypatch.setattr(reporter, "progress_sampled", samples.append)
    steps: list[tuple[int, int, float]] = []
    monkeypatch.setattr(made.watchdogs, "steps", lambda: [*steps])
    monkeypatch.setattr(made.watchdogs, "memory", lambda: 4096)
    made._first_heartbeat(0)
    assert made.next_deadline(None) is None, "no observer needs samples"
    reporter.observers.sampled = True
    assert made.next_deadline(None) is None, "no worker has reported anything"
    made._first_heartbeat(0)
    begun = now = time.monotonic()
    pauses = []
    while now < begun + 7200.0:
        before, now = now, made.next_deadline(None) or 0.0
        pauses.append(now - before)
        steps[:] = [(0, len(pauses), now), (1, 7, begun)]
        made.poll(now)
    assert max(pauses) == pytest.approx(side_services.SAMPLE_S_MAX)
    assert pauses[0] == pytest.approx(side_services.SAMPLE_S_MIN, abs=0.05)
    assert side_services.MEMORY_NOTES_MAX < len(pauses) < 400
    assert len(made.memory) <= side_services.MEMORY_NOTES_MAX
    assert (made.memory[0][0], made.memory[-1]) == (begun + pauses[0], (now, 4096))
    assert {len(sample) for sample in samples[1:]} == {1}, "samples contain only changes"
    made.workers_stopped()
    assert made.next_deadline(None) is None


def test_failures_are_reported_in_time_without_a_next_generation() -> None:
    made = services()
    reporter = made._reporter
    received: list[object] = []
    reporter.observers.add(received.append)
    reporter.generation_stopped(3, {7: ProcessFailure(1, 4711, 9, "")})
    due = made.next_deadline(None)
    assert due is not None
    made.poll(due - 0.001)
    assert [type(event) for event in received] == [lifecycle.GenerationStopped]
    made.poll(due)
    failed = received[-1]
    assert isinstance(failed, lifecycle.WorkersFailed)
    assert [(one.global_rank, one.exit_code) for one in failed.failures] == [(7, 9)]
    assert made.next_deadline(None) is None
