"""The state of a coordinator's jobs, as a client may ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.limits import WHY_CHARS_MAX
from holdfast.core.rounds import JobPhase, is_drained
from holdfast.printable import one_line
from holdfast.wire import control
from holdfast.wire.errors import FrameTooLarge
from holdfast.wire.frames import encode_frame
from holdfast.wire.limits import STATUS_FRAME_BYTES_MAX
from holdfast.wire.messages import JobSummary, NodeSummary, Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.coordinator import CoordinatorMachine
    from holdfast.core.rounds import Rounds
    from holdfast.wire.messages import NodeReport

    ReportOf = Callable[[str, str], NodeReport | None]
    """What a node of a job last reported to those who watch."""


def reply_frame(
    machine: CoordinatorMachine,
    query_id: int,
    run_id: str,
    report_of: ReportOf = lambda _run_id, _node: None,
    *,
    brief: bool = False,
) -> bytes:
    """Return the frame of a reply about one job, or with an empty run id about all.

    It is brief for those who may not know more, and where it would be too large.
    """
    chosen = [rounds for one, rounds in machine.jobs.items() if run_id in ("", one)]
    if not brief:
        try:
            jobs = [summary_of(rounds, report_of) for rounds in chosen]
            return _reply_frame(query_id, jobs)
        except FrameTooLarge:
            pass
    jobs = [summary_of(rounds, brief=True) for rounds in chosen]
    return _reply_frame(query_id, jobs)


def _reply_frame(query_id: int, jobs: list[JobSummary]) -> bytes:
    body = control.pack(control.JobSummaries(jobs=jobs))
    return encode_frame(Reply(id=query_id, body=body), STATUS_FRAME_BYTES_MAX)


def summary_of(
    rounds: Rounds,
    report_of: ReportOf = lambda _run_id, _node: None,
    *,
    brief: bool = False,
) -> JobSummary:
    """Return the state of a job; if `brief`, numbers alone: no node, no line of its history."""
    job = rounds.job
    settings = job.settings
    return JobSummary(
        run_id=job.run_id,
        phase=job.phase.value,
        term=job.term,
        round=job.round,
        generation=job.generation,
        restarts=job.restarts,
        max_restarts=settings.max_restarts if settings else 0,
        present=len(job.nodes),
        nodes=[] if brief else _nodes_of(rounds, report_of),
        history=[] if brief else [one_line(line, WHY_CHARS_MAX) for line in rounds.history],
        causes=[] if brief else [one_line(line, WHY_CHARS_MAX) for line in rounds.causes],
        min_nodes=settings.min_nodes if settings else 0,
        max_nodes=settings.max_nodes if settings else 0,
        members=len(job.members),
        outcome=job.outcome.value if job.outcome is not None else "",
        why="" if brief else job.why,
    )


def _nodes_of(rounds: Rounds, report_of: ReportOf) -> list[NodeSummary]:
    job, table = rounds.job, rounds.rank_table
    is_active = job.phase is JobPhase.ACTIVE
    summaries = []
    for name, node in job.nodes.items():
        info = node.info
        rank = -1
        if is_active and table.incarnation_of(name) == info.incarnation:
            rank = table.rank_of[name]
        summaries.append(
            NodeSummary(
                node=name,
                host=info.host,
                address=info.address,
                role=info.role,
                phase=node.phase.value,
                rank=rank,
                generation=node.generation,
                first_rank=table.ranks[rank].first_rank if rank >= 0 else -1,
                size=info.local_world_size,
                drained=is_drained(job, name),
                report=report_of(job.run_id, name),
            )
        )
    return summaries
