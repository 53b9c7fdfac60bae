"""A custom event handler: it stores events in a database, and the program queries them.

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

# Worker 2 of three fails; the others sleep until Holdfast stops them.
WORKER = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '2' else time.sleep(3600)"


class Rows(events.EventHandler):
    """Stores the fields of an event that a query may need."""

    def __init__(self, path: str) -> None:
        # Another thread calls `record`, and each row is its own transaction.
        self.database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self.database.execute(
            "CREATE TABLE IF NOT EXISTS event (at, source, state, rank, exit_code)"
        )

    def record(self, event: events.Event) -> None:
        """Insert a row."""
        data = event.metadata
        code = json.loads(str(data["metadata"])).get("exit_code")
        row = (event.timestamp, event.source.name, data["state"], data["global_rank"], code)
        self.database.execute("INSERT INTO event VALUES (?, ?, ?, ?, ?)", row)


def main() -> None:
    """Run a job that fails, and query the database."""
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
