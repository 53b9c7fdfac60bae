"""The state of a coordinator's jobs, as a client may ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.protocol import WHY_CHARS_MAX
from holdfast.printable import one_line
from holdfast.wire.errors import FrameTooLarge
from holdfast.wire.frames import encode_frame
from holdfast.wire.limits import STATUS_FRAME_BYTES_MAX
from holdfast.wire.messages import JobSummary, NodeSummary, StatusReply

if TYPE_CHECKING:
    from holdfast.core.coordinator import CoordinatorMachine
    from holdfast.core.rounds import Rounds


def reply_frame(
    machine: CoordinatorMachine, request_id: int, run_id: str, *, brief: bool = False
) -> bytes:
    """Return the frame of a reply about one job, or with an empty run id about all.

    It is brief for those who may not know more, and where it would be too large.
    """
    chosen = [rounds for one, rounds in machine.jobs.items() if run_id in ("", one)]
    if not brief:
        try:
            reply = StatusReply(id=request_id, jobs=[summary_of(rounds) for rounds in chosen])
            return encode_frame(reply, STATUS_FRAME_BYTES_MAX)
        except FrameTooLarge:
            pass
    jobs = [summary_of(rounds, brief=True) for rounds in chosen]
    return encode_frame(StatusReply(id=request_id, jobs=jobs), STATUS_FRAME_BYTES_MAX)


def summary_of(rounds: Rounds, *, brief: bool = False) -> JobSummary:
    """Return the state of a job; if `brief`, numbers alone: no node, no line of its history."""
    job = rounds.job
    return JobSummary(
        run_id=job.run_id,
        phase=job.phase.value,
        term=job.term,
        round=job.round,
        generation=job.generation,
        restarts=job.restarts,
        max_restarts=job.settings.max_restarts if job.settings else 0,
        present=len(job.nodes),
        nodes=[] if brief else _nodes_of(rounds),
        history=[] if brief else [one_line(line, WHY_CHARS_MAX) for line in rounds.history],
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
