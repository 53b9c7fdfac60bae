"""What is asked for is opened, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import urllib.request

import pytest

from holdfast.agent.job_metrics import JobMetrics
from holdfast.agent.metric_outlets import open_outlets
from holdfast.agent.metric_recorder import MetricRecorder
from holdfast.agent.moments import Onlookers
from holdfast.errors import EnvironmentProblem
from holdfast.metrics.handlers import ConsoleMetricHandler, NullMetricHandler
from holdfast.metrics.streams import configure
from told_runs import first_start, success

PATIENCE_S = 20


def kinds(onlookers: Onlookers) -> list[type]:
    return [type(one) for one in onlookers._each]


def test_nothing_is_loaded_or_added_for_nothing() -> None:
    program = (
        "import sys\n"
        "from holdfast.agent.moments import Onlookers\n"
        "from holdfast.agent.metric_outlets import open_outlets\n"
        "onlookers = Onlookers()\n"
        "open_outlets(onlookers).close()\n"
        "assert not onlookers\n"
        "print(*[one for one in sys.modules if one.startswith('holdfast.metrics')])\n"
        "assert not {'threading', 'socket', 'typing', 'logging'} & {*sys.modules}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_a_handler_has_a_recorder(capsys: pytest.CaptureFixture[str]) -> None:
    onlookers = Onlookers()
    configure(ConsoleMetricHandler())
    try:
        outlets = open_outlets(onlookers)
        for moment in [*first_start(), *success(20.0, 3)]:
            onlookers.tell(moment)
        outlets.close()
    finally:
        configure(NullMetricHandler())
    assert kinds(onlookers) == [MetricRecorder]
    assert "][torchelastic]: SimpleElasticAgent.run.success=1\n" in capsys.readouterr().out


def test_a_port_has_an_endpoint_with_the_figures() -> None:
    onlookers = Onlookers()
    outlets = open_outlets(onlookers, port=0, progress=lambda: [(4, 17, None, None)])
    assert kinds(onlookers) == [JobMetrics]
    assert outlets.endpoint is not None
    for moment in first_start():
        onlookers.tell(moment)
    with urllib.request.urlopen(outlets.endpoint.url, timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    assert 'holdfast_job_state{run_id="job-1",state="running"} 1\n' in text
    assert 'holdfast_worker_step{run_id="job-1",rank="4"} 17\n' in text
    outlets.close()
    outlets.close()


def test_a_port_in_use_leaves_nobody_looking_on() -> None:
    first = open_outlets(Onlookers(), port=0)
    assert first.endpoint is not None
    onlookers = Onlookers()
    with pytest.raises(EnvironmentProblem, match="--metrics-port"):
        open_outlets(onlookers, port=first.endpoint.port)
    assert not onlookers
    first.close()


def test_a_collector_gets_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    onlookers = Onlookers()
    outlets = open_outlets(onlookers)
    assert kinds(onlookers) == [JobMetrics]
    assert outlets.endpoint is None
    assert outlets.export is not None
    outlets.close()  # No run has begun, so there is nothing to send.
