"""What is asked for is opened, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import urllib.request

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.observe.lifecycle import Observers
from holdfast.observe.metrics.exporters import open_exporters
from holdfast.observe.metrics.handlers import ConsoleMetricHandler, NullMetricHandler, configure
from holdfast.observe.metrics.job_metrics import JobMetrics
from holdfast.observe.metrics.recorder import MetricRecorder
from recorded_runs import first_start, success

PATIENCE_S = 20


def kinds(observers: Observers) -> list[type]:
    return [type(one) for one in observers._each]


def test_nothing_is_loaded_or_added_for_nothing() -> None:
    program = (
        "import sys\n"
        "from holdfast.observe.lifecycle import Observers\n"
        "from holdfast.observe.metrics.exporters import open_outlets\n"
        "observers = Observers()\n"
        "open_outlets(observers).close()\n"
        "assert not observers\n"
        "print(*[one for one in sys.modules if one.startswith('holdfast.observe.metrics')])\n"
        "assert not {'threading', 'socket', 'typing', 'logging'} & {*sys.modules}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_a_handler_has_a_recorder(capsys: pytest.CaptureFixture[str]) -> None:
    observers = Observers()
    configure(ConsoleMetricHandler())
    try:
        outlets = open_exporters(observers)
        for moment in [*first_start(), *success(20.0, 3)]:
            observers.notify(moment)
        outlets.close()
    finally:
        configure(NullMetricHandler())
    assert kinds(observers) == [MetricRecorder]
    assert "][torchelastic]: SimpleElasticAgent.run.success=1\n" in capsys.readouterr().out


def test_a_port_has_an_endpoint_with_the_figures() -> None:
    observers = Observers()
    outlets = open_exporters(observers, port=0, progress=lambda: [(4, 17, None, None)])
    assert kinds(observers) == [JobMetrics]
    assert outlets.endpoint is not None
    for moment in first_start():
        observers.notify(moment)
    with urllib.request.urlopen(outlets.endpoint.url, timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    assert 'holdfast_job_state{run_id="job-1",state="running"} 1\n' in text
    assert 'holdfast_worker_step{run_id="job-1",rank="4"} 17\n' in text
    outlets.close()
    outlets.close()


def test_a_port_in_use_leaves_nobody_looking_on() -> None:
    first = open_exporters(Observers(), port=0)
    assert first.endpoint is not None
    observers = Observers()
    with pytest.raises(EnvironmentProblem, match="--metrics-port"):
        open_exporters(observers, port=first.endpoint.port)
    assert not observers
    first.close()


def test_a_collector_gets_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    observers = Observers()
    outlets = open_exporters(observers)
    assert kinds(observers) == [JobMetrics]
    assert outlets.endpoint is None
    assert outlets.export is not None
    outlets.close()  # No run has begun, so there is nothing to send.
