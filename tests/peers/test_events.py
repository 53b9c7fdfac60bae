"""The events of a run equal those of the real torchrun: names, sources, keys in order, and types.

Both run the same scripts, and record with their console handlers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from launchers import TIMEOUT_S

from holdfast.elastic import events as ours
from holdfast.elastic.events import Event, EventSource, NodeState, RdzvEvent

if TYPE_CHECKING:
    from pathlib import Path

    from launchers import Launchers, Torchrun

pytestmark = pytest.mark.torch

RUNS = {
    "succeeded": "pass\n",
    # Each worker runs twice; rank 0 runs until the agent stops it.
    "failed": """
import os, signal, sys
if os.environ["RANK"] == "1":
    sys.exit(7)
signal.pause()
""",
    # One worker signals the agent after the agent has recorded the start of both workers. The worker's
    # parent is the agent, or Holdfast's keeper.
    "signalled": """
import os, signal, time
if os.environ["RANK"] == "0":
    while open("stderr").read().count('status.START"') < 2:
        time.sleep(0.01)
    agent = os.getppid()
    if "HOLDFAST_GENERATION" in os.environ:
        with open(f"/proc/{agent}/stat") as stat:
            agent = int(stat.read().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGTERM)
signal.pause()
""",
}
LINE = [
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
    "--rdzv-id=events",
    "--max-restarts=1",
    "--event-log-handler=console",
    "../job.py",
]


class ComparedEvent(NamedTuple):
    """The comparable part of an event."""

    source: str
    name: str
    keys: list[str]
    inner_keys: list[str]
    same: dict[str, Any]


def events_of_both(
    launchers: Launchers, torchrun: Torchrun, script: str, **env: str
) -> tuple[list[Event], list[Event]]:
    """Run two workers under Holdfast and under torchrun; return the events of each."""
    launchers.script("job.py", script)
    here, there = launchers.base / "holdfast", launchers.base / "torchrun"
    here.mkdir()
    there.mkdir()
    env = launchers.env | env
    job = {"argv": LINE, "env": env | {"LOGLEVEL": "INFO"}, "cwd": str(there)}
    torchrun.begin(job | {"stdout": str(there / "stdout"), "stderr": str(there / "stderr")})
    with (here / "stderr").open("w") as stderr:
        subprocess.run(
            [sys.executable, "-m", "holdfast", "run", *LINE],
            cwd=here,
            env=env,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            timeout=TIMEOUT_S,
        )
    torchrun.end()
    return recorded(here), recorded(there)


def recorded(folder: Path) -> list[Event]:
    lines = (folder / "stderr").read_text().splitlines()
    # Our `deserialize` reads torchrun's lines.
    return [Event.deserialize(one) for one in lines if one.startswith('{"name":')]


def received(event: Event) -> ComparedEvent:
    text = event.metadata["metadata"]
    assert isinstance(text, str)
    inner = json.loads(text)
    same = ("global_rank", "role", "state", "agent_restarts", "run_id", "rdzv_backend")
    values = {key: event.metadata[key] for key in same}
    for key in ("entry_point", "local_rank", "role_rank", "role_world_size"):
        value = inner.get(key)
        # torchrun's values are lists with one item.
        values[key] = value[0] if isinstance(value, list) else value
    return ComparedEvent(event.source.value, event.name, list(event.metadata), list(inner), values)


def kinds_of(event: Event) -> dict[str, type]:
    return {key: type(value) for key, value in event.metadata.items() if value is not None}


@pytest.mark.parametrize("run", RUNS)
def test_run_has_the_same_events(launchers: Launchers, torchrun: Torchrun, run: str) -> None:
    mine, theirs = events_of_both(launchers, torchrun, RUNS[run])
    if run == "failed":  # torchrun reports workers that its agent stopped as failed.
        ended, failed = received(mine.pop(-3)), received(theirs.pop(-3))
        assert (ended.same["global_rank"], ended.same["state"]) == (0, "TERMINATED")
        assert (failed.same["global_rank"], failed.same["state"]) == (0, "FAILED")
    assert [received(one) for one in mine] == [received(one) for one in theirs]
    for one, other in zip(mine, theirs, strict=True):
        here, there = kinds_of(one), kinds_of(other)
        assert {key: here[key] for key in there if key != "raw_error"} == {
            key: kind for key, kind in there.items() if key != "raw_error"
        }
        assert (one.timestamp > 0, other.timestamp) == (True, 0)  # torchrun's events have no time.


def test_watchdog_has_the_same_events(launchers: Launchers, torchrun: Torchrun) -> None:
    mine, theirs = events_of_both(
        launchers, torchrun, RUNS["succeeded"], TORCHELASTIC_ENABLE_FILE_TIMER="1"
    )
    # The time of torchrun's stop event varies, since a separate thread records it.
    assert sorted(map(received, mine), key=str) == sorted(map(received, theirs), key=str)
    assert "watchdog started" in [one.name for one in mine]


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


def test_same_event_destinations_exist() -> None:
    from torch.distributed.elastic.events.handlers import _log_handlers

    for name, handler in _log_handlers.items():
        assert type(ours.get_logging_handler(name)) is type(handler)
