"""`record`: give an event to whoever gets the events of a destination.

The one thing to know: recording never hurts. What a handler does with an event, or that it does
nothing for long, is no business of the code that recorded it. Only a destination that does not
exist is an error.
"""

from __future__ import annotations

import os
import sys
import time

from holdfast.events import destinations
from holdfast.events.values import NodeState, RdzvEvent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from holdfast.events.values import Event

RENDEZVOUS = "dynamic_rendezvous"
"""The destination of events of the rendezvous; it has no handler unless one is configured."""


def record(event: Event, destination: str = destinations.DEFAULT) -> None:
    """Record an event. Raises `UsageError` if there is no such destination, and nothing else."""
    destinations.find(destination).record(stamped(event))


def stamped(event: Any) -> Any:
    """Return the event as it is now, with the time in it: it may wait, and the caller goes on."""
    other = object.__new__(type(event))
    other.__dict__.update(event.__dict__)
    if isinstance(event.metadata, dict):
        other.metadata = {**event.metadata}
    if not event.timestamp:
        other.timestamp = time.time_ns() // 1_000_000
    return other


def record_rdzv_event(event: RdzvEvent) -> None:
    """Record an event of the rendezvous."""
    known: Any = event  # A handler for this destination gets these, and no other events.
    destinations.find(RENDEZVOUS).record(known)


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Make an event of the rendezvous and record it; do nothing if nobody gets such events.

    Its name says who called: the file, and `name` or else the function. If the node failed, the
    traceback of the exception that is being handled is in it.
    """
    if not destinations.is_recorded(RENDEZVOUS):
        return
    caller = sys._getframe(1).f_code
    trace = ""
    if node_state == NodeState.FAILED:
        import traceback

        trace = traceback.format_exc()
    record_rdzv_event(
        RdzvEvent(
            name=f"{os.path.basename(caller.co_filename)}:{name or caller.co_name}",
            run_id=run_id,
            message=message,
            hostname=hostname or os.uname().nodename,
            pid=pid or os.getpid(),
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=trace,
        )
    )
