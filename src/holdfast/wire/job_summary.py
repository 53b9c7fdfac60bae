"""The state of jobs as messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.core.limits import WHY_CHARS_MAX
from holdfast.core.rounds import JobPhase, is_drained
from holdfast.printable import one_line, quoted
from holdfast.wire.control import JobSummaries, pack
from holdfast.wire.frames import encode_frame
from holdfast.wire.messages import JobSummary, NodeSummary, Reply, sanitized_report
from holdfast.wire.wire_errors import FrameTooLarge
from holdfast.wire.wire_limits import STATUS_FRAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.coordinator_machine import CoordinatorMachine
    from holdfast.core.rounds import Rounds
    from holdfast.wire.messages import NodeReport

    ReportOf = Callable[[str, str], NodeReport | None]
    """Returns the last report of a node, given run id and node."""


def status_frame(
    machine: CoordinatorMachine,
    query_id: int,
    run_id: str,
    report_of: ReportOf = lambda _run_id, _node: None,
    *,
    brief: bool = False,
) -> bytes:
    """Return the frame of a reply with the state of one job, or of all jobs for an empty run id.

    The state is brief if `brief` is set, or if the frame would be too large.
    """
    chosen = [rounds for one, rounds in machine.jobs.items() if run_id in ("", one)]
    if not brief:
        try:
            return _frame_of(query_id, [summary_of(rounds, report_of) for rounds in chosen])
        except FrameTooLarge:
            pass
    return _frame_of(query_id, [summary_of(rounds, brief=True) for rounds in chosen])


def _frame_of(query_id: int, jobs: list[JobSummary]) -> bytes:
    reply = Reply(id=query_id, body=pack(JobSummaries(jobs=jobs)))
    return encode_frame(reply, STATUS_FRAME_BYTES_MAX)


def summary_of(
    rounds: Rounds,
    report_of: ReportOf = lambda _run_id, _node: None,
    *,
    brief: bool = False,
) -> JobSummary:
    """Return the state of a job; if `brief`, only numbers, without nodes and history."""
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


def printable_summary(job: JobSummary) -> JobSummary:
    """Return a job whose texts are safe to print."""
    replace = msgspec.structs.replace
    nodes = [
        replace(
            node,
            node=quoted(node.node),
            host=quoted(node.host),
            address=quoted(node.address),
            role=quoted(node.role),
            phase=quoted(node.phase),
            report=sanitized_report(node.report) if node.report is not None else None,
        )
        for node in job.nodes
    ]
    return replace(
        job,
        run_id=one_line(job.run_id),
        phase=quoted(job.phase),
        outcome=quoted(job.outcome),
        why=one_line(job.why),
        history=[one_line(line) for line in job.history],
        causes=[one_line(line) for line in job.causes],
        nodes=nodes,
    )
