"""What a checker is: one invariant, told of everything that could break it.

A checker overrides the hooks it needs and looks only at what they hand to it, so that a step costs
the same however long the run is. It keeps its own books; it never asks the machines under test
whether they are right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from holdfast.core.news import View
    from holdfast.core.supervision import StopWorkers
    from holdfast.testing.sim.agent import Agent
    from holdfast.testing.sim.ledger import Decision, JobTruth, Teller
    from holdfast.testing.sim.world import World

HOOKS = (
    "decided",
    "made",
    "told",
    "starts",
    "stops",
    "worker_failed",
    "ends",
    "coordinator_back",
    "settled",
    "over",
)


class Violation(Exception):
    """An invariant does not hold; what, when and where, in one line."""

    def __init__(self, invariant: str, what: str, at_s: float) -> None:
        super().__init__(f"{invariant}: {what} (at {at_s:.3f} s)")
        self.invariant = invariant
        self.what = what
        self.at_s = at_s


class Checker:
    """One invariant; the hooks do nothing unless overridden."""

    def __init__(self, world: World) -> None:
        self.world = world

    def violated(self, what: str) -> NoReturn:
        """Say that the invariant does not hold."""
        raise Violation(type(self).__name__, what, self.world.now)

    def decided(self, decision: Decision) -> None:
        """A coordinator changed the state of a job."""

    def made(self, coordinator: Teller, view: View) -> None:
        """A coordinator sends a view."""

    def told(self, agent: Agent, view: View) -> None:
        """A node accepted a view; `agent.told` still has the one before."""

    def starts(self, agent: Agent, generation: int) -> None:
        """A node is about to start its workers."""

    def stops(self, agent: Agent, effect: StopWorkers) -> None:
        """A node is about to stop its workers."""

    def worker_failed(self, agent: Agent, generation: int) -> None:
        """A worker failed, and its agent is about to be told."""

    def ends(self, agent: Agent) -> None:
        """An agent ended of its own accord; `agent.outcome` says how."""

    def coordinator_back(self) -> None:
        """Another coordinator came up on the endpoint."""

    def settled(self, job: JobTruth) -> None:
        """Faults are over for so long that all must run again."""

    def over(self, job: JobTruth) -> None:
        """The work was done for so long that all must have ended."""
