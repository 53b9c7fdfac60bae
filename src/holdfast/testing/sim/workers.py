"""The simulated workers of one agent: they take their time to start, run, fail and stop.

They run until their job's work is done (`JobTruth.finish_at`), all at about the same time, as the
workers of a real job do. Why one fails is `sim.chaos`'s matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.news import Failure
from holdfast.core.supervision import (
    WorkerExited,
    WorkersStarted,
    WorkersStopped,
    WorkersUnhealthy,
)

if TYPE_CHECKING:
    from random import Random

    from holdfast.testing.sim.agent import Agent

START_S = (0.05, 0.5)
SLOW_START_S = (1.0, 4.0)
STOP_S = (0.01, 0.3)
SLOW_STOP_S = (1.0, 5.0)
SLOW_SHARE = 0.1
LAST_STEP_S = (0.0, 0.8)


class Workers:
    """The workers of at most one generation."""

    def __init__(self, agent: Agent, count: int, rng: Random) -> None:
        self.there = False
        """Whether any process of a generation is there, starting and stopping ones included."""
        self.running: list[int] = []
        self.generation = -1
        self.done_generation = -1
        """The last generation that was done with success on this node."""
        self._agent = agent
        self._count = count
        self._rng = rng
        self._stopping = False

    def start(self, generation: int) -> None:
        """Start them all."""
        self.there = True
        self._stopping = False
        self.generation = generation
        self.running = []
        self._agent.after(self._takes(START_S, SLOW_START_S), self._started, generation)

    def _started(self, generation: int) -> None:
        if generation != self.generation:
            return
        self.running = list(range(self._count))
        agent = self._agent
        agent.happens(WorkersStarted(generation))
        if self._stopping or not agent.alive:
            return
        left_s = max(0.0, agent.job.finish_at - agent.world.now)
        for local_rank in range(self._count):
            low, high = LAST_STEP_S
            takes = left_s + low + (high - low) * self._rng.random()
            agent.after(takes, self._succeeded, (generation, local_rank))

    def _succeeded(self, which: tuple[int, int]) -> None:
        generation, local_rank = which
        if generation != self.generation or local_rank not in self.running:
            return
        self.running.remove(local_rank)
        if not self.running and not self._stopping:
            self.done_generation = generation
            self._agent.world.note(self._agent, f"workers of generation {generation} are done")
        self._agent.happens(WorkerExited(generation, local_rank, failed=False))

    def fail(self, which: tuple[int, bool, bool]) -> None:
        """Let one worker of a generation fail, or all of them hang."""
        generation, mendable, hangs = which
        if generation != self.generation or not self.running or self._stopping:
            return
        agent = self._agent
        local_rank = self.running[0]
        what = "hang" if hangs else "fail"
        agent.world.note(agent, f"workers {what} (mendable: {mendable})")
        agent.failure = Failure(
            node=agent.node,
            host=agent.host,
            rank=local_rank,
            exitcode=1,
            summary=f"a worker of {agent.node} failed",
            sudden=self._rng.random() < 0.3,
            mendable=mendable,
        )
        agent.world.worker_failed(agent, generation)
        if hangs:
            agent.happens(WorkersUnhealthy(generation, "no progress", mendable=mendable))
            return
        self.running.remove(local_rank)
        agent.happens(WorkerExited(generation, local_rank, failed=True, mendable=mendable))

    def stop(self, generation: int) -> None:
        """Bring them down, which takes a while."""
        self._stopping = True
        takes = self._takes(STOP_S, SLOW_STOP_S) if self.running else STOP_S[0]
        self._agent.after(takes, self._stopped, generation)

    def kill(self, generation: int) -> None:
        """Bring them down at once."""
        self._agent.after(STOP_S[0], self._stopped, generation)

    def _stopped(self, generation: int) -> None:
        if generation != self.generation or not self.there:
            return  # They were killed before their time was over.
        self.there = False
        self.running = []
        self._agent.happens(WorkersStopped(generation, 0))

    def vanish(self) -> None:
        """Be gone, as after the agent's own end."""
        self.there = False
        self.running = []
        self.generation = -2

    def _takes(self, usual: tuple[float, float], slow: tuple[float, float]) -> float:
        low, high = slow if self._rng.random() < SLOW_SHARE else usual
        return low + (high - low) * self._rng.random()
