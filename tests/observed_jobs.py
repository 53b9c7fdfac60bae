"""Real jobs with one node whose output, ports and files are observed while they run.

Nothing notifies a test of a change, so `ObservedJob.prints` and `until` poll for it.
"""

from __future__ import annotations

import http.client
import json
import time
from typing import TYPE_CHECKING, NamedTuple

from real_jobs import PATIENCE_S, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Any, Self, TypeVar

    Found = TypeVar("Found")

POLL_S = 0.01

# Put before a script: `obey` waits for an order to continue (SIGUSR1), which may arrive earlier.
ORDERS = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
def obey():
    signal.sigwaitinfo({signal.SIGUSR1})
"""


class ObservedJob(Job):
    """A `holdfast run` whose messages can be read while it runs, with its own TMPDIR."""

    def __init__(
        self, folder: Path, script: str, *flags: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._errors = folder / "errors"
        with self._errors.open("w") as stderr:
            super().__init__(
                folder,
                ORDERS + script,
                *flags,
                stderr=stderr.fileno(),
                env={"TMPDIR": str(self.temporary), **(env or {})},
            )

    def __enter__(self) -> Self:
        return self

    def output(self) -> str:
        """Return the standard error of the agent, and of workers that are not redirected."""
        return self._errors.read_text()

    def prints(self, text: str) -> str:
        """Wait until it has printed this text; return the rest of that line."""

        def look() -> str | None:
            _, found, rest = self.output().partition(text)
            assert found or self.agent.poll() is None, f"exited without {text!r}: {self.output()}"
            return rest.partition("\n")[0] if found and "\n" in rest else None

        return until(look)

    def ends(self) -> tuple[int, str]:
        """Wait until the command exits; return its exit code and its output."""
        code, _, _ = self.end()
        return code, self.output()

    def left_behind(self) -> list[str]:
        """Return the files left in its TMPDIR."""
        return sorted(str(one.relative_to(self.temporary)) for one in self.temporary.rglob("*"))


class EventSummary(NamedTuple):
    """An event of a run, without values that differ from run to run."""

    name: str
    source: str
    rank: int | None
    restarts: int


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Return the events in the log directory of the only run below a folder."""
    [path] = folder.rglob("events-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary_of(event: dict[str, Any]) -> EventSummary:
    metadata = event["metadata"]
    name = event["name"].removeprefix("torchelastic.worker.status.")
    return EventSummary(name, event["source"], metadata["global_rank"], metadata["agent_restarts"])


def until(look: Callable[[], Found | None]) -> Found:
    """Poll until something is found, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := look()) is None:
        assert time.monotonic() < deadline, "timed out"
        time.sleep(POLL_S)
    return found


def fetch(port: int, path: str, limit_s: float = PATIENCE_S) -> tuple[int, str]:
    """Return status and text of a response from a port of this host."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
