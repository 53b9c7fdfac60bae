"""The true history of a simulated job, independent of what its coordinator knows; checkers use it.

A coordinator that dies loses its state; the ledger keeps the decisions of all coordinators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from holdfast.core.rounds import JobPhase

if TYPE_CHECKING:
    from holdfast.core.job_settings import JobSettings
    from holdfast.core.protocol import NodeInfo, Status
    from holdfast.core.rounds import Job
    from simulator.agent import Agent


class Decider(Protocol):
    """A coordinator process, or an uninterrupted stored state of a job, which decides for the job."""

    number: int
    """A unique number."""


class Life:
    """A decider that is not a process: a job's stored state, until it is lost."""

    def __init__(self, what: str, number: int) -> None:
        self.what, self.number = what, number

    def __repr__(self) -> str:
        return f"{self.what} (life {self.number})"


class JobTruth:
    """A job under all of its coordinators."""

    def __init__(
        self,
        run_id: str,
        settings: JobSettings,
        finish_at: float,
        *,
        self_fencing: bool,
        yields: bool,
    ) -> None:
        self.run_id = run_id
        self.settings = settings
        self.self_fencing = self_fencing
        """Whether disconnected nodes stop their workers (`on_lost=stop`)."""
        self.yields = yields
        """Whether nodes yield to agents with the same id (`replace`)."""
        self.finish_at = finish_at
        """When the work of the job is done, so that workers exit."""
        self.over = False
        """Whether the final checks have run."""
        self.agents: list[Agent] = []
        self.closed_by: set[int] = set()
        """The numbers of the coordinators that closed the job."""
        self.failed_generations: set[tuple[int, int]] = set()
        """The incarnations and generations in which a worker failed."""

    @property
    def living(self) -> list[Agent]:
        """The agents that are alive and not leaving."""
        return [agent for agent in self.agents if agent.alive and not agent.left]


class RoundTruth:
    """A round as it was formed. It never changes and is unique."""

    __slots__ = ("formed_by", "members", "number", "world_size")

    def __init__(self, number: int, formed_by: int, members: list[NodeInfo]) -> None:
        self.number = number
        self.formed_by = formed_by
        self.members = [(info.node, info.incarnation) for info in members]
        self.world_size = sum(info.local_world_size for info in members)


class JobSnapshot:
    """The state of a job after a decision."""

    __slots__ = (
        "departed",
        "fence",
        "generation",
        "incarnations",
        "members",
        "nodes",
        "outcome",
        "phase",
        "restarts",
        "revision",
        "round",
        "term",
    )

    def __init__(self, job: Job) -> None:
        self.phase = job.phase
        self.term = job.term
        self.revision = job.revision
        self.round = (job.round_term, job.round)
        self.generation = job.generation
        self.restarts = job.restarts
        self.fence = job.fence
        self.outcome = job.outcome
        self.members = job.members  # This list is replaced, never changed in place.
        self.nodes = len(job.nodes)
        self.incarnations = {node.info.incarnation for node in job.nodes.values()}
        self.departed = set(job.departed)

    def is_unchanged(self, job: Job) -> bool:
        """Return whether the job has not visibly changed since."""
        return (
            self.revision == job.revision
            and self.nodes == len(job.nodes)
            and self.departed == job.departed.keys()
            and self.generation == job.generation
            and self.restarts == job.restarts
            and self.phase is job.phase
        )


class Decision:
    """One change of a job: the state before and after, and the status that caused it."""

    __slots__ = ("adopted", "after", "before", "coordinator", "job", "status", "truth")

    def __init__(
        self, coordinator: Decider, job: Job, status: Status | None, before: JobSnapshot | None
    ) -> None:
        self.coordinator = coordinator
        self.job = job
        self.status = status
        """The node's status that caused the change; None if time did."""
        self.before = before
        self.after = JobSnapshot(job)
        self.truth: RoundTruth | None = None
        """The active round."""
        self.adopted = False
        """Whether this decision resumed an earlier coordinator's round."""


class Ledger:
    """The history of all rounds."""

    def __init__(self) -> None:
        self.agent_of: dict[int, Agent] = {}
        """Agents by incarnation."""
        self.rounds: dict[tuple[int, str, int, int], RoundTruth] = {}
        self._seen: dict[tuple[int, str], JobSnapshot] = {}

    def decide(self, coordinator: Decider, job: Job, status: Status | None) -> Decision | None:
        """Record the decision, if the job has changed."""
        key = (coordinator.number, job.run_id)
        before = self._seen.get(key)
        if before is not None and before.is_unchanged(job):
            return None
        decision = Decision(coordinator, job, status, before)
        self._seen[key] = decision.after
        if job.phase is JobPhase.ACTIVE:
            self._write_round(decision)
        return decision

    def round_of(
        self, coordinator: Decider, run_id: str, round_term: int, number: int
    ) -> RoundTruth | None:
        """Return the round to which a coordinator refers by these numbers."""
        return self.rounds.get((coordinator.number, run_id, round_term, number))

    def _write_round(self, decision: Decision) -> None:
        job, coordinator = decision.job, decision.coordinator
        key = (coordinator.number, job.run_id, job.round_term, job.round)
        truth = self.rounds.get(key)
        before = decision.before
        recovered = before is None or before.round[0] == 0  # It had not formed a round yet.
        if truth is None and recovered and job.round_term != job.term:
            decision.adopted = True
            truth = self.agent_of[job.members[0].incarnation].round
        if truth is None:
            truth = RoundTruth(len(self.rounds), coordinator.number, job.members)
        self.rounds[key] = decision.truth = truth
