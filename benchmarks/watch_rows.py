"""Rows about watching a job: the time of a status, the cost of subscribers and views, the speed of
logs.

`workers/watching.py`, `viewing.py` and `following.py` do the work. The rows of starts and of idling
show that a job without watchers pays nothing.
"""

from __future__ import annotations

import os
import subprocess
import time
from typing import TYPE_CHECKING

from benchmarks.launching import WORKERS, BenchmarkError

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.launching import Lab, Samples

AGENTS, SUBSCRIBERS, WINDOW_S = 1_000, 100, 5
WATCHING_S_MAX = 180.0
VIEWED_NODES, VIEWED_RANKS, VIEWED_EVERY_S, VIEWED_UPDATES = 125, 8, 1.0, 10
VIEWING_S_MAX = 60.0
FOLLOWED_BYTES = 300_000_000
FOLLOWING_S_MAX = 60.0
POLL_S = 0.05
END_S_MAX = 10.0


def measure_status(lab: Lab, _: str) -> Samples:
    """The status of many agents, and the coordinator's CPU time without and with subscribers."""
    found = lab.figures_of("watching.py", (AGENTS, SUBSCRIBERS, WINDOW_S), WATCHING_S_MAX)
    return {
        "status": [found["status_s"] * 1e3],
        "alone": [found["core_alone"] * 100],
        "watched": [found["core_watched"] * 100],
        "added": [(found["core_watched"] - found["core_alone"]) * 100],
    }


def measure_top(lab: Lab, _: str) -> Samples:
    """The CPU time of `holdfast top` for a job with many ranks."""
    words = (VIEWED_NODES, VIEWED_RANKS, VIEWED_EVERY_S, VIEWED_UPDATES)
    found = lab.figures_of("viewing.py", words, VIEWING_S_MAX, {"TERM": "xterm-256color"})
    return {"core": [found["core"] * 100]}


def measure_follow(lab: Lab, launcher: str) -> Samples:
    """Measure how fast a follower at the agent's socket receives a worker's output."""
    folder = lab.folder / "following"
    runtime = folder / "run"
    runtime.mkdir(parents=True, exist_ok=True, mode=0o700)
    env = lab.env | {"HOLDFAST_RUNTIME_DIR": str(runtime)}
    command = [
        lab.program(launcher), "run", "--redirects", "3", "--log-dir", str(folder / "logs"),
        str(WORKERS / "write_lines.py"), str(FOLLOWED_BYTES),
    ]  # fmt: skip
    nothing = subprocess.DEVNULL
    with subprocess.Popen(command, env=env, stdin=nothing, stderr=nothing) as agent:
        try:
            path = _socket_in(runtime / f"holdfast-{os.geteuid()}", agent)
            words = (path, "", FOLLOWED_BYTES)
            found = lab.figures_of("following.py", words, FOLLOWING_S_MAX, env)
        finally:
            agent.terminate()
            agent.wait(END_S_MAX)
    return {"speed": [FOLLOWED_BYTES / 1e6 / found["took_s"]]}


def _socket_in(folder: Path, agent: subprocess.Popen[bytes]) -> str:

    deadline = time.monotonic() + END_S_MAX
    while time.monotonic() < deadline and agent.poll() is None:
        found = [*folder.glob("*.sock")]
        if found:
            return str(found[0])
        time.sleep(POLL_S)
    raise BenchmarkError("cannot connect to the agent")
