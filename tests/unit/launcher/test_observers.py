"""The observers of a launch; the agent never waits for them."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import pytest

from holdfast.elastic import metrics
from holdfast.launcher import LaunchConfig, elastic_launch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 20.0

# Fails in the first start; in the second, creates a file.
FAILING_ONCE = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(1)
open(sys.argv[1], "w").close()
"""


class Waiting(metrics.MetricHandler):
    """Blocks until a file exists, or until a timeout."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.names: list[str] = []
        self.was_in_vain = False

    def emit(self, metric_data: metrics.MetricData) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.was_in_vain and not self._path.exists():
            time.sleep(0.005)
            self.was_in_vain = time.monotonic() > deadline
        self.names.append(metric_data.name)


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    handler = Waiting(tmp_path / "second")
    metrics.configure(handler)
    yield handler
    metrics.configure(metrics.NullMetricHandler())


def config_of(**more: object) -> LaunchConfig:
    return LaunchConfig(1, 1, 1, rdzv_backend="c10d", max_restarts=1, **more)  # type: ignore[arg-type]


def test_workers_are_started_again_while_a_metric_handler_blocks(
    tmp_path: Path, waiting: Waiting
) -> None:
    elastic_launch(config_of(), sys.executable)("-c", FAILING_ONCE, str(tmp_path / "second"))
    assert not waiting.was_in_vain
    # At the end of the launch it has all metrics, in order.
    assert waiting.names[0] == "SimpleElasticAgent._assign_worker_ranks.success"
    assert waiting.names[-2:] == [
        "SimpleElasticAgent.run.success",
        "SimpleElasticAgent.run.duration.ms",
    ]
    assert waiting.names.count("SimpleElasticAgent._restart_workers.success") == 1
