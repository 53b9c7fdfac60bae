"""Rows about losing a node: killed, stopped, or replaced by a standby.

The lost node is never the one that listens on the endpoint: with torchrun, losing that one ends the
job. The clock stops when the last worker of the remaining nodes runs user code, with the new world
size.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from benchmarks.figures import NEVER
from benchmarks.joining import NS_PER_S, WORKAROUND, WORKERS
from benchmarks.launching import BenchmarkError
from benchmarks.nodes import Nodes, NotReached

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.launching import Lab, Samples
    from benchmarks.nodes import NodeAgent

# Twice the time after which torchrun's rendezvous considers a silent node dead.
LOSS_S_MAX = 30.0
CONNECT_S_MAX = 30.0
POLL_S = 0.02
# By then, a standby that has connected is on the waiting list.
LISTED_S = 2.0


def measure_killed(lab: Lab, launcher: str) -> Samples:
    """SIGKILL one of three agents of `2:3` with all its processes."""
    return {"killed": [_loss_s(lab, launcher, lambda agent: agent.kill())]}


def measure_stopped(lab: Lab, launcher: str) -> Samples:
    """SIGSTOP one of three agents of `2:3`: its connections stay, but it is silent."""
    return {"stopped": [_loss_s(lab, launcher, lambda agent: agent.send(signal.SIGSTOP))]}


def measure_standby(lab: Lab, launcher: str) -> Samples:
    """SIGKILL a member of `2:2` while a third agent is a standby."""
    with Nodes(lab, launcher, "2:2", workers=WORKERS, env=WORKAROUND) as job:
        job.start(2)
        job.formed(2)
        standby = job.add()
        _wait_until_listed(job, standby)
        host = job.host()
        victim = next(agent for agent in job.agents if agent not in (host, standby))
        return {"standby": [_until(job, [host, standby], victim.kill())]}


def _loss_s(lab: Lab, launcher: str, lose: Callable[[NodeAgent], int]) -> float:
    with Nodes(lab, launcher, "2:3", workers=WORKERS) as job:
        job.start(3)
        job.formed(3)
        host = job.host()
        victim = next(agent for agent in job.agents if agent is not host)
        return _until(job, [agent for agent in job.agents if agent is not victim], lose(victim))


def _until(job: Nodes, agents: list[NodeAgent], since_ns: int) -> float:
    try:
        starts = job.wait_for(agents, since_ns=since_ns, within_s=LOSS_S_MAX)
    except NotReached:
        return NEVER
    return (max(start.reached_ns for start in starts) - since_ns) / NS_PER_S


def _wait_until_listed(job: Nodes, agent: NodeAgent) -> None:
    deadline = time.monotonic() + CONNECT_S_MAX
    while not job.has_connected(agent):
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the standby did not connect{job.output_ends()}")
        time.sleep(POLL_S)
    time.sleep(LISTED_S)
