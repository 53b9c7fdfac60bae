"""The invariants of a job and its nodes: workers, budget, fencing, and how it is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.job import JobPhase
from holdfast.core.news import Ending, Phase, Role
from holdfast.testing.sim.checking import Checker

if TYPE_CHECKING:
    from holdfast.core.news import View
    from holdfast.testing.sim.agent import Agent
    from holdfast.testing.sim.ledger import Decision, Teller
    from holdfast.testing.sim.world import World

STOPPED_AFTER_CLOSE_S = 12.0  # The slowest stop, after the slowest start.


class OneGenerationPerNode(Checker):
    """No worker runs on a node that has started a later generation, and none starts again."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._started: dict[Agent, int] = {}

    def starts(self, agent: Agent, generation: int) -> None:
        """See that everything earlier is gone."""
        if agent.workers.there:
            self.violated(
                f"{agent.node} starts generation {generation} while workers of "
                f"{agent.workers.generation} are there"
            )
        if self._started.get(agent, -1) >= generation:
            self.violated(f"{agent.node} starts generation {generation} again")
        self._started[agent] = generation


class BudgetKept(Checker):
    """A job has no more restarts than it may; each is charged, and nothing else is."""

    def decided(self, decision: Decision) -> None:
        """See whether what was charged is what a failure costs."""
        before, after, status = decision.before, decision.after, decision.status
        limit = self.world.job_of(decision.job.run_id).settings.max_restarts
        if after.restarts > limit:
            self.violated(f"{after.restarts} restarts, and {limit} are allowed")
        if before is None or decision.adopted or before.phase is JobPhase.RECOVERING:
            return
        if after.nodes == 0 or before.nodes == 0:
            return  # A job that all have left begins anew.
        charged = after.restarts - before.restarts
        if status is not None and before.round[0] == 0:
            # It learns of what an earlier coordinator charged, and maybe of one failure since.
            failed_since = status.phase is Phase.FAILED and after.phase is not JobPhase.CLOSED
            if status.restarts + failed_since >= after.restarts:
                return
        failed = (
            status is not None
            and status.phase is Phase.FAILED
            and before.phase is JobPhase.ACTIVE
            and status.generation == before.generation
            and any(info.incarnation == status.info.incarnation for info in before.members)
        )
        if failed and after.phase is JobPhase.CLOSED:
            failed = False  # It was not answered with a restart.
        wanted = 1 if failed else 0  # Also where the next round still has to wait for nodes.
        if charged != wanted:
            self.violated(f"{charged} restarts were charged for {decision.job.why!r}, not {wanted}")


class ClosedIsFinal(Checker):
    """A job is closed for a reason that is true, and stays closed for as long as it is known."""

    def decided(self, decision: Decision) -> None:
        """Look at how a job came to be closed, or that it still is."""
        before, after = decision.before, decision.after
        if before is not None and before.phase is JobPhase.CLOSED:
            if after.phase is not JobPhase.CLOSED or after.outcome is not before.outcome:
                self.violated(f"{decision.job.run_id} was closed and is {after.phase.value} again")
            if after.generation != before.generation:
                self.violated(f"{decision.job.run_id} was closed and has a new generation")
        elif after.phase is JobPhase.CLOSED:
            self.world.job_of(decision.job.run_id).closed_by.add(decision.coordinator.number)
            self._closing(decision)

    def _closing(self, decision: Decision) -> None:
        job, truth = decision.job, self.world.job_of(decision.job.run_id)
        if job.outcome is Ending.SUCCEEDED:
            for info in job.members:
                agent = self.world.ledger.agent_of[info.incarnation]
                if agent.workers.done_generation != job.generation:
                    self.violated(f"{job.run_id} succeeded, but {info.node} was not done")
        elif job.outcome is Ending.FAILED:
            if not any(generation == job.generation for _, generation in truth.failed_generations):
                self.violated(f"{job.run_id} failed, but no worker did")
            mendable = job.failure is None or job.failure.mendable
            if mendable and job.restarts < truth.settings.max_restarts:
                self.violated(f"{job.run_id} failed with restarts left")
        else:
            self.violated(f"{job.run_id} was closed and nobody asked for it")

    def made(self, coordinator: Teller, view: View) -> None:
        """See that nobody is told to run in a closed job."""
        closed_by = self.world.job_of(view.run_id).closed_by
        if view.role is Role.MEMBER and coordinator.number in closed_by:
            self.violated(f"{view.node} is told to run in {view.run_id}, which is closed")

    def told(self, agent: Agent, view: View) -> None:
        """See to it that a node which was told of the end has no workers soon after."""
        if view.role is Role.CLOSED and (agent.told is None or agent.told.role is not Role.CLOSED):
            agent.after(STOPPED_AFTER_CLOSE_S, self._stopped_by_now, agent)

    def _stopped_by_now(self, agent: Agent) -> None:
        if agent.workers.there:
            self.violated(f"{agent.node} has workers long after it was told that all is over")


class FencedStaysOut(Checker):
    """An incarnation that the job went on without never comes back and never runs workers."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._out: dict[int, set[int]] = {}
        self._fenced: dict[int, int] = {}  # Incarnations, and the coordinator that said so.

    def decided(self, decision: Decision) -> None:
        """Take note of who is out, and see that nobody of them is in."""
        before, after = decision.before, decision.after
        out = self._out.setdefault(decision.coordinator.number, set())
        if before is not None:
            out |= before.incarnations - after.incarnations
        back = out & after.incarnations
        if back:
            nodes = sorted(self.world.ledger.agent_of[one].node for one in back)
            self.violated(f"{', '.join(nodes)} is in the job again after it was out")

    def told(self, agent: Agent, view: View) -> None:
        """Take note of who knows that it is out; another coordinator knows nothing of it."""
        by = agent.teller(view).number
        if view.role in (Role.FENCED, Role.REFUSED):
            self._fenced[view.incarnation] = by
        elif self._fenced.get(view.incarnation, by) != by:
            del self._fenced[view.incarnation]

    def starts(self, agent: Agent, generation: int) -> None:
        """See that an incarnation that is out starts nothing."""
        if agent.info.incarnation in self._fenced:
            self.violated(f"{agent.node} was fenced and starts generation {generation}")
