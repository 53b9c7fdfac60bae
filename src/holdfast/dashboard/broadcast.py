"""What browsers receive: one state of the job, made of sections, encoded once for all of them.

A browser begins with a snapshot, all sections, and then gets those that change. Each has a bounded
queue; one that does not keep up is dropped, connects again by itself and begins with a snapshot.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

QUEUE_MAX = 32
"""Updates that a browser may be behind."""
LISTENERS_MAX = 64

_encode = msgspec.json.Encoder().encode


class Listener:
    """One browser's queue; `None` is its end."""

    def __init__(self) -> None:
        self._updates: asyncio.Queue[bytes] = asyncio.Queue(QUEUE_MAX)
        self.is_over = asyncio.Event()

    def put(self, update: bytes) -> None:
        try:
            self._updates.put_nowait(update)
        except asyncio.QueueFull:
            self.is_over.set()

    async def get(self, limit_s: float) -> bytes | None:
        """Return the next update, nothing if none comes in time, or None at the end."""
        if self.is_over.is_set():
            return None
        ended = asyncio.ensure_future(self.is_over.wait())
        update = asyncio.ensure_future(self._updates.get())
        try:
            await asyncio.wait(
                (ended, update), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self.is_over.is_set():
                return None
            return update.result() if update.done() else b""
        finally:
            ended.cancel()
            update.cancel()


class Broadcast:
    """The sections as they are now, and who listens."""

    def __init__(self) -> None:
        self._sections: dict[str, bytes] = {}
        self._listeners: set[Listener] = set()
        self._revision = 0
        self.is_closed = False

    def publish(self, sections: Mapping[str, object]) -> None:
        """Pass on the sections of these that differ from what was published before."""
        changed = {
            name: encoded
            for name, value in sections.items()
            if (encoded := _encode(value)) != self._sections.get(name)
        }
        if not changed:
            return
        self._revision += 1
        self._sections.update(changed)
        update = message("update", self._revision, changed)
        for listener in self._listeners:
            listener.put(update)

    def listen(self) -> Listener | None:
        """Return a queue that begins with a snapshot; None if there are too many."""
        if len(self._listeners) >= LISTENERS_MAX or self.is_closed:
            return None
        listener = Listener()
        listener.put(message("snapshot", self._revision, self._sections))
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def close(self) -> None:
        """End all streams."""
        self.is_closed = True
        for listener in self._listeners:
            listener.is_over.set()


def message(kind: str, revision: int, sections: Mapping[str, bytes]) -> bytes:
    """Return an event of a stream: JSON has no line breaks that are not escaped."""
    body = b",".join(b"%b:%b" % (_encode(name), value) for name, value in sections.items())
    return b"event: %b\nid: %d\ndata: {%b}\n\n" % (kind.encode(), revision, body)
