"""The events of a run are those of the real torchrun: names, sources, keys in order, and types.

torchrun records them with its own handler. Ours come from the moments that such a run consists of.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from holdfast.agent.event_recorder import EventRecorder
from holdfast.agent.moments import (
    Began,
    Ended,
    Met,
    Moment,
    Ranked,
    Started,
    Watchdog,
    WorkerEnd,
    WorkerFact,
)
from holdfast.elastic import events as ours
from holdfast.elastic.events import Event, EventSource, NodeState, RdzvEvent

if TYPE_CHECKING:
    from launchers import Launchers, Torchrun

pytestmark = pytest.mark.torch

SUCCEEDING = "pass\n"
FAILING = "import sys; sys.exit(7)\n"
# One worker ends the agent, once that has recorded the start of both.
SIGNALLING = """
import os, signal, time
if os.environ["RANK"] == "0":
    while open("stderr").read().count('status.START"') < 2:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""

PYTHON = os.path.basename(sys.executable)
BEGAN = Began(0.0, 1.0, "events", "default", "c10d", PYTHON, 2, 1)
WORKERS = (WorkerFact(0, 0, 0, 2, 101), WorkerFact(1, 1, 1, 2, 102))


class Told(NamedTuple):
    """What can be compared of an event."""

    source: str
    name: str
    keys: list[str]
    inner_keys: list[str]
    same: dict[str, Any]


def start(restarts: int = 0) -> list[Moment]:
    return [
        Met(1.0, 2.0, 0.5, 0, 1, restart_count=restarts),
        Ranked(1.0, 2.0, 0.5, 0, 1, restart_count=restarts),
        Started(1.0, 2.0, 0.5, restarts, restarts, 0, 1, WORKERS),
    ]


def end(state: str, worker: str = "", restarts: int = 0, error: str = "") -> Ended:
    ends = tuple(WorkerEnd(one, worker) for one in WORKERS if worker)
    return Ended(9.0, 9.0, 8.0, state, restarts, 1 - restarts, 1, 0, 1, ends, error)


RUNS: dict[str, tuple[str, list[Moment]]] = {
    "succeeded": (SUCCEEDING, [*start(), end("succeeded", "succeeded")]),
    "failed": (FAILING, [*start(), *start(1), end("failed", "failed", 1)]),
    "signalled": (SIGNALLING, [*start(), end("", error="Traceback ...")]),
}


def recorded(moments: list[Moment]) -> list[Event]:
    events: list[Event] = []
    recorder = EventRecorder(events.append)
    for moment in [BEGAN, *moments]:
        recorder(moment)
    return events


def torchruns_events(
    launchers: Launchers, torchrun: Torchrun, script: str, **env: str
) -> list[Event]:
    """Run two workers under torchrun and return what its handler for the console wrote."""
    launchers.script("job.py", script)
    folder = launchers.base
    line = ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    line += ["--rdzv-id=events", "--max-restarts=1", "--event-log-handler=console", "job.py"]
    out, err = folder / "stdout", folder / "stderr"
    files = {"stdout": str(out), "stderr": str(err)}
    torchrun.begin({"argv": line, "env": launchers.env | env, "cwd": str(folder), **files})
    torchrun.end()
    lines = [one for one in err.read_text().splitlines() if one.startswith('{"name":')]
    return [Event.deserialize(one) for one in lines]  # Ours reads what theirs wrote.


def told(event: Event) -> Told:
    text = event.metadata["metadata"]
    assert isinstance(text, str)
    inner = json.loads(text)
    same = ("global_rank", "role", "state", "agent_restarts", "run_id", "rdzv_backend")
    values = {key: event.metadata[key] for key in same}
    for key in ("entry_point", "local_rank", "role_rank", "role_world_size"):
        value = inner.get(key)
        values[key] = value[0] if isinstance(value, list) else value  # Theirs are lists of one.
    return Told(event.source.value, event.name, list(event.metadata), list(inner), values)


def kinds_of(event: Event) -> dict[str, type]:
    return {key: type(value) for key, value in event.metadata.items() if value is not None}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_has_the_same_events(launchers: Launchers, torchrun: Torchrun, run: str) -> None:
    script, moments = RUNS[run]
    theirs = torchruns_events(launchers, torchrun, script, LOGLEVEL="INFO")
    mine = recorded(moments)
    assert [told(one) for one in mine] == [told(one) for one in theirs]
    for one, other in zip(mine, theirs, strict=True):
        here, there = kinds_of(one), kinds_of(other)
        assert {key: here[key] for key in there if key != "raw_error"} == {
            key: kind for key, kind in there.items() if key != "raw_error"
        }
        assert (one.timestamp > 0, other.timestamp) == (True, 0)  # Theirs do not say when.


def test_the_watchdog_has_the_same_events(launchers: Launchers, torchrun: Torchrun) -> None:
    moments = [
        *start()[:2],
        Watchdog(1.0, 2.0, "watchdog started"),
        start()[2],
        Watchdog(1.0, 2.0, "watchdog stopped"),
        end("succeeded", "succeeded"),
    ]
    theirs = torchruns_events(
        launchers, torchrun, SUCCEEDING, TORCHELASTIC_ENABLE_FILE_TIMER="1", LOGLEVEL="INFO"
    )
    # When theirs stops is not fixed, since a thread of its own does it.
    mine = [told(one) for one in recorded(moments)]
    there = [told(one) for one in theirs]
    assert sorted(mine, key=str) == sorted(there, key=str)


def test_both_read_and_write_the_same_text() -> None:
    from torch.distributed.elastic import events as theirs

    here = Event("n", EventSource.WORKER, 5, {"a": 1, "b": None, "c": "é\n", "d": 0.5, "e": True})
    there = theirs.Event.deserialize(here.serialize())
    assert there.serialize() == here.serialize()
    assert Event.deserialize(there.serialize()) == here
    step = RdzvEvent("n", "job", "m", "h", 3, NodeState.FAILED, "e:1", 2, 1, "trace\n")
    other = theirs.RdzvEvent.deserialize(step.serialize())
    assert other.serialize() == step.serialize()
    assert RdzvEvent.deserialize(other.serialize()) == step


def test_the_same_destinations_are_there() -> None:
    from torch.distributed.elastic.events.handlers import _log_handlers

    for name, handler in _log_handlers.items():
        assert type(ours.get_logging_handler(name)) is type(handler)
