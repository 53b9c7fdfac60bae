"""Rows about joining: a job of `2:3` forms, and a third node joins it.

Each row has two variants: one with the default settings, and one with settings that make torchrun fast.
These are a last call of 1 s, and a workaround for torchrun's defect that a joining node ends the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures import NEVER
from benchmarks.nodes import Nodes, NotReached

if TYPE_CHECKING:
    from benchmarks.launching import Lab, Samples

WORKERS = 2
NS_PER_S = 1e9
# torchrun's default last call takes 30 s.
START_S_MAX = 90.0
# torchrun ends the job 60 s after the third agent started.
JOIN_S_MAX = 75.0
QUICK_CONF = {"last_call_timeout": 1}
WORKAROUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def measure_start(lab: Lab, launcher: str) -> Samples:
    """Start two agents of `2:3` with the default settings, and wait for the last worker's first line."""
    with Nodes(lab, launcher, "2:3", workers=WORKERS) as job:
        return {"start": [_start_s(job)]}


def measure_start_quick(lab: Lab, launcher: str) -> Samples:
    """The same with a last call of 1 s."""
    with Nodes(lab, launcher, "2:3", workers=WORKERS, conf=QUICK_CONF) as job:
        return {"start": [_start_s(job)]}


def measure_join(lab: Lab, launcher: str) -> Samples:
    """Let a third agent join two of `2:3`, with the default settings."""
    with Nodes(lab, launcher, "2:3", workers=WORKERS) as job:
        _start_s(job)
        return {"join": [_join_s(job)]}


def measure_join_quick(lab: Lab, launcher: str) -> Samples:
    """The same with a last call of 1 s, and the workaround for torchrun."""
    with Nodes(
        lab, launcher, "2:3", workers=WORKERS, conf=QUICK_CONF, env=WORKAROUND
    ) as job:  # fmt: skip
        _start_s(job)
        return {"join": [_join_s(job)]}


def _start_s(job: Nodes) -> float:
    agents = job.start(2)
    starts = job.formed(2, within_s=START_S_MAX)
    begun_ns = min(agent.started_ns for agent in agents)
    return (max(start.reached_ns for start in starts) - begun_ns) / NS_PER_S


def _join_s(job: Nodes) -> float:
    third = job.add()
    try:
        starts = job.wait_for(job.agents, since_ns=third.started_ns, within_s=JOIN_S_MAX)
    except NotReached:
        return NEVER
    return (max(start.reached_ns for start in starts) - third.started_ns) / NS_PER_S
