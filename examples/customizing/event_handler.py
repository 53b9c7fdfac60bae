"""An event handler of your own: events become rows of a database, which is then asked.

Run it:

    python examples/customizing/event_handler.py
"""

from __future__ import annotations

import json
import sqlite3
import sys

from holdfast import ChildFailedError
from holdfast.elastic import events
from holdfast.launcher import LaunchConfig, elastic_launch

# Of three workers, one fails and the others wait for it until they are stopped.
WORKER = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '2' else time.sleep(3600)"


class Rows(events.EventHandler):
    """Keeps what a query may want to know of an event."""

    def __init__(self, path: str) -> None:
        # It is made in one thread and called in another, and each row counts by itself.
        self.database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self.database.execute(
            "CREATE TABLE IF NOT EXISTS event (at, source, state, rank, exit_code)"
        )

    def record(self, event: events.Event) -> None:
        """Insert a row."""
        about = event.metadata
        code = json.loads(str(about["metadata"])).get("exit_code")
        row = (event.timestamp, event.source.name, about["state"], about["global_rank"], code)
        self.database.execute("INSERT INTO event VALUES (?, ?, ?, ?, ?)", row)


def main() -> None:
    """Run a job that fails, and ask the database about it."""
    rows = Rows(":memory:")
    events.configure(rows)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=3, rdzv_backend="c10d", max_restarts=0
    )
    try:
        elastic_launch(config, sys.executable)("-c", WORKER)
    except ChildFailedError as error:
        print("the job failed:", error.get_first_failure()[1].summary())
    query = "SELECT source, state, rank, exit_code FROM event"
    for source, state, rank, code in rows.database.execute(query):
        print(f"{source:6} {state:20} rank {rank}, exit code {code}")


if __name__ == "__main__":
    main()
