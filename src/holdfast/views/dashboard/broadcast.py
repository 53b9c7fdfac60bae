"""The stream to browsers: the state of the job in sections, encoded once for all of them.

A browser first receives a snapshot with all sections and the newest events, then the sections that
change and new events. Each browser has a bounded queue. The server disconnects a browser that does not
keep up; the page reconnects and receives a new snapshot.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

QUEUE_MAX = 32
"""The limit for updates that a browser has not received yet."""
LISTENERS_MAX = 64
EVENTS_KEPT_MAX = 1_024

_encode = msgspec.json.Encoder().encode


class Listener:
    """One browser's queue."""

    def __init__(self) -> None:
        self._updates: deque[bytes] = deque()
        self._woken = asyncio.Event()
        self._is_over = False

    def put(self, update: bytes) -> None:
        if self._is_over:
            return
        if len(self._updates) < QUEUE_MAX:
            self._updates.append(update)
            self._woken.set()
        else:
            self._updates.clear()
            self.end()

    def end(self) -> None:
        self._is_over = True
        self._woken.set()

    async def get(self, limit_s: float) -> bytes | None:
        """Return the next update; empty after the time limit; None after the last one."""
        try:
            async with asyncio.timeout(limit_s):
                await self._woken.wait()
        except TimeoutError:
            return b""
        if not self._updates:
            return None
        update = self._updates.popleft()
        if not self._updates and not self._is_over:
            self._woken.clear()
        return update


class Broadcast:
    """The current sections and the listeners. `renew` publishes the current state."""

    def __init__(self, renew: Callable[[], None]) -> None:
        self.is_wanted = asyncio.Event()
        """Set while there are listeners."""
        self._renew = renew
        self._sections: dict[str, bytes] = {}
        self._events: deque[bytes] = deque(maxlen=EVENTS_KEPT_MAX)
        self._listeners: set[Listener] = set()
        self._is_closed = False
        self._left = asyncio.Event()

    def refresh(self) -> None:
        """Publish the current state if there are listeners; otherwise `listen` does so for the next one."""
        if self._listeners:
            self._renew()

    def publish(self, sections: Mapping[str, object], events: Iterable[object]) -> None:
        """Send the sections that changed since they were last published, and events."""
        changed = {
            name: encoded
            for name, value in sections.items()
            if (encoded := _encode(value)) != self._sections.get(name)
        }
        news = [_encode(event) for event in events]
        if not changed and not news:
            return
        self._sections.update(changed)
        self._events.extend(news)
        update = message("update", changed, news)
        for listener in self._listeners:
            listener.put(update)

    def listen(self) -> Listener | None:
        """Return a queue that begins with a snapshot; None if there are too many listeners."""
        if len(self._listeners) >= LISTENERS_MAX or self._is_closed:
            return None
        self._renew()
        listener = Listener()
        listener.put(message("snapshot", self._sections, self._events))
        self._listeners.add(listener)
        self.is_wanted.set()
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if not self._listeners:
            self.is_wanted.clear()
            self._left.set()

    async def wait_until_idle(self, seconds: float) -> None:
        """Return once there have been no listeners for this long."""
        while True:
            self._left.clear()
            if self._listeners:
                await self._left.wait()
            try:
                async with asyncio.timeout(seconds):
                    await self.is_wanted.wait()
            except TimeoutError:
                return

    def drop_all(self) -> None:
        """Disconnect all listeners and forget what was published."""
        self._sections.clear()
        self._events.clear()
        for listener in self._listeners:
            listener.end()

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        self.drop_all()


def message(kind: str, sections: Mapping[str, bytes], events: Iterable[bytes]) -> bytes:
    """Return a line of a stream. JSON escapes line breaks."""
    parts = [b'"kind":%b' % _encode(kind)]
    parts += [b"%b:%b" % (_encode(name), value) for name, value in sections.items()]
    news = b",".join(events)
    if news:
        parts.append(b'"news":[%b]' % news)
    return b"{%b}\n" % b",".join(parts)


PING = message("ping", {}, ())
