"""Timelines in the format of their recorder, without a job, for tests of their readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle
from holdfast.observe.lifecycle import WorkerFailure, WorkerInfo
from holdfast.observe.timeline import TimelineLine, TimelineRecorder
from holdfast.views.report import records

if TYPE_CHECKING:
    from pathlib import Path

BOOTED = 1000.0  # The monotonic clock when the job begins.
NOON = 1_794_960_000.0


class Timeline:
    """One node's timeline. Times are seconds since the job began; `ahead` is the error of its clock."""

    def __init__(
        self, node: str = "a", ranks: tuple[int, ...] = (0, 1), *, ahead: float = 0.0, rank: int = 0
    ) -> None:
        self.lines: list[bytes] = []
        self.events: list[lifecycle.LifecycleEvent] = []
        self.node = node
        self._ranks = ranks
        self._node_rank = rank
        self._recorder = TimelineRecorder(self._add)
        self._booted = BOOTED + 77.0 * (1 + rank)  # Hosts were booted at different times.
        self._wall = NOON + ahead

    def _add(self, line: TimelineLine) -> None:
        self.lines.append(line.serialize().encode() + b"\n")

    def note(self, event: lifecycle.LifecycleEvent) -> None:
        self.events.append(event)
        self._recorder(event)

    def at(self, since: float) -> float:
        return self._booted + since

    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(
            WorkerInfo(local, rank, rank, 2, 100 + rank) for local, rank in enumerate(self._ranks)
        )

    def run(self, since: float = 0.0, run_id: str = "job", program: str = "train.py") -> None:
        count = len(self._ranks)
        at, wall = self.at(since), self._wall + since
        self.note(
            lifecycle.RunStarted(
                at, wall, run_id, "default", "c10d", "python", count, 3, program, self.node
            )
        )
        # All nodes are on one machine; give each its own host, as in a real job.
        line = msgspec.json.decode(self.lines[-1])
        line["host"] |= {"boot": f"boot of {line['node']}", "name": f"host of {line['node']}"}
        self.lines[-1] = msgspec.json.encode(line) + b"\n"

    def generation(
        self,
        number: int,
        ready: float,
        started: float,
        *,
        why: str = "",
        nodes: int = 1,
        restarts: int | None = None,
        members: tuple[str, ...] = (),
    ) -> None:
        rank, fence = self._node_rank, 500 + number
        self.note(lifecycle.RendezvousEnded(self.at(ready), 0.0, 1.0, rank, nodes))
        self.note(
            lifecycle.GenerationStarted(
                self.at(started), 0.0, 0.1, number, number if restarts is None else restarts, rank,
                nodes, self.workers(), 2 * nodes, fence, why, f"/logs/attempt_{number}", members,
            )
        )  # fmt: skip

    def steps(self, number: int, since: float, first: int, last: int, each_s: float) -> None:
        """Add steps of equal length for every worker; the first step ends at `since`."""
        for step in range(first, last + 1):
            at = self.at(since + (step - first) * each_s)
            made = tuple((rank, step, at) for rank in self._ranks)
            self.note(lifecycle.ProgressSampled(at, number, made))

    def stops(
        self, number: int, since: float, gone: float, reason: StopReason, *failures: WorkerFailure
    ) -> None:
        self.note(lifecycle.GenerationStopping(self.at(since), number, reason))
        self.note(lifecycle.GenerationStopped(self.at(gone), number))
        if failures:
            self.note(lifecycle.WorkersFailed(self.at(gone), number, failures))

    def failure(
        self, rank: int, since: float, *, text: str = "no data", consequence: bool = False
    ) -> WorkerFailure:
        wall = self._wall + since
        trace = f"Traceback (most recent call last):\nValueError: {text}"
        ending = "exit code 1"
        return WorkerFailure(
            rank, 0, 100 + rank, 1, wall, consequence, ending, "", "", trace, f"{text}\n{trace}\n"
        )

    def end(self, since: float, state: str = "succeeded", error: str = "") -> None:
        """End with a state of the workers or, with an error, of the agent."""
        at, of_workers, of_agent = self.at(since), "" if error else state, state if error else ""
        self.note(
            lifecycle.RunEnded(
                at, 0.0, since, of_workers, 1, 2, 3, 0, 1, error=error, cut_short=of_agent
            )
        )

    def runs(self) -> list[records.NodeRun]:
        return records.parse([line.rstrip(b"\n") for line in self.lines])

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"timeline-host-{self.node}-1.jsonl"
        path.write_bytes(b"".join(self.lines))
        return path


def one_restart(text: str = "no data") -> Timeline:
    """A node whose worker 1 fails at 30; the steps since 20 are repeated.

    Its rendezvous ends at 2 and its start at 3; the first step ends at 5, and one step each second
    after it. Rank 1 fails in step 25. The agent begins to stop the others at 31 and has stopped them
    at 33; the next rendezvous ends at 34, the start at 35, and the first step (the 16th) at 38.
    Step 30 is the last, at 52.
    """
    node = Timeline()
    node.run()
    node.generation(0, 2.0, 3.0)
    node.steps(0, 5.0, 0, 25, 1.0)
    node.stops(0, 31.0, 33.0, StopReason.WORKER_FAILED, node.failure(1, 30.0, text=text))
    node.generation(1, 34.0, 35.0)
    node.steps(1, 38.0, 16, 30, 1.0)
    node.stops(1, 53.0, 54.0, StopReason.SUCCEEDED)
    node.end(55.0)
    return node
