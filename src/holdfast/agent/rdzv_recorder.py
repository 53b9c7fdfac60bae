"""Events of the rendezvous, out of the moments of a run; only for whoever configured a handler."""

from __future__ import annotations

import os
import sys

from holdfast.agent import moments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.events.values import NodeState

DESTINATION = "dynamic_rendezvous"


def is_wanted() -> bool:
    """Whether anybody gets such events; whoever does has imported the module that took it."""
    destinations = sys.modules.get("holdfast.events.destinations")
    return destinations is not None and destinations.is_recorded(DESTINATION)


class RdzvRecorder:
    """An onlooker that records how this node fares among the others."""

    name = "the recorder of the rendezvous"

    def __init__(self) -> None:
        self._run_id = ""

    def __call__(self, moment: moments.Moment) -> None:
        """Record what a moment says of the rendezvous, if anything."""
        from holdfast.events.values import NodeState

        match moment:
            case moments.Began():
                self._run_id = moment.run_id
                self._record("the node joins the job", NodeState.INIT)
            case moments.Met(error=""):
                where = f"rank {moment.group_rank} of {moment.group_world_size}"
                self._record(f"the node has {where}", NodeState.RUNNING, moment.group_rank)
            case moments.Met():
                self._record("the rendezvous failed", NodeState.FAILED, error=moment.error)
            case moments.Ended() if moment.error:
                self._record("the node's part ended", NodeState.FAILED, error=moment.error)
            case moments.Ended():
                failed = moment.state != "succeeded"
                state = NodeState.FAILED if failed else NodeState.SUCCEEDED
                self._record("the node's part ended", state, moment.group_rank)

    def end(self) -> None:
        """Wait, for a limited time, until whoever gets these events has them."""
        from holdfast.events import destinations

        destinations.find(DESTINATION).flush(destinations.FLUSH_S)

    def _record(
        self, message: str, state: NodeState, rank: int | None = None, *, error: str = ""
    ) -> None:
        from holdfast.events.recording import record_rdzv_event
        from holdfast.events.values import RdzvEvent

        record_rdzv_event(
            RdzvEvent(
                name=f"agent:{state.value.lower()}",
                run_id=self._run_id,
                message=message,
                hostname=os.uname().nodename,
                pid=os.getpid(),
                node_state=state,
                rank=rank,
                error_trace=error,
            )
        )
