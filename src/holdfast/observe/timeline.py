"""The timeline of a job in its log directory: what `holdfast report` is made of.

`TimelineRecorder` is an observer that turns lifecycle events into lines of JSON, one file for each
node, `timeline-<host>-<pid>.jsonl`. The events beside it are TorchElastic's, for programs that know
those; these lines are Holdfast's own, and say what the others do not: generations by their numbers,
what stopped each and how long that took, every failure on the way, and the progress of workers that
report it. docs/reference/log-directory.md has the keys; `holdfast.views.report.records` reads them.

Times (`at`) are seconds of the host's monotonic clock; the line `run` has the time of day besides,
so the others need none and a clock that is set does not matter.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from holdfast.observe import lifecycle
from holdfast.observe.events.event import json_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

VERSION = 1
"""Raised when the meaning of a key changes, not when a key is added."""
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Line:
    """One line of a timeline."""

    def __init__(self, kind: str, at: float, fields: dict[str, Any]) -> None:
        self.kind = kind
        self._fields = {"kind": kind, "at": round(at, 6), **fields}

    def serialize(self) -> str:
        """Return the line as JSON."""
        return json_text(_whole(self._fields))


def _whole(value: Any) -> Any:
    """Return a value without halves of characters, which other readers of JSON refuse."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list) else value


class TimelineRecorder:
    """An observer that turns lifecycle events into lines; `record` gets each."""

    name = "the recorder of the timeline"

    def __init__(self, record: Callable[[Line], object]) -> None:
        self._record = record

    def __call__(self, event: lifecycle.LifecycleEvent) -> None:
        match event:
            case lifecycle.RunStarted():
                fields = _run(event)
            case lifecycle.StandbyChanged():
                fields = {"is_standby": event.is_standby}
            case lifecycle.RendezvousEnded():
                fields = {"failed": bool(event.error)}
            case lifecycle.GenerationStarted():
                fields = _generation(event)
            case lifecycle.FirstHeartbeat():
                fields = {"generation": event.generation, "rank": event.worker.global_rank}
            case lifecycle.ProgressSampled():
                steps = [[rank, step, round(at, 6)] for rank, step, at in event.steps]
                fields = {"generation": event.generation, "steps": steps}
            case lifecycle.WorkerEnded():
                rank, failed = event.worker.global_rank, event.failed
                fields = {"generation": event.generation, "rank": rank, "failed": failed}
            case lifecycle.GenerationStopping():
                reason, detail = event.reason.value, event.detail
                fields = {"generation": event.generation, "reason": reason, "detail": detail}
            case lifecycle.GenerationStopped():
                fields = {"generation": event.generation}
            case lifecycle.WorkersFailed():
                failures = [_failure(one) for one in event.failures]
                fields = {"generation": event.generation, "failures": failures}
            case lifecycle.Requested():
                fields = {"what": event.what}
            case lifecycle.RunEnded():
                fields = {"state": event.state or event.cut_short, "error": event.error}
            case _:
                return
        self._record(Line(KINDS[type(event)], event.at, fields))


KINDS = {
    lifecycle.RunStarted: "run",
    lifecycle.StandbyChanged: "standby",
    lifecycle.RendezvousEnded: "rendezvous",
    lifecycle.GenerationStarted: "generation",
    lifecycle.FirstHeartbeat: "heartbeat",
    lifecycle.ProgressSampled: "progress",
    lifecycle.WorkerEnded: "exit",
    lifecycle.GenerationStopping: "stopping",
    lifecycle.GenerationStopped: "stopped",
    lifecycle.WorkersFailed: "failures",
    lifecycle.Requested: "request",
    lifecycle.RunEnded: "end",
}


def _run(event: lifecycle.RunStarted) -> dict[str, Any]:
    host = os.uname()
    return {
        "version": VERSION,
        "wall": round(event.wall, 6),
        "run_id": event.run_id,
        "node": event.node,
        "host": host.nodename,
        "boot": boot_id(),
        "pid": os.getpid(),
        "born": born(os.getpid()),
        "role": event.role,
        "backend": event.backend,
        "program": event.program,
        "local_world_size": event.local_world_size,
        "max_restarts": event.max_restarts,
        "holdfast": sys.modules["holdfast"].__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "system": f"{host.sysname} {host.release} {host.machine}",
        "cpus": os.cpu_count() or 0,
    }


def _generation(event: lifecycle.GenerationStarted) -> dict[str, Any]:
    return {
        "generation": event.generation,
        "restarts": event.restart_count,
        "node_rank": event.group_rank,
        "nodes": event.group_world_size,
        "world_size": event.world_size,
        "fence": event.fence,
        "why": event.why,
        "logs": os.path.basename(event.log_dir),
        "workers": [[one.global_rank, one.local_rank, one.pid] for one in event.workers],
    }


def _failure(one: lifecycle.WorkerFailure) -> dict[str, Any]:
    return {
        "rank": one.global_rank,
        "local_rank": one.local_rank,
        "pid": one.pid,
        "exitcode": one.exit_code,
        "wall": round(one.wall, 6),
        "consequence": one.consequence,
        "ending": one.ending,
        "detail": one.detail,
        "message": one.message,
        "traceback": one.traceback,
        "stderr_tail": one.stderr_tail,
    }


def born(pid: int) -> str:
    """Return when a process was started, as the kernel has it; nothing if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read(4096).rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def boot_id() -> str:
    """Return which start of which machine this is: agents with the same one have the same clocks."""
    try:
        with open(BOOT_ID) as file:
            return file.read(64).strip()
    except OSError:
        return ""
