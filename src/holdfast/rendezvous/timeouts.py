"""`RendezvousTimeout` and `RendezvousSettings`: how long things may take when nodes meet.

The defaults are TorchElastic's but for one: the last call is 1 s, not 30. It counts anew from each
node that joins, so it needs to be no longer than the gap between two nodes of one start.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from holdfast.errors import UsageError

JOIN_S = 600.0
LAST_CALL_S = 1.0
CLOSE_S = 30.0
HEARTBEAT_S = 5.0


class RendezvousTimeout:
    """The times a rendezvous has.

    join
        From the call of `next_rendezvous` to the round it returns.
    last_call
        How long a round that has its least number of nodes waits for more, counted from the last
        node that joined. Each regroup waits that long, unless the round is full before.
    close
        For telling the others that the job is over, or that this node leaves.
    heartbeat
        For one sign of life, all attempts to write it included.
    """

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self._join = _checked("join", join, JOIN_S)
        self._last_call = _checked("last_call", last_call, LAST_CALL_S)
        self._close = _checked("close", close, CLOSE_S)
        self._heartbeat = _checked("heartbeat", heartbeat, HEARTBEAT_S)

    @property
    def join(self) -> timedelta:
        """How long `next_rendezvous` may take."""
        return self._join

    @property
    def last_call(self) -> timedelta:
        """How long a round that could form waits for more nodes."""
        return self._last_call

    @property
    def close(self) -> timedelta:
        """How long `set_closed` and `shutdown` may take."""
        return self._close

    @property
    def heartbeat(self) -> timedelta:
        """How long one sign of life may take."""
        return self._heartbeat


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """What a handler was made with. A node is lost after `interval` x `max_attempt` of silence."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int


def _checked(name: str, given: timedelta | None, default_s: float) -> timedelta:
    if given is None:
        return timedelta(seconds=default_s)
    if given <= timedelta(0):
        raise UsageError(f"RendezvousTimeout: {name}: {given} is not above 0")
    return given
