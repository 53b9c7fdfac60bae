"""Sealed frames: after the handshake, no attacker in the middle can change the traffic.

Each direction of a connection has its own key from the handshake. A sealed frame is the frame followed by a
tag over it and all frames before it. The receiver detects a frame that was changed, dropped, repeated, reordered,
or sent back or over another connection. Every later tag fails too, and the connection ends. The content is not
encrypted: use TLS for that.

The length of a frame does not include its tag, so sealing only appends: the reading side knows from its
handshake which frames are sealed (`FrameReader.tag_bytes`).
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

from holdfast.wire.frames import HEADER_BYTES
from holdfast.wire.wire_errors import BrokenSeal

TAG_BYTES = 16
# The parts of a sealed frame. Reusing a slice is cheaper than creating one for each frame.
_FRAME, _BODY, _TAG = slice(-TAG_BYTES), slice(HEADER_BYTES, -TAG_BYTES), slice(-TAG_BYTES, None)


class Seal:
    """One direction of a connection: one side seals frames, the other opens them."""

    __slots__ = ("_sent",)

    def __init__(self, key: bytes) -> None:
        # Updating one hash is cheaper than creating one for each frame.
        self._sent = blake2b(digest_size=TAG_BYTES, key=key)

    def seal(self, frame: bytes) -> bytes:
        """Return the next frame to send, sealed; `frame` is what `encode_frame` returns."""
        sent = self._sent
        sent.update(frame)
        return frame + sent.digest()

    def open(self, sealed: bytes) -> bytes:
        """Return the body of the next received frame. Raises `BrokenSeal`, and then for every later frame too.

        A `FrameReader` has checked that the length in the header is correct.
        """
        sent = self._sent
        sent.update(sealed[_FRAME])
        if not hmac.compare_digest(sent.digest(), sealed[_TAG]):
            sent.update(
                b"broken"
            )  # No later frame can match, even if this one was too short to add anything.
            raise BrokenSeal
        return sealed[_BODY]
