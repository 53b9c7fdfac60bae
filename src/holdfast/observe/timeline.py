"""The timeline of a job in its log directory, the input of `holdfast report`.

`TimelineRecorder` is an observer that writes lifecycle events as lines of JSON, in one file for each node,
`timeline-<host>-<pid>.jsonl`. A line has the kind of the event and its fields, so `control.history` folds a
timeline in the same way as the events. docs/reference/log-directory.md lists the keys; `views.report.records` reads
them.

Times (`at`) are seconds of the host's monotonic clock, so setting the clock has no effect. The line `run` also has
the time of day.
"""

from __future__ import annotations

import os
import sys
from enum import Enum
from typing import TYPE_CHECKING

from holdfast.core.values import Value
from holdfast.observe import lifecycle
from holdfast.observe.events.event import json_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

BOOT_ID = "/proc/sys/kernel/random/boot_id"


class TimelineLine:
    """One line of a timeline."""

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        self.kind = kind
        self._fields = {"kind": kind, **fields}

    def serialize(self) -> str:
        """Return the line as JSON."""
        return json_text(_plain(self._fields))


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent, without lone surrogates, which readers reject."""
    match value:
        case float():
            return round(value, 6)
        case str():
            return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
        case Enum():
            return value.value
        case Value():
            return _plain(vars(value))
        case dict():
            return {key: _plain(inner) for key, inner in value.items()}
        case tuple() | list():
            return [_plain(inner) for inner in value]
    return value


KINDS: dict[type[lifecycle.LifecycleEvent], str] = {
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
    lifecycle.RequestCarriedOut: "request",
    lifecycle.ProtectionChanged: "protection",
    lifecycle.RunEnded: "end",
}
UNRECORDED = ("outcomes",)
"""Fields that are not written: `failures` has the relevant parts of error files."""


class TimelineRecorder:
    """An observer that converts lifecycle events to lines; `record` receives each."""

    name = "the recorder of the timeline"

    def __init__(self, record: Callable[[TimelineLine], object]) -> None:
        self._record = record

    def __call__(self, event: lifecycle.LifecycleEvent) -> None:
        kind = KINDS.get(type(event))
        if kind is None:
            return
        fields = {name: value for name, value in vars(event).items() if name not in UNRECORDED}
        if isinstance(event, lifecycle.RunStarted):
            fields["host"] = _host()
        self._record(TimelineLine(kind, fields))


def _host() -> dict[str, Any]:
    host = os.uname()
    return {
        "name": host.nodename,
        "boot": boot_id(),
        "pid": os.getpid(),
        "born": process_start_time(os.getpid()),
        "holdfast": sys.modules["holdfast"].__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "system": f"{host.sysname} {host.release} {host.machine}",
        "cpus": os.cpu_count() or 0,
    }


def process_start_time(pid: int) -> str:
    """Return the kernel's start time of a process; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read(4096).rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def boot_id() -> str:
    """Return the boot id of this machine: agents with the same id share a clock."""
    try:
        with open(BOOT_ID) as file:
            return file.read(64).strip()
    except OSError:
        return ""
