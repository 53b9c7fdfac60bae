"""Converts lifecycle events into TorchElastic's events, with its names and keys.

`EventRecorder` and `RendezvousRecorder` are observers; `JobEvents` sends the events of one job to its handlers.
Improvements over TorchElastic: An event has the time at which it happened. Numbers are numbers, not lists. Known
values are included: the rank at a rendezvous, the pid of a worker, the exit code of a successful worker. A failed
rendezvous has its traceback. The host name comes from the kernel, never from a name server.

As in TorchElastic, the agent's own `SUCCEEDED` means that the agent finished, even if the workers failed; and the
key `metadata` is JSON in a string.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.observe import configured, events_wanted, lifecycle
from holdfast.observe.background import BackgroundHandler
from holdfast.observe.events import destinations
from holdfast.observe.events.event import Event, EventSource, NodeState, RdzvEvent, json_text
from holdfast.observe.events.event_handlers import LogDirectoryHandler

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.observe.events.event import EventMetadataValue
    from holdfast.observe.safe_handler import SafeHandler
    from holdfast.observe.timeline import TimelineLine


PREFIX = "torchelastic.worker.status."


class EventRecorder:
    """An observer that converts lifecycle events and passes them to `record`.

    A run begins with `RunStarted`; one recorder serves several runs, one after the other.
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

    def __call__(self, event: lifecycle.LifecycleEvent) -> None:
        match event:
            case lifecycle.RunStarted():
                self._run = event
                self._group_rank = self._group_world_size = None
                self._restarts = self._total_run_time = 0
            case lifecycle.RendezvousEnded():
                self._timed("RENDEZVOUS", event)
            case lifecycle.RanksAssigned():
                self._timed("ASSIGN_WORKER_RANKS", event)
            case lifecycle.GenerationStarted():
                self._restarts = event.restart_count
                self._set_group_rank(event)
                for worker in event.workers:
                    self._record(self.worker_event("START", event.wall, worker))
            case lifecycle.RunEnded():
                self._ended(event)
            case lifecycle.WatchdogEvent():
                self._watchdog(event)
            case lifecycle.RequestCarriedOut():
                inner = self._inner() | {"request": event.request, "requested": event.what}
                metadata = self._metadata("RUNNING", inner)
                self._record(_event("holdfast.request", EventSource.AGENT, event.wall, metadata))
            case lifecycle.ProtectionChanged():
                inner = self._inner() | {"missing": event.missing}
                metadata = self._metadata("RUNNING", inner)
                self._record(_event("holdfast.protection", EventSource.AGENT, event.wall, metadata))
            case lifecycle.CustomEvent(event=Event() as custom):
                self._record(custom)

    def _set_group_rank(
        self,
        event: lifecycle.RendezvousEnded | lifecycle.RanksAssigned | lifecycle.GenerationStarted,
    ) -> None:
        self._group_rank = event.group_rank
        self._group_world_size = event.group_world_size

    def _timed(
        self, state: str, event: lifecycle.RendezvousEnded | lifecycle.RanksAssigned
    ) -> None:
        """Record the duration of a step that all nodes take together."""
        self._restarts = max(self._restarts, event.restart_count)
        self._set_group_rank(event)
        error = event.error if isinstance(event, lifecycle.RendezvousEnded) else ""
        self._record(self.agent_event(state, event.wall, error, event.took_s * 1000.0))

    def _ended(self, event: lifecycle.RunEnded) -> None:
        self._restarts = event.restart_count
        self._total_run_time = int(event.took_s)
        if event.group_rank is not None:
            self._group_rank = event.group_rank
            self._group_world_size = event.group_world_size
        for end in () if event.workers_recorded else event.outcomes:
            state, worker = end.state.upper(), end.worker
            self._record(self.worker_event(state, event.wall, worker, end.error, end.exit_code))
        raised = bool(event.error) or not event.state
        state = "FAILED" if raised else "SUCCEEDED"
        self._record(self.agent_event(state, event.wall, event.error))

    def _watchdog(self, event: lifecycle.WatchdogEvent) -> None:
        inner: dict[str, Any] = {"watchdog_event": event.what}
        if event.pid:
            inner["worker_pid"] = event.pid
            inner["scope_id"] = event.scope
            inner["expiration_time"] = event.expires
            inner["signal"] = event.signum
        metadata = self._metadata("RUNNING", inner)
        self._record(_event(event.what, EventSource.AGENT, event.wall, metadata))

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


class RendezvousRecorder:
    """An observer that records the steps of this node's rendezvous as `RdzvEvent`s."""

    name = "the recorder of the rendezvous"

    def __init__(self) -> None:
        self._run_id = ""

    def __call__(self, event: lifecycle.LifecycleEvent) -> None:
        match event:
            case lifecycle.RunStarted():
                self._run_id = event.run_id
                self._record("the node joins the job", NodeState.INIT)
            case lifecycle.RendezvousEnded(error=""):
                where = f"rank {event.group_rank} of {event.group_world_size}"
                self._record(f"the node has {where}", NodeState.RUNNING, event.group_rank)
            case lifecycle.RendezvousEnded():
                self._record("the rendezvous failed", NodeState.FAILED, error=event.error)
            case lifecycle.RunEnded() if event.error:
                self._record("the run ended on this node", NodeState.FAILED, error=event.error)
            case lifecycle.RunEnded():
                failed = event.state != "succeeded"
                state = NodeState.FAILED if failed else NodeState.SUCCEEDED
                self._record("the run ended on this node", state, event.group_rank)

    def close(self) -> None:
        """Wait up to `FLUSH_S` until the handler has received all events."""
        destinations.find(DESTINATION).flush(destinations.FLUSH_S)

    def _record(
        self, message: str, state: NodeState, rank: int | None = None, *, error: str = ""
    ) -> None:
        destinations.record_rdzv_event(
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
"""How long the end of a job waits for handlers of the program and of plug-ins."""


class JobEvents:
    """Sends the events of one job to the log directory's handler and to the selected handler.

    The log directory always has all events as JSON lines. A handler that the program configured for the default
    destination receives them too. `close` this before the log directory is removed, and before
    `os._exit`.
    """

    def __init__(self, name: str, folder: str | Callable[[], str | None] | None) -> None:
        """Raise `UsageError` if there is no destination `name`.

        `folder` is the job's log directory, or a function that returns it once it exists. If it is None, the job
        has no log directory, and no lines are written.
        """
        self._own: list[SafeHandler] = []
        self._shared: list[SafeHandler] = []
        is_configured = JSON_LINES in configured
        if folder is not None:
            # In its own thread: the log directory's file system may hang.
            handler = LogDirectoryHandler(folder, events=not is_configured)
            self._own.append(BackgroundHandler(handler, JSON_LINES))
        if name not in ("null", JSON_LINES) or (name == JSON_LINES and is_configured):
            self._share(name)
        if events_wanted("null"):
            self._share("null")

    def _share(self, name: str) -> None:
        self._shared.append(destinations.find(name))

    def record(self, event: Event) -> None:
        """Send an event to every handler."""
        for handler in (*self._own, *self._shared):
            handler.record(event)

    def record_line(self, line: TimelineLine) -> None:
        """Add a line to the timeline in the log directory, if there is one."""
        for handler in self._own:
            handler.record(line)

    def close(self, limit_s: float = FLUSH_S) -> None:
        """Close the job's own handlers; flush the others, which may serve the next job too."""
        for handler in self._own:
            handler.close(limit_s)
        for handler in self._shared:
            handler.flush(limit_s)
