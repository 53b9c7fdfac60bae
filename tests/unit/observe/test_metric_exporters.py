"""Only the requested exporters are opened."""

from __future__ import annotations

import urllib.request

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.observe.lifecycle import Observers
from holdfast.observe.metrics.exporters import open_exporters
from holdfast.observe.metrics.metric_handlers import ConsoleMetricHandler, configure
from holdfast.processes.workers.pages import Progress
from recorded_runs import first_start, success

PATIENCE_S = 20


def test_metrics_reach_a_handler_and_an_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    configure(ConsoleMetricHandler())
    observers = Observers()
    exporters = open_exporters(observers, port=0, progress=lambda: [(4, Progress(step=17))])
    assert exporters.endpoint is not None
    for event in first_start():
        observers.notify(event)
    with urllib.request.urlopen(exporters.endpoint.url, timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    assert 'holdfast_job_state{run_id="job-1",state="running"} 1\n' in text
    assert 'holdfast_worker_step{run_id="job-1",rank="4"} 17\n' in text
    others = Observers()
    with pytest.raises(EnvironmentProblem):
        open_exporters(others, port=exporters.endpoint.port)
    for event in success(20.0, 3):
        observers.notify(event)
    exporters.close()
    exporters.close()
    assert "][torchelastic]: SimpleElasticAgent.run.success=1\n" in capsys.readouterr().out
