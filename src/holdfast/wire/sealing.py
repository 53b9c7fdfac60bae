"""Sealed frames: what is sent after the handshake, so that nobody in between can change it.

Each direction of a connection has a key of its own, which comes out of the handshake. A sealed frame
is the body and a tag over it and all bodies before it, with their lengths. So one that was changed,
left out, repeated, sent in another order, back to its sender or over another connection is noticed;
no later tag fits either, and the connection ends. Nothing is hidden: that is what TLS is for.
"""

from __future__ import annotations

from _blake2 import blake2b  # Without the rest of `hashlib` and `hmac`, which load OpenSSL.
from _operator import _compare_digest

from holdfast.wire.errors import BrokenSeal
from holdfast.wire.frames import HEADER_BYTES

TAG_BYTES = 16


class Seal:
    """One direction of a connection: one side seals frames, the other opens their bodies."""

    __slots__ = ("_sent",)

    def __init__(self, key: bytes) -> None:
        # Going on with one hash is half the price of a new one for each frame.
        self._sent = blake2b(digest_size=TAG_BYTES, key=key)

    def seal(self, frame: bytes) -> bytes:
        """Return the next frame to send, for a whole one as `encode_frame` makes it."""
        self._sent.update(frame)
        sealed_bytes = len(frame) - HEADER_BYTES + TAG_BYTES
        return b"".join(
            (
                sealed_bytes.to_bytes(HEADER_BYTES, "big"),
                frame[HEADER_BYTES:],
                self._sent.digest(),
            )
        )

    def open(self, sealed: bytes) -> bytes:
        """Return the body of the next frame that came, or raise `BrokenSeal`, then and ever after."""
        body = sealed[:-TAG_BYTES]
        self._sent.update(len(body).to_bytes(HEADER_BYTES, "big") + body)
        if not _compare_digest(self._sent.digest(), sealed[-TAG_BYTES:]):
            raise BrokenSeal
        return body
