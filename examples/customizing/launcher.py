"""A custom launcher: it composes an agent as `holdfast run` does.

Run it:

    python examples/customizing/launcher.py
"""

from __future__ import annotations

import os
import tempfile

from holdfast.elastic import events, metrics
from holdfast.elastic.agent.server import WorkerSpec
from holdfast.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from holdfast.elastic.multiprocessing import DefaultLogsSpecs
from holdfast.elastic.rendezvous import RendezvousParameters
from holdfast.elastic.rendezvous.registry import get_rendezvous_handler


def train(factor: int) -> int:
    """Do the work of one worker, and return a value."""
    return factor * int(os.environ["RANK"])


class PrintEvents(events.EventHandler):
    """Prints events."""

    def record(self, event: events.Event) -> None:
        """Print the event's state."""
        print(event.source.name, event.metadata["state"], flush=True)


def launch(log_dir: str) -> None:
    """Join the rendezvous, run this node's workers, and use their return values."""
    parameters = RendezvousParameters("c10d", "localhost:0", "by-hand", min_nodes=1, max_nodes=1)
    handler = get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        role="trainer", local_world_size=3, rdzv_handler=handler, entrypoint=train, args=(10,)
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir))
    try:
        result = agent.run()
    finally:
        handler.shutdown()
    if result.is_failed():
        raise SystemExit(f"failed: {result.failures}")
    metrics.put_metric("sum", sum(result.return_values.values()), "mine")


if __name__ == "__main__":
    events.configure(PrintEvents())
    metrics.configure(metrics.ConsoleMetricHandler(), group="mine")
    with tempfile.TemporaryDirectory() as folder:
        launch(folder)
