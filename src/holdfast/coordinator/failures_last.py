"""Failures that nodes have told of wait until everything else that has come has been read.

Workers fail of the loss of another node's. Its connection ended before, but the loop may read the
failure first, and the wrong node would be blamed. So a failure is handed on after some turns of the
loop, each of which reads what is there: that costs microseconds, and waits for nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from holdfast.coordinator.peer import Key, Peer
    from holdfast.core.news import Status

TURNS = 5
"""An end is read in the first, told in the next; below TLS each takes one more. One to be sure."""


class FailuresLast:
    """The newest failure of each node, for a few turns of the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, hand_on: Callable[[Peer, Key, Status], None]
    ) -> None:
        self._loop = loop
        self._hand_on = hand_on
        self._held: dict[Key, tuple[Peer, Status]] = {}

    def hold(self, peer: Peer, key: Key, status: Status) -> None:
        """Hand on a failure a little later, in place of the one before if that is still here."""
        self._held[key] = (peer, status)
        self._turn(key, status, TURNS)

    def forget(self, key: Key) -> None:
        """The node has said something newer since."""
        self._held.pop(key, None)

    def release(self, key: Key) -> None:
        """The node's connection has ended: what it said came before that."""
        held = self._held.pop(key, None)
        if held is not None:
            self._hand_on(held[0], key, held[1])

    def _turn(self, key: Key, status: Status, turns: int) -> None:
        if key not in self._held or self._held[key][1] is not status:
            return
        if turns > 0:
            self._loop.call_soon(self._turn, key, status, turns - 1)
        else:
            self.release(key)
