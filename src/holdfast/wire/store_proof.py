"""Proves to the workers' store that an agent is a member of the generation that the store serves.

Workers use PyTorch's protocol, which has no authentication. The agent therefore opens a separate
connection and proves its membership. The first byte is not a valid operation of PyTorch's protocol::

    agent                                         store
      hello: purpose, generation, nonce    ->
                                           <-     nonce, proof
      proof                                ->
                                           <-     welcome

Each side proves that it has the key of the generation, which only members receive (`View.store_key`). If
the purpose is `FORWARD`, both sides seal everything after the welcome (`SealedStream`).

Neither class performs I/O. The owner of the connection passes received bytes to `receive`, sends the
bytes that `receive` returns, and closes the connection if the exchange takes too long. A rejected
proof raises `ProofRefused`.
"""

from __future__ import annotations

import hmac
import os
from struct import Struct

from holdfast.wire.frames import HEADER_BYTES, TAG_BYTES, FrameReader, Seal
from holdfast.wire.wire_errors import ProofRefused

FIRST_BYTE = 0xA5
ATTEST = 1
"""Purpose: attest that this connection's host belongs to the job."""
FORWARD = 2
"""Purpose: forward the traffic of one worker over this connection after the proof."""
WELCOME = b"\x01"
NONCE_BYTES = 32
PROOF_BYTES = 32

_hello = Struct(f"<BBQ{NONCE_BYTES}s")
_AGENT, _STORE = b"holdfast agent", b"holdfast workers' store"
_FROM_AGENT, _FROM_STORE = b"holdfast sealed by the agent", b"holdfast sealed by the store"
CHUNK_BYTES = 64 * 1024
"""The largest payload of one sealed frame."""


class _Side:
    def __init__(self, key: bytes, nonce: bytes | None) -> None:
        self._key = key
        self._nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        self._received = b""
        self._transcript = b""  # Everything that both sides sent before the proofs.
        self.done = False

    def _take(self, data: bytes, count: int) -> bytes:
        """Return the next `count` bytes, or `b""` until all of them have arrived."""
        self._received += data
        if len(self._received) > count:  # Each side waits for the other's reply.
            raise ProofRefused("it sent more than one message at once")
        if len(self._received) < count:
            return b""
        taken, self._received = self._received, b""
        return taken

    def _proof(self, side: bytes) -> bytes:
        return hmac.digest(self._key, side + self._transcript, "sha256")


class SealedStream:
    """One side of a connection that carries sealed frames in both directions."""

    def __init__(self, out_key: bytes, in_key: bytes) -> None:
        self._out, self._in = Seal(out_key), Seal(in_key)
        self._reader = FrameReader(CHUNK_BYTES, tag_bytes=TAG_BYTES)

    def seal(self, data: bytes) -> bytes:
        """Return the sealed frames for these bytes."""
        seal = self._out.seal
        starts = range(0, len(data), CHUNK_BYTES)
        chunks = [data[at : at + CHUNK_BYTES] for at in starts]
        return b"".join(
            [seal(len(chunk).to_bytes(HEADER_BYTES, "big") + chunk) for chunk in chunks]
        )

    def open(self, data: bytes) -> bytes:
        """Return the bytes of all complete frames received so far, or raise `WireError`."""
        return b"".join([self._in.open(body) for body in self._reader.feed(data)])


class AgentProof(_Side):
    """The connecting side: call `start`, then `receive` until `done`."""

    def __init__(
        self, key: bytes, generation: int, purpose: int = ATTEST, *, nonce: bytes | None = None
    ) -> None:
        super().__init__(key, nonce)
        self._transcript = _hello.pack(FIRST_BYTE, purpose, generation, self._nonce)
        self._proven = False

    def start(self) -> bytes:
        """Return the first bytes to send."""
        return self._transcript

    def receive(self, data: bytes) -> bytes:
        """Process bytes from the store; return the bytes to send."""
        if self._proven:
            reply = self._take(data, len(WELCOME))
            if reply not in (b"", WELCOME):
                raise ProofRefused("it rejected the proof")
            self.done = bool(reply)
            return b""
        challenge = self._take(data, NONCE_BYTES + PROOF_BYTES)
        if not challenge:
            return b""
        self._transcript += challenge[:NONCE_BYTES]
        if not hmac.compare_digest(challenge[NONCE_BYTES:], self._proof(_STORE)):
            raise ProofRefused("it does not have the key of this generation")
        self._proven = True
        return self._proof(_AGENT)

    def stream(self) -> SealedStream:
        """Return the stream for all traffic after the proof. Call it once `done`."""
        return SealedStream(self._proof(_FROM_AGENT), self._proof(_FROM_STORE))


class StoreProof(_Side):
    """The listening side: call `receive` until `done`. It accepts proofs with one `purpose` only."""

    def __init__(
        self, key: bytes, generation: int, purpose: int = ATTEST, *, nonce: bytes | None = None
    ) -> None:
        super().__init__(key, nonce)
        self._generation = generation
        self.purpose = purpose

    def receive(self, data: bytes) -> bytes:
        """Process bytes from the agent; return the bytes to send."""
        if not self._transcript:
            hello = self._take(data, _hello.size)
            return self._challenge(hello) if hello else b""
        proof = self._take(data, PROOF_BYTES)
        if not proof:
            return b""
        if not hmac.compare_digest(proof, self._proof(_AGENT)):
            raise ProofRefused("it does not have the key of this generation")
        self.done = True
        return WELCOME

    def _challenge(self, hello: bytes) -> bytes:
        first, purpose, generation, _nonce = _hello.unpack(hello)
        if first != FIRST_BYTE or purpose != self.purpose:
            raise ProofRefused("its agent uses another value of the setting store")
        if generation != self._generation:
            raise ProofRefused(f"it belongs to generation {generation}, not {self._generation}")
        self._transcript = hello + self._nonce
        return self._nonce + self._proof(_STORE)

    def stream(self) -> SealedStream:
        """Return the stream for all traffic after the proof. Call it once `done`."""
        return SealedStream(self._proof(_FROM_STORE), self._proof(_FROM_AGENT))
