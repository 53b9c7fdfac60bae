"""What is true of a simulated job, whatever its coordinator believes: what checkers compare with.

A coordinator that dies takes its knowledge with it; the ledger keeps what each of them decided.
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
    """Whoever decides for a job, over one life."""

    number: int
    """No other life has it."""


class Life:
    """A decider that is no process: one line of a job's stored state, until that is lost."""

    def __init__(self, what: str, number: int) -> None:
        self.what, self.number = what, number

    def __repr__(self) -> str:
        return f"{self.what} (life {self.number})"


class JobTruth:
    """A job over the lives of all its coordinators."""

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
        """Whether nodes that are cut off stop their workers (`on_lost=stop`)."""
        self.yields = yields
        """Whether nodes give way to agents of the same name (`replace`)."""
        self.finish_at = finish_at
        """From when on workers have nothing left to do."""
        self.over = False
        """Whether the last look at it was taken."""
        self.agents: list[Agent] = []
        self.closed_by: set[int] = set()
        """The numbers of the coordinators that closed it."""
        self.failed_generations: set[tuple[int, int]] = set()
        """Where a worker truly failed: incarnation and generation."""

    @property
    def living(self) -> list[Agent]:
        """The agents that are there and mean to stay."""
        return [agent for agent in self.agents if agent.alive and not agent.left]


class RoundTruth:
    """A round as it was formed: it never changes, and no two are equal."""

    __slots__ = ("formed_by", "members", "number", "world_size")

    def __init__(self, number: int, formed_by: int, members: list[NodeInfo]) -> None:
        self.number = number
        self.formed_by = formed_by
        self.members = [(info.node, info.incarnation) for info in members]
        self.world_size = sum(info.local_world_size for info in members)


class JobSnapshot:
    """A job as it stood after a decision."""

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
        self.members = job.members  # Replaced as a whole, never changed in place.
        self.nodes = len(job.nodes)
        self.incarnations = {node.info.incarnation for node in job.nodes.values()}
        self.departed = set(job.departed)

    def still(self, job: Job) -> bool:
        """Return whether nothing has changed since, as far as it can be seen from outside."""
        return (
            self.revision == job.revision
            and self.nodes == len(job.nodes)
            and self.departed == job.departed.keys()
            and self.generation == job.generation
            and self.restarts == job.restarts
            and self.phase is job.phase
        )


class Decision:
    """One change of a job: what it was and is, and which status brought it about."""

    __slots__ = ("adopted", "after", "before", "coordinator", "job", "status", "truth")

    def __init__(
        self, coordinator: Decider, job: Job, status: Status | None, before: JobSnapshot | None
    ) -> None:
        self.coordinator = coordinator
        self.job = job
        self.status = status
        """What a node reported, or None where time brought it about."""
        self.before = before
        self.after = JobSnapshot(job)
        self.truth: RoundTruth | None = None
        """The active round."""
        self.adopted = False
        """Whether an earlier coordinator's round was carried on just now."""


class Ledger:
    """All rounds that ever were."""

    def __init__(self) -> None:
        self.agent_of: dict[int, Agent] = {}
        """By incarnation."""
        self.rounds: dict[tuple[int, str, int, int], RoundTruth] = {}
        self._seen: dict[tuple[int, str], JobSnapshot] = {}

    def decide(self, coordinator: Decider, job: Job, status: Status | None) -> Decision | None:
        """Write a decision down, if it was one."""
        key = (coordinator.number, job.run_id)
        before = self._seen.get(key)
        if before is not None and before.still(job):
            return None
        decision = Decision(coordinator, job, status, before)
        self._seen[key] = decision.after
        if job.phase is JobPhase.ACTIVE:
            self._write_round(decision)
        return decision

    def round_of(
        self, coordinator: Decider, run_id: str, round_term: int, number: int
    ) -> RoundTruth | None:
        """Return the round that a coordinator means by these numbers."""
        return self.rounds.get((coordinator.number, run_id, round_term, number))

    def _write_round(self, decision: Decision) -> None:
        job, coordinator = decision.job, decision.coordinator
        key = (coordinator.number, job.run_id, job.round_term, job.round)
        truth = self.rounds.get(key)
        before = decision.before
        recovered = before is None or before.round[0] == 0  # It had none of its own yet.
        if truth is None and recovered and job.round_term != job.term:
            decision.adopted = True
            truth = self.agent_of[job.members[0].incarnation].round
        if truth is None:
            truth = RoundTruth(len(self.rounds), coordinator.number, job.members)
        self.rounds[key] = decision.truth = truth
