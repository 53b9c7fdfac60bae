"""The state of a job that must survive its coordinator: `SavedJob`.

Generation, term, restarts and fence of a run id never decrease. A running coordinator knows them, and
nodes report the values that they received (`Status`). If neither coordinator nor nodes are left, only a
saved record remains: a coordinator with a state file stores a `SavedJob` for each job before it sends
any change to a node.
"""

from __future__ import annotations

import msgspec

from holdfast.core.phases import JobOutcome
from holdfast.core.protocol import (  # noqa: TC001 (msgspec reads the annotations)
    Failure,
    NodeInfo,
)
from holdfast.core.rounds import Job, JobPhase


class SavedJob(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a job that survives its coordinator."""

    run_id: str
    term: int
    round: int
    generation: int
    restarts: int
    fence: int
    members: tuple[NodeInfo, ...] = ()
    """The members of the newest round, by rank."""
    awaited: int = 0
    """The number of running members, not counting the node whose agent runs the coordinator."""
    outcome: JobOutcome | None = None
    why: str = ""
    failure: Failure | None = None


def snapshot_job(job: Job, host: str = "") -> SavedJob:
    """Return the state to save. `host` is the node whose agent runs the coordinator, if any."""
    runs = job.phase in (JobPhase.ACTIVE, JobPhase.RECOVERING)
    return SavedJob(
        run_id=job.run_id,
        term=job.term,
        round=job.round,
        generation=job.generation,
        restarts=job.restarts,
        fence=job.fence,
        members=tuple(job.members),
        awaited=sum(info.node != host for info in job.members) if runs else 0,
        outcome=job.outcome,
        why=job.why if job.outcome is not None else "",
        failure=job.failure,
    )


def restore_job(saved: SavedJob, *, patience_s: float) -> Job:
    """Return the job to continue, in a higher term.

    While members of its round are missing, the job waits for them, for up to `patience_s`.
    """
    job = Job(
        run_id=saved.run_id,
        term=saved.term + 1,
        round=saved.round,
        generation=saved.generation,
        restarts=saved.restarts,
        fence=saved.fence,
        members=list(saved.members),
    )
    if saved.outcome is not None:
        job.phase, job.outcome, job.final = JobPhase.CLOSED, saved.outcome, True
        job.why, job.failure = saved.why, saved.failure
    elif saved.awaited and patience_s:
        job.phase, job.waiting, job.wait_seq = JobPhase.RECOVERING, True, 1
        job.awaited, job.patience_s = saved.awaited, patience_s
        job.why = f"waiting up to {patience_s:g} s for the nodes of round {saved.round}"
    return job
