"""Sealed frames: what is sent after the handshake, so that nobody in between can change it.

Each direction of a connection has a key of its own, which comes out of the handshake, and counts its
frames. A sealed frame is the body and a tag over the count and the body, so one that was changed,
left out, repeated, sent in another order, back to its sender or over another connection is noticed,
and ends the connection. The count is not sent: both sides know it. Nothing is hidden: that is what
TLS is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.wire.errors import BrokenSeal
from holdfast.wire.frames import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

TAG_BYTES = 16
COUNT_BYTES = 8


class Seal:
    """One direction of a connection: one side seals frames, the other opens their bodies."""

    __slots__ = ("_count", "_keyed", "_same")

    def __init__(self, key: bytes) -> None:
        import hashlib  # A job without a token needs neither.
        import hmac

        # Copying this is half the price of giving the key each time.
        self._keyed = hashlib.blake2b(digest_size=TAG_BYTES, key=key)
        self._same: Callable[[bytes, bytes], bool] = hmac.compare_digest
        self._count = 0

    def seal(self, frame: bytes) -> bytes:
        """Return the next frame to send, for a whole one as `encode_frame` makes it."""
        body = frame[HEADER_BYTES:]
        sealed_bytes = len(body) + TAG_BYTES
        return sealed_bytes.to_bytes(HEADER_BYTES, "big") + body + self._tag(body)

    def open(self, sealed: bytes) -> bytes:
        """Return the body of the next frame that came, or raise `BrokenSeal`, then and ever after."""
        body = sealed[:-TAG_BYTES]
        if not self._same(self._tag(body), sealed[-TAG_BYTES:]):
            self._same = _never
            raise BrokenSeal
        return body

    def _tag(self, body: bytes) -> bytes:
        hashing = self._keyed.copy()
        hashing.update(self._count.to_bytes(COUNT_BYTES, "big"))
        hashing.update(body)
        self._count += 1
        return hashing.digest()


def _never(_a: bytes, _b: bytes) -> bool:
    return False
