"""Turns lifecycle events into events, with TorchElastic's names and keys, and passes them on.

`EventRecorder` and `RendezvousRecorder` are observers; `JobEvents` is where the events of one job
go. What is better than TorchElastic's: an event has the time at which it happened; numbers are
numbers, not lists of one; what is known is included (the rank at a rendezvous, the pid of a worker,
the exit code of one that succeeded); a failed rendezvous has its traceback; the host name comes
from the kernel, never from a name server.

What is the same, though one might expect otherwise: the agent's own `SUCCEEDED` says that it ran to
its end, even if the workers failed; and the key `metadata` is JSON in a string.
"""

from __future__ import annotations

import os
import sys

from holdfast.observe import lifecycle
from holdfast.observe.events.event import Event, EventSource, json_text
from holdfast.observe.events.handlers import JsonLinesEventHandler
from holdfast.observe.safe_handler import SafeHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.observe.events.event import EventMetadataValue, NodeState


PREFIX = "torchelastic.worker.status."


class EventRecorder:
    """An observer that records what it is told; `record` gets each event.

    It must be told of the beginning of a run first, and may look on at several, one by one.
    """

    name = "the recorder of events"

    def __init__(self, record: Callable[[Event], object]) -> None:
        self._record = record
        self._hostname = os.uname().nodename
        self._run: lifecycle.RunStarted | None = None
        self._group_rank: int | None = None
        self._group_world_size: int | None = None
        self._restarts = 0
        self._total_run_time = 0

    def __call__(self, moment: lifecycle.LifecycleEvent) -> None:
        """Record what a moment means, if it means anything."""
        match moment:
            case lifecycle.RunStarted():
                self._run = moment
                self._group_rank = self._group_world_size = None
                self._restarts = self._total_run_time = 0
            case lifecycle.RendezvousEnded():
                self._timed("RENDEZVOUS", moment)
            case lifecycle.RanksAssigned():
                self._timed("ASSIGN_WORKER_RANKS", moment)
            case lifecycle.GenerationStarted():
                self._restarts = moment.restart_count
                self._place(moment)
                for worker in moment.workers:
                    self._record(self.worker_event("START", moment.wall, worker))
            case lifecycle.RunEnded():
                self._ended(moment)
            case lifecycle.WatchdogEvent():
                self._watchdog(moment)
            case lifecycle.CustomEvent(event=Event() as event):
                self._record(event)

    def _place(
        self,
        moment: lifecycle.RendezvousEnded | lifecycle.RanksAssigned | lifecycle.GenerationStarted,
    ) -> None:
        self._group_rank = moment.group_rank
        self._group_world_size = moment.group_world_size

    def _timed(
        self, state: str, moment: lifecycle.RendezvousEnded | lifecycle.RanksAssigned
    ) -> None:
        """Record how long a step took that a node takes together with the others."""
        self._restarts = max(self._restarts, moment.restart_count)
        self._place(moment)
        error = moment.error if isinstance(moment, lifecycle.RendezvousEnded) else ""
        self._record(self.agent_event(state, moment.wall, error, moment.took_s * 1000.0))

    def _ended(self, moment: lifecycle.RunEnded) -> None:
        self._restarts = moment.restart_count
        self._total_run_time = int(moment.took_s)
        if moment.group_rank is not None:
            self._group_rank = moment.group_rank
            self._group_world_size = moment.group_world_size
        for end in moment.outcomes:
            state, worker = end.state.upper(), end.worker
            self._record(self.worker_event(state, moment.wall, worker, end.error, end.exit_code))
        raised = bool(moment.error) or not moment.state
        state = "FAILED" if raised else "SUCCEEDED"
        self._record(self.agent_event(state, moment.wall, moment.error))

    def _watchdog(self, moment: lifecycle.WatchdogEvent) -> None:
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
        worker: lifecycle.WorkerInfo,
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
        worker: lifecycle.WorkerInfo | None = None,
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


DESTINATION = "dynamic_rendezvous"


def rendezvous_events_wanted() -> bool:
    """Whether anybody gets such events; whoever does has imported the module that took it."""
    destinations = sys.modules.get("holdfast.observe.events.destinations")
    return destinations is not None and destinations.is_recorded(DESTINATION)


class RendezvousRecorder:
    """An observer that records how this node fares among the others."""

    name = "the recorder of the rendezvous"

    def __init__(self) -> None:
        self._run_id = ""

    def __call__(self, moment: lifecycle.LifecycleEvent) -> None:
        """Record what a moment says of the rendezvous, if anything."""
        from holdfast.observe.events.event import NodeState

        match moment:
            case lifecycle.RunStarted():
                self._run_id = moment.run_id
                self._record("the node joins the job", NodeState.INIT)
            case lifecycle.RendezvousEnded(error=""):
                where = f"rank {moment.group_rank} of {moment.group_world_size}"
                self._record(f"the node has {where}", NodeState.RUNNING, moment.group_rank)
            case lifecycle.RendezvousEnded():
                self._record("the rendezvous failed", NodeState.FAILED, error=moment.error)
            case lifecycle.RunEnded() if moment.error:
                self._record("the node's part ended", NodeState.FAILED, error=moment.error)
            case lifecycle.RunEnded():
                failed = moment.state != "succeeded"
                state = NodeState.FAILED if failed else NodeState.SUCCEEDED
                self._record("the node's part ended", state, moment.group_rank)

    def end(self) -> None:
        """Wait, for a limited time, until whoever gets these events has them."""
        from holdfast.observe.events import destinations

        destinations.find(DESTINATION).flush(destinations.FLUSH_S)

    def _record(
        self, message: str, state: NodeState, rank: int | None = None, *, error: str = ""
    ) -> None:
        from holdfast.observe.events.destinations import record_rdzv_event
        from holdfast.observe.events.event import RdzvEvent

        record_rdzv_event(
            RdzvEvent(
                name=f"agent:{state.value.lower()}",
                run_id=self._run_id,
                message=message,
                hostname=os.uname().nodename,
                pid=os.getpid(),
                node_state=state,
                rank=rank,
                error_trace=error,
            )
        )


JSON_LINES = "jsonl"
FLUSH_S = 5.0
"""How long the end of a job waits for handlers that are not ours."""


class JobEvents:
    """Gets the events of a job, and passes them on to the handlers that are chosen."""

    def __init__(self, name: str, folder: str | Callable[[], str | None] | None) -> None:
        """Choose by the name of a destination; raises `UsageError` if there is none.

        `folder` is the job's log directory, or a function that returns it as soon as it is there;
        None if the job has none, in which case no lines are written.
        """
        self._own: list[SafeHandler] = []
        self._shared: list[SafeHandler] = []
        is_configured = _is_configured(JSON_LINES)
        if folder is not None and not is_configured:
            self._own.append(SafeHandler(JsonLinesEventHandler(folder), JSON_LINES))
        if name not in ("null", JSON_LINES) or (name == JSON_LINES and is_configured):
            self._share(name)
        if _is_recorded("null"):
            self._share("null")

    def _share(self, name: str) -> None:
        from holdfast.observe.events import destinations

        self._shared.append(destinations.find(name))

    def record(self, event: Event) -> None:
        """Record an event with everyone who is chosen."""
        for guarded in self._own:
            guarded.record(event)
        for guarded in self._shared:
            guarded.record(event)

    def close(self, limit_s: float = FLUSH_S) -> None:
        """End the job's own handlers; wait for the others, which may serve the next job too."""
        for guarded in self._own:
            guarded.close(limit_s)
        for guarded in self._shared:
            guarded.flush(limit_s)


def _is_configured(destination: str) -> bool:
    """Whether a program configured a destination; one that never imported that module did not."""
    destinations = sys.modules.get("holdfast.observe.events.destinations")
    return destinations is not None and destinations.is_configured(destination)


def _is_recorded(destination: str) -> bool:
    destinations = sys.modules.get("holdfast.observe.events.destinations")
    return destinations is not None and destinations.is_recorded(destination)
