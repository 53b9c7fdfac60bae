"""What must be known of a job for longer than one coordinator lasts, and the job made of it again.

Generation, term, restarts and fence of a run id never go back. A standing coordinator knows them,
and so do the nodes, which report what they heard of (`Status`). Where neither is left, only a
record is: a coordinator that was given a file stores one `JobMemory` for each job before it tells
any node of what is new in it.
"""

from __future__ import annotations

import msgspec

from holdfast.core.protocol import (  # noqa: TC001 (msgspec reads the annotations)
    Failure,
    JobOutcome,
    NodeInfo,
)
from holdfast.core.rounds import Job, JobPhase


class JobMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a job."""

    run_id: str
    term: int
    round: int
    generation: int
    restarts: int
    fence: int
    members: tuple[NodeInfo, ...] = ()
    """Of the newest round, by rank."""
    awaited: int = 0
    """So many of them run, besides the one whose agent coordinates."""
    outcome: JobOutcome | None = None
    why: str = ""
    failure: Failure | None = None


def remember(job: Job, host: str = "") -> JobMemory:
    """Return what must outlast a coordinator in the agent of the node `host`, if in any."""
    runs = job.phase in (JobPhase.ACTIVE, JobPhase.RECOVERING)
    return JobMemory(
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


def recall(memory: JobMemory, *, patience_s: float) -> Job:
    """Return the job to go on with, in a higher term.

    Members of its round are waited for as long as any is missing, up to `patience_s`.
    """
    job = Job(
        run_id=memory.run_id,
        term=memory.term + 1,
        round=memory.round,
        generation=memory.generation,
        restarts=memory.restarts,
        fence=memory.fence,
        members=list(memory.members),
    )
    if memory.outcome is not None:
        job.phase, job.outcome, job.final = JobPhase.CLOSED, memory.outcome, True
        job.why, job.failure = memory.why, memory.failure
    elif memory.awaited and patience_s:
        job.phase, job.waiting, job.wait_seq = JobPhase.RECOVERING, True, 1
        job.awaited, job.patience_s = memory.awaited, patience_s
        job.why = f"waiting up to {patience_s:g} s for the nodes of round {memory.round}"
    return job
