"""Sends large messages in parts, with small ones in between: heartbeats never queue behind a report.

A body above `PART_BYTES` is split. Each part is sent after the other side confirms the previous one, so at most
one part is ahead of a heartbeat, in this process's buffer, in the kernel's, or on a slow link. Large messages
are sent one at a time, in order. A newer message replaces a waiting one of the same kind.

This module opens no sockets: `send`, `next_part` and `rest` return the frames to write.
"""

from __future__ import annotations

from collections import deque

from holdfast.wire.frames import HEADER_BYTES, encode_frame
from holdfast.wire.messages import Part, PartTaken
from holdfast.wire.wire_errors import FrameTooLarge
from holdfast.wire.wire_limits import FRAME_BYTES_MAX, PART_BYTES

TAKEN = encode_frame(PartTaken())


class OutgoingParts:
    """The parts that one side of a connection has not sent yet."""

    __slots__ = ("_begun", "_waiting", "_waiting_bytes")

    def __init__(self) -> None:
        # The frame being sent, how many of its bytes are sent, and its kind.
        self._begun: tuple[bytes, int, str] | None = None
        self._waiting: deque[tuple[bytes, str]] = deque()  # With their kinds.
        self._waiting_bytes = 0

    @property
    def unsent_bytes(self) -> int:
        return self._waiting_bytes + (len(self._begun[0]) - self._begun[1] if self._begun else 0)

    @property
    def unsent_replies_bytes(self) -> int:
        """The unsent bytes of messages without a kind, which no newer message replaces."""
        waiting = sum(len(frame) for frame, kind in self._waiting if not kind)
        if self._begun is not None and not self._begun[2]:
            waiting += len(self._begun[0]) - self._begun[1]
        return waiting

    def send(self, frame: bytes, kind: str = "") -> bytes:
        """Return the bytes to write now for a frame: the frame, its first part, or nothing yet.

        If the same frame is being sent already, it is not sent again. The frame replaces a waiting one of the
        same `kind`.
        """
        if len(frame) <= PART_BYTES:
            return frame
        if self._begun is None:
            self._begun = (frame, HEADER_BYTES, kind)
            return self._next()
        if frame == self._begun[0]:
            return b""
        if kind:
            kept = [one for one in self._waiting if one[1] != kind]
            self._waiting = deque(kept)
        self._waiting.append((frame, kind))
        self._waiting_bytes = sum(len(one) for one, _ in self._waiting)
        return b""

    def next_part(self) -> bytes:
        """Return the bytes to write after the other side has confirmed the previous part."""
        if self._begun is None and self._waiting:
            frame, kind = self._waiting.popleft()
            self._waiting_bytes -= len(frame)
            self._begun = (frame, HEADER_BYTES, kind)
        return self._next() if self._begun is not None else b""

    def rest(self) -> list[bytes]:
        """Return all remaining frames, for a connection that is about to close."""
        return [*iter(self.next_part, b"")]

    def _next(self) -> bytes:
        assert self._begun is not None
        frame, at, kind = self._begun
        end = min(len(frame), at + PART_BYTES)
        is_last = end == len(frame)
        self._begun = None if is_last else (frame, end, kind)
        return encode_frame(Part(data=frame[at:end], last=is_last))


class IncomingParts:
    """The received parts of one large message."""

    __slots__ = ("_body",)

    def __init__(self) -> None:
        self._body = bytearray()

    def take(self, part: Part) -> bytes | None:
        """Return the body if this part completes it; raise if the body exceeds the limit."""
        if len(self._body) + len(part.data) > FRAME_BYTES_MAX:
            raise FrameTooLarge(len(self._body) + len(part.data), FRAME_BYTES_MAX)
        self._body += part.data
        if not part.last:
            return None
        body = bytes(self._body)
        self._body.clear()
        return body
