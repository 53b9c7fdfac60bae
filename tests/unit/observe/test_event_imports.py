"""Recording events is cheap: what it loads, counted in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = {
    "asyncio", "atexit", "copy", "dataclasses", "importlib.metadata", "inspect", "json", "logging",
    "msgspec", "opentelemetry", "queue", "re", "socket", "threading", "traceback", "typing",
}  # fmt: skip

PROGRAM = """
import enum, sys
bare = set(sys.modules)
{body}
print(*sorted(set(sys.modules) - bare))
"""


def loaded_by(body: str, *args: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body), *args],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_loads_only_itself() -> None:
    assert loaded_by("import holdfast.events") <= {"__future__", "holdfast", "holdfast.events"}


def test_writing_lines_loads_nothing_heavy_and_starts_no_thread(tmp_path: Path) -> None:
    modules = loaded_by(
        "from holdfast.observe.events.recorder import JobEvents\n"
        "from holdfast.observe.events.event import Event, EventSource\n"
        "job = JobEvents('jsonl', sys.argv[1])\n"
        "job.record(Event('a', EventSource.AGENT, 1))\n"
        "job.close()\n",
        str(tmp_path),
    )
    assert modules & HEAVY == set()
    assert {name for name in modules if name.startswith("holdfast.events.")} == {
        f"holdfast.events.{name}"
        for name in ("guarding", "handlers", "job", "json_lines", "json_text", "values")
    }
    assert len(list(tmp_path.iterdir())) == 1


def test_the_recorder_of_moments_loads_nothing_heavy() -> None:
    modules = loaded_by("from holdfast.observe.events.recorder import EventRecorder")
    assert modules & {"dataclasses", "inspect", "json", "logging", "msgspec", "typing"} == set()


def test_every_name_of_the_package_is_there() -> None:
    from holdfast import events

    assert [name for name in events.__all__ if getattr(events, name, None) is None] == []
    assert sorted(events._HOMES) == sorted(events.__all__)
