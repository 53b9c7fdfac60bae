"""Sealed frames: what is sent after the handshake, so that nobody in between can change it.

Each direction of a connection has a key of its own, which comes out of the handshake. A sealed frame
is the frame as it is and a tag behind it, over it and all frames before it. So one that was changed,
left out, repeated, sent in another order, back to its sender or over another connection is noticed;
no later tag fits either, and the connection ends. Nothing is hidden: that is what TLS is for.

The length of a frame does not count its tag, so that sealing copies nothing but to add it: the side
that reads knows from its handshake what is sealed (`FrameReader.tag_bytes`).
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

from holdfast.wire.errors import BrokenSeal
from holdfast.wire.frames import HEADER_BYTES

TAG_BYTES = 16
# The parts of a sealed frame. A slice that is there already is cheaper than one made for each frame.
_FRAME, _BODY, _TAG = slice(-TAG_BYTES), slice(HEADER_BYTES, -TAG_BYTES), slice(-TAG_BYTES, None)


class Seal:
    """One direction of a connection: one side seals frames, the other opens them."""

    __slots__ = ("_sent",)

    def __init__(self, key: bytes) -> None:
        # Going on with one hash is cheaper than a new one for each frame.
        self._sent = blake2b(digest_size=TAG_BYTES, key=key)

    def seal(self, frame: bytes) -> bytes:
        """Return the next frame to send, for a whole one as `encode_frame` makes it."""
        sent = self._sent
        sent.update(frame)
        return frame + sent.digest()

    def open(self, sealed: bytes) -> bytes:
        """Return the body of the next frame that came, or raise `BrokenSeal`, then and ever after.

        The frame is one that a `FrameReader` cut, so that its length is that of its body.
        """
        sent = self._sent
        sent.update(sealed[_FRAME])
        if not hmac.compare_digest(sent.digest(), sealed[_TAG]):
            sent.update(b"broken")  # Nothing mends it, though too short a frame adds nothing.
            raise BrokenSeal
        return sealed[_BODY]
