"""Sends large messages in parts, with small ones in between: heartbeats never queue behind a report.

A body above `PART_BYTES` is split. Each part is sent after the other side confirms the previous one, so at most
one part is ever in transit ahead of a heartbeat: in this process's buffer, the kernel's, or on a slow
link. One large message is sent at a time, in order; a newer message replaces a waiting one of its
kind.

This module opens no sockets: `send`, `taken` and `rest` return the frames to write.
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
        # A frame, how much of it is sent, and its kind.
        self._begun: tuple[bytes, int, str] | None = None
        self._waiting: deque[tuple[bytes, str]] = deque()  # With their kinds.
        self._waiting_bytes = 0

    @property
    def unsent_bytes(self) -> int:
        return self._waiting_bytes + (len(self._begun[0]) - self._begun[1] if self._begun else 0)

    @property
    def unsent_answers_bytes(self) -> int:
        """The same for messages without a kind: all of them are kept, not only the newest."""
        waiting = sum(len(frame) for frame, kind in self._waiting if not kind)
        if self._begun is not None and not self._begun[2]:
            waiting += len(self._begun[0]) - self._begun[1]
        return waiting

    def send(self, frame: bytes, kind: str = "") -> bytes:
        """Return what to write now for a frame: the frame, its first part, or nothing yet.

        A frame that is being sent is not sent twice; a waiting frame is replaced by a newer one of the
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

    def taken(self) -> bytes:
        """Return what to write once the other side has received the last part."""
        if self._begun is None and self._waiting:
            frame, kind = self._waiting.popleft()
            self._waiting_bytes -= len(frame)
            self._begun = (frame, HEADER_BYTES, kind)
        return self._next() if self._begun is not None else b""

    def rest(self) -> list[bytes]:
        """Return everything left at once, for a connection that is about to close."""
        return [*iter(self.taken, b"")]

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
