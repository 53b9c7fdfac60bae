"""Frames: four bytes with the length of the body (big-endian), then the body.

**Reading.** A `FrameReader` accepts bytes in pieces of any size and works in linear time. It holds at most one
incomplete frame, and checks the length in its header before it waits for the body.

**Seals.** After a handshake with a token, no attacker in the middle can change the traffic. Each direction of a
connection has its own key. A sealed frame is the frame followed by a tag over it and all frames before it. The
receiver detects a frame that was changed, dropped, repeated, reordered, sent back, or sent over another connection.
Every later tag fails too, and the connection ends. The content is not encrypted: use TLS for that. The length
of a frame does not include its tag, so sealing only appends: the reading side knows from its handshake which
frames are sealed (`FrameReader.tag_bytes`).

**Parts.** Large messages are sent in parts, with small ones in between: heartbeats never queue behind a report.
A body above `PART_BYTES` is split. Each part is sent after the other side confirms the previous one, so at most
one part is ahead of a heartbeat, in this process's buffer, in the kernel's, or on a slow link. Large messages
are sent one at a time, in order. A newer message replaces a waiting one of the same kind.

This module opens no sockets: it takes received bytes, and returns the bytes to write.
"""

from __future__ import annotations

import hmac
from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING

from holdfast.wire.messages import Part, PartTaken, encode
from holdfast.wire.wire_errors import BrokenSeal, EmptyFrame, FrameTooLarge, WireError
from holdfast.wire.wire_limits import FRAME_BYTES_MAX, PART_BYTES

if TYPE_CHECKING:
    from holdfast.wire.messages import Message

HEADER_BYTES = 4
TAG_BYTES = 16
# The parts of a sealed frame. Reusing a slice is cheaper than creating one for each frame.
_FRAME, _BODY, _TAG = slice(-TAG_BYTES), slice(HEADER_BYTES, -TAG_BYTES), slice(-TAG_BYTES, None)


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


# Seals.


class Seal:
    """One direction of a connection: one side seals frames, the other opens them."""

    __slots__ = ("_sent",)

    def __init__(self, key: bytes) -> None:
        # Updating one hash is cheaper than creating one for each frame.
        self._sent = blake2b(digest_size=TAG_BYTES, key=key)

    def seal(self, frame: bytes) -> bytes:
        """Return the next frame to send, sealed; `frame` is a result of `encode_frame`."""
        sent = self._sent
        sent.update(frame)
        return frame + sent.digest()

    def open(self, sealed: bytes) -> bytes:
        """Return the body of the next received frame; raise `BrokenSeal` if its tag is wrong.

        Every later frame then raises too. A `FrameReader` has checked that the length in the header is correct.
        """
        sent = self._sent
        sent.update(sealed[_FRAME])
        if not hmac.compare_digest(sent.digest(), sealed[_TAG]):
            # No later frame can match, even if this one was too short to add anything.
            sent.update(b"broken")
            raise BrokenSeal
        return sealed[_BODY]


# Parts.

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
