"""Frames: four bytes with the length of the body (big-endian), then the body.

A `FrameReader` accepts bytes in pieces of any size and works in linear time. It holds at most one incomplete
frame, and checks the length in its header before it waits for the body. It reads no sockets and does not
interpret bodies.
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

    Raises `FrameTooLarge` if the message exceeds the other side's limit, and `BadMessage` if it cannot be
    encoded.
    """
    body = encode(message)
    if len(body) > frame_bytes_max:
        raise FrameTooLarge(len(body), frame_bytes_max)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class FrameReader:
    """Splits a stream of bytes into the bodies of frames.

    `frame_bytes_max` may change between calls, once the peer is authenticated. A frame that was too large
    before is then checked again: call `feed(b"")` until it returns nothing, since the bytes after such a frame
    are held.

    `tag_bytes` is the size of the tag after each body. If it is not 0, `feed` returns whole frames, with header
    and tag, for a `Seal` to open. While it is None, whether the next frame has a tag depends on the last one:
    `feed` returns one frame at a time and holds the bytes after it in the same way.
    """

    __slots__ = (
        "_buffer", "_fault", "_held", "_overhead", "_skipped", "_tag_bytes", "_wanted",
        "frame_bytes_max",
    )  # fmt: skip

    def __init__(
        self, frame_bytes_max: int = FRAME_BYTES_MAX, *, tag_bytes: int | None = 0
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.tag_bytes = tag_bytes
        # The beginning of an incomplete frame, with its header, and the size at which parsing continues: that
        # of the header until the header is complete, then that of the frame.
        self._buffer = bytearray()
        self._wanted = HEADER_BYTES
        # The rest of a read, from an invalid length on; see `feed`.
        self._held = b""
        self._fault: WireError | None = None

    @property
    def tag_bytes(self) -> int | None:
        return self._tag_bytes

    @tag_bytes.setter
    def tag_bytes(self, tag_bytes: int | None) -> None:
        self._tag_bytes = tag_bytes
        # The bytes to remove before a body, and the bytes of a frame besides its body.
        self._skipped = 0 if tag_bytes else HEADER_BYTES
        self._overhead = HEADER_BYTES + (tag_bytes or 0)

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes held for frames that are not complete yet."""
        return len(self._buffer) + len(self._held)

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Add received bytes and return the bodies of the frames that they complete.

        An invalid length raises in this call and in every later one, since the rest of the stream cannot be
        parsed. If complete frames precede it in the same read, this call returns them and the next one raises.
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
        before, around = self._skipped, self._overhead
        # A frame that is complete in `data` is copied only once, as the returned body.
        while end - at >= HEADER_BYTES:
            length = int.from_bytes(data[at : at + HEADER_BYTES], "big")
            if not 0 < length <= self.frame_bytes_max:
                if not bodies:
                    raise self._fail(length)
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
        """Add the missing bytes to the incomplete frame; return how many of `data` were used."""
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
                    raise self._fail(length)
                self._wanted = self._overhead + length
            else:
                if self._skipped:
                    del buffer[:HEADER_BYTES]  # This moves a pointer, not the body.
                bodies.append(bytes(buffer))
                buffer.clear()
                self._wanted = HEADER_BYTES
        return at

    def _fail(self, length: int) -> WireError:
        self._buffer.clear()
        self._fault = FrameTooLarge(length, self.frame_bytes_max) if length else EmptyFrame()
        return self._fault
