"""The metrics of tiny jobs: our names and their order equal those of torchrun's agent."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

TIMEOUT_S = 60

PROGRAM = """\
import json, sys

if sys.argv[1] == "torch":
    from torch.distributed.elastic import metrics
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
else:
    from holdfast.elastic import metrics
    from holdfast.launcher.api import LaunchConfig, elastic_launch

GOOD = "pass"
ONCE = "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
BAD = "import sys; sys.exit(3)"

class MetricRecorder(metrics.MetricHandler):
    def __init__(self):
        self.metrics = []

    def emit(self, metric_data):
        self.metrics.append(tuple(metric_data))

def emitted(code, max_restarts):
    recorder = MetricRecorder()
    metrics.configure(recorder)
    config = LaunchConfig(
        1, 1, 2, run_id="same", role="trainer", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=max_restarts, monitor_interval=0.02)
    try:
        elastic_launch(config, sys.executable)("-c", code)
    except Exception as error:
        assert type(error).__name__ == "ChildFailedError"
    return recorder.metrics

if __name__ == "__main__":
    print(json.dumps([emitted(GOOD, 0), emitted(ONCE, 2), emitted(BAD, 0)]))
"""


def jobs_under(peer: str, folder: Path) -> list[list[object]]:
    """Return the metrics of each job.

    The values of durations are omitted, and so are checks that find healthy workers, since launchers check at
    different intervals.
    """
    program = folder / f"metrics_of_{peer}.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, peer], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    jobs = []
    for job in json.loads(done.stdout):
        received: list[object] = []
        for _, group, name, value in job:
            received.append((group, name, None if name.endswith(".duration.ms") else value))
            if name == "workers.trainer.healthy":
                del received[-4:]
        jobs.append(received)
    return jobs


def test_metrics_have_the_same_names_and_order(tmp_path: Path) -> None:
    theirs = jobs_under("torch", tmp_path)
    ours = jobs_under("holdfast", tmp_path)
    assert len(theirs) == 3
    assert all(("torchelastic", "SimpleElasticAgent.run.success", 1) in job for job in theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one == other
