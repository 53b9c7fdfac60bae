"""The end of a job whose state makes no sense any more: it is closed as failed, in words.

That can only be a fault in Holdfast. Its nodes must hear of it all the same, and whoever else is
served by the same process must not.
"""

from __future__ import annotations

from holdfast.core.job import CloseJob, Job, JobPhase
from holdfast.core.news import Ending

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.news import View
    from holdfast.core.rounds import Rounds


def close_broken(
    rounds: Rounds, what: str, make: Callable[[Job], Rounds]
) -> tuple[list[View], Rounds]:
    """Close a job that broke an invariant; return what its nodes are told, and the job as it is."""
    why = f"the coordinator cannot go on with this job; this is a bug in Holdfast ({what})"
    try:
        return rounds.handle(CloseJob(Ending.FAILED, why)), rounds
    except Exception:  # noqa: BLE001 (whatever it is, nodes must be told of the end)
        # They are told when they ask: none is known any more, so each says its status again.
        job = rounds.job
        return [], make(
            Job(
                run_id=job.run_id,
                settings=job.settings,
                phase=JobPhase.CLOSED,
                term=job.term + 1,
                round=job.round,
                generation=job.generation,
                restarts=job.restarts,
                outcome=Ending.FAILED,
                why=why,
                final=True,
            )
        )
