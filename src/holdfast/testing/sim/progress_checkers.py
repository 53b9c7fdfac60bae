"""The invariants of progress: what must come about, and what must not be lost on the way.

Each has a bound in virtual seconds, counted from when faults are over or the work is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.book import RECOVER_S_MAX
from holdfast.core.job import JobPhase
from holdfast.core.news import Role
from holdfast.core.supervision import Outcome, Reason, State
from holdfast.testing.sim.checking import Checker

if TYPE_CHECKING:
    from holdfast.core.news import View
    from holdfast.core.supervision import StopWorkers
    from holdfast.testing.sim.agent import Agent
    from holdfast.testing.sim.ledger import JobTruth
    from holdfast.testing.sim.world import World

CALM_BEFORE_S = 15.0  # What is still going on from an earlier disturbance is over by then.


class NoNeedlessRestart(Checker):
    """A coordinator that comes back, and all nodes with it in time, restarts no worker."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._watch_until = 0.0
        self._calm_since = 0.0

    def coordinator_back(self) -> None:
        """Watch what comes of it, if nothing else was going on."""
        world = self.world
        calm = world.coordinator_gone_at - world.disturbed_at > CALM_BEFORE_S
        if calm and not world.network.weather.rough and not self._misses_a_member():
            self._watch_until = world.now + RECOVER_S_MAX + 2.0
            self._calm_since = world.disturbed_at

    def stops(self, agent: Agent, effect: StopWorkers) -> None:
        """See whether anything but the coordinator's return can be the reason."""
        world = self.world
        if effect.reason is not Reason.TOLD or world.now >= self._watch_until:
            return
        closed = agent.told is not None and agent.told.role is Role.CLOSED
        if world.disturbed_at == self._calm_since and not closed:
            self.violated(f"{agent.node} restarts its workers because the coordinator did")

    def _misses_a_member(self) -> bool:
        """Whether a member died of which nobody knows: an etcd that restarts renews all leases."""
        for job in self.world.jobs.values():
            known = self.world.coordinator.job(job.run_id)
            living = {agent.node for agent in job.living}
            if known is not None and any(info.node not in living for info in known.members):
                return True
        return False


class RoundForms(Checker):
    """With faults over and at least min healthy nodes, all of them run soon.

    Those that may run do: spares are used where nodes are missing.
    """

    def settled(self, job: JobTruth) -> None:
        """Compare who runs with who could."""
        known = self.world.coordinator.job(job.run_id)
        living = job.living
        settings = job.settings
        if len(living) < settings.min_nodes or job.closed_by:
            return
        if known is None or known.phase is not JobPhase.ACTIVE:
            phase = "unknown" if known is None else known.phase.value
            self.violated(f"{job.run_id} is {phase} though {len(living)} nodes are there")
        names = {agent.node for agent in living}
        members = [info.node for info in known.members]
        missing = [node for node in members if node not in names]
        if missing:
            self.violated(f"{missing} are in the round of {job.run_id} and gone")
        wanted = min(settings.max_nodes, max(settings.min_nodes, len(names) - settings.spares))
        if len(members) < wanted:
            self.violated(f"{len(members)} nodes of {len(names)} run, {wanted} could")
        generation = known.generation
        for agent in living:
            if agent.node in members:
                running = agent.teamwork.state in (State.RUNNING, State.LEAVING)
                if not running or agent.teamwork.generation != generation:
                    self.violated(
                        f"{agent.node} is {agent.teamwork.state.value} in generation "
                        f"{agent.teamwork.generation}, not running in {generation}"
                    )


class JobEnds(Checker):
    """When the work is done, every node ends, and all that ended with the job ended alike."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._ended: dict[tuple[str, int], tuple[Outcome, str]] = {}
        self._closed_to: dict[Agent, int] = {}

    def told(self, agent: Agent, view: View) -> None:
        """Take note whose word it is that the job is over."""
        if view.role is Role.CLOSED:
            self._closed_to[agent] = agent.teller(view).number

    def ends(self, agent: Agent) -> None:
        """Compare with how other nodes of the job ended."""
        by = self._closed_to.get(agent)
        outcome = agent.outcome
        if by is None or outcome not in (Outcome.SUCCEEDED, Outcome.FAILED):
            return
        first, node = self._ended.setdefault((agent.job.run_id, by), (outcome, agent.node))
        if first is not outcome:
            self.violated(f"{agent.node} ended {outcome.value}, but {node} {first.value}")

    def over(self, job: JobTruth) -> None:
        """See that all have ended, but for those who can no longer learn of it.

        A coordinator that closed a job and died takes the news with it; nodes that had not heard
        of it wait for others (in production, until `join_timeout`).
        """
        if job.closed_by and not self.world.coordinator.knows_end_of(job):
            return
        left = [agent.node for agent in job.agents if agent.alive]
        if left:
            self.violated(f"{left} of {job.run_id} have not ended")
        for agent in job.agents:
            if agent.outcome is Outcome.REFUSED and not job.closed_by and not agent.superseded:
                self.violated(f"{agent.node} was refused")
