"""A custom metric handler: it adds up the durations of the agent's steps.

Run it:

    python examples/customizing/metric_handler.py
"""

from __future__ import annotations

import sys
from collections import Counter

from holdfast.elastic import metrics
from holdfast.launcher import LaunchConfig, elastic_launch

# Worker 1 fails in generation 0.
WORKER = """
import os, sys
sys.exit(os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""


class Times(metrics.MetricHandler):
    """Adds up durations, and keeps the last value of every other metric."""

    def __init__(self) -> None:
        self.spent_ms: Counter[str] = Counter()
        self.last: dict[str, int] = {}

    def emit(self, metric_data: metrics.MetricData) -> None:
        """Receive a metric. The agent does not wait: Holdfast calls this in its own thread."""
        name, is_duration, _ = metric_data.name.partition(".duration.ms")
        if is_duration:
            self.spent_ms[name] += metric_data.value
        else:
            self.last[name] = metric_data.value


def main() -> None:
    """Run a job that restarts once, and print what the handler collected."""
    times = Times()
    metrics.configure(times)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", role="trainer",
        max_restarts=4,
    )  # fmt: skip
    elastic_launch(config, sys.executable)("-c", WORKER)
    for step in ("_rendezvous", "_restart_workers", "run"):
        print(f"{step}: {times.spent_ms[f'SimpleElasticAgent.{step}']} ms")
    print(f"flakiness: {times.last['workers.trainer.flakiness']} %")
    print(f"succeeded with retries: {times.last['workers.trainer.run_success_with_retries']}")


if __name__ == "__main__":
    main()
