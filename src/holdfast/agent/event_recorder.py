"""Turns the moments of a run into events: TorchElastic's names, at its moments, with its keys.

What is better than there: an event has the time at which it happened; numbers are numbers, where
TorchElastic has lists of one; what is known is said (the rank at a rendezvous, the pid of a worker,
the exit code of one that succeeded); a rendezvous that failed has its traceback; and the name of
this host is asked of the kernel once, never of a name server.

What is the same, though one might expect otherwise: the agent's own `SUCCEEDED` says that it ran to
its end, even if the workers failed; and the key `metadata` is JSON in a text, since the values of
an event are plain.
"""

from __future__ import annotations

import os

from holdfast.agent import moments
from holdfast.events.json_text import json_text
from holdfast.events.values import Event, EventSource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.events.values import EventMetadataValue

PREFIX = "torchelastic.worker.status."


class EventRecorder:
    """An onlooker that records what it is told; `record` gets each event.

    It must be told of the beginning of a run first, and may look on at several, one by one.
    """

    name = "the recorder of events"

    def __init__(self, record: Callable[[Event], object]) -> None:
        self._record = record
        self._hostname = os.uname().nodename
        self._run: moments.Began | None = None
        self._group_rank: int | None = None
        self._group_world_size: int | None = None
        self._restarts = 0
        self._total_run_time = 0

    def __call__(self, moment: moments.Moment) -> None:
        """Record what a moment means, if it means anything."""
        match moment:
            case moments.Began():
                self._run = moment
                self._group_rank = self._group_world_size = None
                self._restarts = self._total_run_time = 0
            case moments.Met():
                self._timed("RENDEZVOUS", moment)
            case moments.Ranked():
                self._timed("ASSIGN_WORKER_RANKS", moment)
            case moments.Started():
                self._restarts = moment.restart_count
                self._place(moment)
                for worker in moment.workers:
                    self._record(self.worker_event("START", moment.wall, worker))
            case moments.Ended():
                self._ended(moment)
            case moments.Watchdog():
                self._watchdog(moment)
            case moments.Recorded(event=Event() as event):
                self._record(event)

    def _place(self, moment: moments.Met | moments.Ranked | moments.Started) -> None:
        self._group_rank = moment.group_rank
        self._group_world_size = moment.group_world_size

    def _timed(self, state: str, moment: moments.Met | moments.Ranked) -> None:
        """Record how long a step took that a node takes together with the others."""
        self._restarts = max(self._restarts, moment.restart_count)
        self._place(moment)
        took_ms = moment.took_s * 1000.0
        self._record(self.agent_event(state, moment.wall, moment.error, took_ms))

    def _ended(self, moment: moments.Ended) -> None:
        self._restarts = moment.restart_count
        self._total_run_time = int(moment.took_s)
        if moment.group_rank is not None:
            self._group_rank = moment.group_rank
            self._group_world_size = moment.group_world_size
        for end in moment.ends:
            state, worker = end.state.upper(), end.worker
            self._record(self.worker_event(state, moment.wall, worker, end.error, end.exit_code))
        raised = bool(moment.error) or not moment.state
        state = "FAILED" if raised else "SUCCEEDED"
        self._record(self.agent_event(state, moment.wall, moment.error))

    def _watchdog(self, moment: moments.Watchdog) -> None:
        inner: dict[str, Any] = {"watchdog_event": moment.what}
        if moment.pid:
            inner["worker_pid"] = moment.pid
            inner["scope_id"] = moment.scope
            inner["expiration_time"] = moment.expires
            inner["signal"] = moment.signum
        metadata = self._metadata("RUNNING", inner)
        self._record(_event(moment.what, EventSource.AGENT, moment.wall, metadata))

    def agent_event(
        self, state: str, wall: float, error: str = "", duration_ms: float | None = None
    ) -> Event:
        """Return an event about the agent, without recording it."""
        metadata = self._metadata(state, self._inner(), error=error)
        metadata["duration_ms"] = duration_ms
        return _event(PREFIX + state, EventSource.AGENT, wall, metadata)

    def worker_event(
        self,
        state: str,
        wall: float,
        worker: moments.WorkerFact,
        error: str = "",
        exit_code: int | None = None,
    ) -> Event:
        """Return an event about a worker, without recording it."""
        inner = self._inner() | {
            "local_rank": worker.local_rank,
            "role_rank": worker.role_rank,
            "role_world_size": worker.role_world_size,
            "exit_code": exit_code,
            "worker_pid": worker.pid,
        }
        metadata = self._metadata(state, inner, worker=worker, error=error)
        metadata["duration_ms"] = None
        return _event(PREFIX + state, EventSource.WORKER, wall, metadata)

    def _inner(self) -> dict[str, Any]:
        entry_point = self._run.entry_point if self._run else ""
        return {"group_world_size": self._group_world_size, "entry_point": entry_point}

    def _metadata(
        self,
        state: str,
        inner: dict[str, Any],
        *,
        worker: moments.WorkerFact | None = None,
        error: str = "",
    ) -> dict[str, EventMetadataValue]:
        run = self._run
        return {
            "run_id": run.run_id if run else "",
            "global_rank": worker.global_rank if worker else None,
            "group_rank": self._group_rank,
            "worker_id": str(worker.pid) if worker else None,
            "role": run.role if run else "",
            "hostname": self._hostname,
            "state": state,
            "total_run_time": self._total_run_time,
            "rdzv_backend": run.backend if run else "",
            "raw_error": error or None,
            "metadata": json_text(inner),
            "agent_restarts": self._restarts,
        }


def _event(
    name: str, source: EventSource, wall: float, metadata: dict[str, EventMetadataValue]
) -> Event:
    return Event(name, source, int(wall * 1000), metadata)
