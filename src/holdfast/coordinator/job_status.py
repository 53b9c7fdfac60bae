"""What a coordinator answers when somebody asks how its jobs are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.protocol import WHY_CHARS_MAX
from holdfast.wire.errors import FrameTooLarge
from holdfast.wire.frames import encode_frame
from holdfast.wire.limits import STATUS_FRAME_BYTES_MAX, clip
from holdfast.wire.messages import JobSummary, NodeSummary, StatusReply, StatusRequest

if TYPE_CHECKING:
    from holdfast.core.coordinator import CoordinatorMachine
    from holdfast.core.rounds import Rounds


def answer_frame(hosting: CoordinatorMachine, query: StatusRequest) -> bytes:
    """Return the answer to a query as it is sent; without the nodes if it would be too large."""
    chosen = [rounds for run_id, rounds in hosting.jobs.items() if query.run_id in ("", run_id)]
    try:
        answer = StatusReply(id=query.id, jobs=[summary_of(rounds) for rounds in chosen])
        return encode_frame(answer, STATUS_FRAME_BYTES_MAX)
    except FrameTooLarge:
        jobs = [summary_of(rounds, brief=True) for rounds in chosen]
        return encode_frame(StatusReply(id=query.id, jobs=jobs), STATUS_FRAME_BYTES_MAX)


def summary_of(rounds: Rounds, *, brief: bool = False) -> JobSummary:
    """Return a job as a person wants to see it; `brief` leaves out its nodes and its history."""
    job = rounds.job
    return JobSummary(
        run_id=job.run_id,
        phase=job.phase.value,
        term=job.term,
        round=job.round,
        generation=job.generation,
        restarts=job.restarts,
        max_restarts=job.settings.max_restarts if job.settings else 0,
        nodes=[] if brief else _nodes_of(rounds),
        history=[] if brief else [clip(line, WHY_CHARS_MAX) for line in rounds.history],
    )


def _nodes_of(rounds: Rounds) -> list[NodeSummary]:
    return [
        NodeSummary(
            node=name,
            host=node.info.host,
            address=node.info.address,
            role=node.info.role,
            phase=node.phase.value,
            rank=(
                rounds.rank_table.rank_of[name]
                if rounds.rank_table.incarnation_of(name) == node.info.incarnation
                else -1
            ),
            generation=node.generation,
        )
        for name, node in rounds.job.nodes.items()
    ]
