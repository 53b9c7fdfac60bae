"""Frames: four bytes with the length of the body (big-endian), then the body.

A `FrameReader` accepts bytes in any pieces and works in linear time. It holds at most one incomplete frame, and
checks an announced length before it waits for the body. It reads no sockets and does not interpret
bodies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.wire.messages import encode
from holdfast.wire.wire_errors import EmptyFrame, FrameTooLarge, WireError
from holdfast.wire.wire_limits import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from holdfast.wire.messages import Message

HEADER_BYTES = 4


def encode_frame(message: Message, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """Return the frame of a message for the other side's `FrameReader`.

    A message above the other side's limit raises `FrameTooLarge` here; one that cannot be encoded raises
    `BadMessage`.
    """
    body = encode(message)
    if len(body) > frame_bytes_max:
        raise FrameTooLarge(len(body), frame_bytes_max)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class FrameReader:
    """Splits a stream of bytes into the bodies of frames.

    `frame_bytes_max` may change between calls, once the peer is authenticated. A frame that was too large until
    then is checked again: `feed(b"")` returns what is complete already. Until then everything read with
    it is held, so call it as long as `feed` returns something.

    `tag_bytes` follow each body; if there are any, frames are returned whole, with header and tag, for a `Seal` to
    open. While it is None, whether the next frame has a tag depends on the last one: frames are returned
    one at a time, and everything after them is held in the same way.
    """

    __slots__ = (
        "_around", "_before", "_buffer", "_fault", "_held", "_tag_bytes", "_wanted", "frame_bytes_max",
    )  # fmt: skip

    def __init__(
        self, frame_bytes_max: int = FRAME_BYTES_MAX, *, tag_bytes: int | None = 0
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.tag_bytes = tag_bytes
        # The beginning of a frame that is not whole, its header included, and how long it gets;
        # as long as the header itself is not whole, that is all that is known to be wanted.
        self._buffer = bytearray()
        self._wanted = HEADER_BYTES
        # The rest of a read, from a faulty length on; see `feed`.
        self._held = b""
        self._fault: WireError | None = None

    @property
    def tag_bytes(self) -> int | None:
        return self._tag_bytes

    @tag_bytes.setter
    def tag_bytes(self, tag_bytes: int | None) -> None:
        self._tag_bytes = tag_bytes
        # What is left out before a body, and how much there is besides it.
        self._before = 0 if tag_bytes else HEADER_BYTES
        self._around = HEADER_BYTES + (tag_bytes or 0)

    @property
    def buffered_bytes(self) -> int:
        """How much is held of what is not whole yet."""
        return len(self._buffer) + len(self._held)

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Take what was read and return the bodies that became whole.

        A faulty length raises at once, and from then on always: the stream cannot be understood
        any more. If whole frames came before it in the same read they are returned first, and the
        next call raises.
        """
        if self._fault is not None:
            raise self._fault
        if self._held:
            data, self._held = self._held + data, b""
        bodies: list[bytes] = []
        at = 0
        if self._buffer:
            at = self._fill(data, bodies)
            if bodies and self._tag_bytes is None:
                self._held = bytes(data[at:])
                return bodies
        end = len(data)
        before, around = self._before, self._around
        # No copy is made of a frame that is whole in what was read, but for the body itself.
        while end - at >= HEADER_BYTES:
            length = int.from_bytes(data[at : at + HEADER_BYTES], "big")
            if not 0 < length <= self.frame_bytes_max:
                if not bodies:
                    raise self._faulty(length)
                self._held = bytes(data[at:])
                return bodies
            stop = at + around + length
            if stop > end:
                self._wanted = stop - at
                break
            bodies.append(bytes(data[at + before : stop]))
            at = stop
            if self._tag_bytes is None:
                self._held = bytes(data[at:]) if at < end else b""
                return bodies
        if at < end:
            self._buffer += data[at:]
        return bodies

    def _fill(self, data: bytes | bytearray | memoryview, bodies: list[bytes]) -> int:
        """Add to the unfinished frame what it lacks and no more; return how much that was."""
        buffer = self._buffer
        at = 0
        while buffer and at < len(data):
            piece = data[at : at + self._wanted - len(buffer)]
            buffer += piece
            at += len(piece)
            if len(buffer) < self._wanted:
                break
            if self._wanted == HEADER_BYTES:
                length = int.from_bytes(buffer, "big")
                if not 0 < length <= self.frame_bytes_max:
                    raise self._faulty(length)
                self._wanted = self._around + length
            else:
                if self._before:
                    del buffer[:HEADER_BYTES]  # This moves a pointer, not the body.
                bodies.append(bytes(buffer))
                buffer.clear()
                self._wanted = HEADER_BYTES
        return at

    def _faulty(self, length: int) -> WireError:
        self._buffer.clear()
        self._fault = FrameTooLarge(length, self.frame_bytes_max) if length else EmptyFrame()
        return self._fault
