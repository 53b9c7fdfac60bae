"""How an agent proves to the workers' store that it is a member of the generation the store serves.

PyTorch's protocol, which workers use, has no authentication. An agent sends a proof first, on a
connection of its own, whose first byte is no operation of that protocol::

    agent                                         store
      hello: purpose, generation, nonce    ->
                                           <-     nonce, proof
      proof                                ->
                                           <-     welcome

Both prove the key of the generation, which only its members receive (`View.store_key`). If the purpose is
`FORWARD`, everything after the welcome is sealed (`SealedStream`). Neither machine performs I/O: the owner
of the connection passes received bytes to `receive`, sends what that returns, and closes the
connection if the exchange takes too long. A rejected proof raises `ProofRefused`.
"""

from __future__ import annotations

import hmac
import os
from struct import Struct

from holdfast.wire.errors import ProofRefused
from holdfast.wire.frames import HEADER_BYTES, FrameReader
from holdfast.wire.sealing import TAG_BYTES, Seal

FIRST_BYTE = 0xA5
ATTEST = 1
"""The purpose of a proof that attests that the connection's host belongs to the job."""
FORWARD = 2
"""The purpose of a proof after which the connection carries the traffic of one worker."""
WELCOME = b"\x01"
NONCE_BYTES = 32
PROOF_BYTES = 32

_hello = Struct(f"<BBQ{NONCE_BYTES}s")
_AGENT, _STORE = b"holdfast agent", b"holdfast workers' store"
_FROM_AGENT, _FROM_STORE = b"holdfast sealed by the agent", b"holdfast sealed by the store"
CHUNK_BYTES = 64 * 1024
"""The most that one sealed frame of forwarded traffic carries."""


class _Side:
    def __init__(self, key: bytes, nonce: bytes | None) -> None:
        self._key = key
        self._nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        self._received = b""
        self._spoken = b""  # Everything that both sent before the proofs.
        self.done = False

    def _take(self, data: bytes, count: int) -> bytes:
        """Return the next `count` bytes, or nothing until all of them have arrived."""
        self._received += data
        if len(self._received) > count:  # Neither side sends out of turn.
            raise ProofRefused("it sent more than one message at a time")
        if len(self._received) < count:
            return b""
        taken, self._received = self._received, b""
        return taken

    def _proof(self, side: bytes) -> bytes:
        return hmac.digest(self._key, side + self._spoken, "sha256")


class SealedStream:
    """A stream of bytes in sealed frames, both directions, for one side of a connection."""

    def __init__(self, out_key: bytes, in_key: bytes) -> None:
        self._out, self._in = Seal(out_key), Seal(in_key)
        self._reader = FrameReader(CHUNK_BYTES, tag_bytes=TAG_BYTES)

    def seal(self, data: bytes) -> bytes:
        """Return the sealed frames for these bytes."""
        seal = self._out.seal
        starts = range(0, len(data), CHUNK_BYTES)
        pieces = [data[at : at + CHUNK_BYTES] for at in starts]
        return b"".join([seal(len(one).to_bytes(HEADER_BYTES, "big") + one) for one in pieces])

    def open(self, data: bytes) -> bytes:
        """Return the bytes of all complete frames received so far, or raise `WireError`."""
        return b"".join([self._in.open(body) for body in self._reader.feed(data)])


class AgentProof(_Side):
    """The side that connects: `start`, then `receive` until `done`."""

    def __init__(
        self, key: bytes, generation: int, purpose: int = ATTEST, *, nonce: bytes | None = None
    ) -> None:
        super().__init__(key, nonce)
        self._spoken = _hello.pack(FIRST_BYTE, purpose, generation, self._nonce)
        self._proven = False

    def start(self) -> bytes:
        """Return the first bytes to send."""
        return self._spoken

    def receive(self, data: bytes) -> bytes:
        """Take what the store sent; return what to send."""
        if self._proven:
            answer = self._take(data, len(WELCOME))
            if answer not in (b"", WELCOME):
                raise ProofRefused("it does not accept the proof")
            self.done = bool(answer)
            return b""
        challenge = self._take(data, NONCE_BYTES + PROOF_BYTES)
        if not challenge:
            return b""
        self._spoken += challenge[:NONCE_BYTES]
        if not hmac.compare_digest(challenge[NONCE_BYTES:], self._proof(_STORE)):
            raise ProofRefused("it does not have the key of this generation")
        self._proven = True
        return self._proof(_AGENT)

    def stream(self) -> SealedStream:
        """Return the stream for everything after the proof, once `done`."""
        return SealedStream(self._proof(_FROM_AGENT), self._proof(_FROM_STORE))


class StoreProof(_Side):
    """The side that listens: `receive` until `done`. It accepts agents with one `purpose`."""

    def __init__(
        self, key: bytes, generation: int, purpose: int = ATTEST, *, nonce: bytes | None = None
    ) -> None:
        super().__init__(key, nonce)
        self._generation = generation
        self.purpose = purpose

    def receive(self, data: bytes) -> bytes:
        """Take what the agent sent; return what to send."""
        if not self._spoken:
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
            raise ProofRefused("its agent was started with another setting of store")
        if generation != self._generation:
            raise ProofRefused(f"it belongs to generation {generation}, not {self._generation}")
        self._spoken = hello + self._nonce
        return self._nonce + self._proof(_STORE)

    def stream(self) -> SealedStream:
        """Return the stream for everything after the proof, once `done`."""
        return SealedStream(self._proof(_FROM_STORE), self._proof(_FROM_AGENT))
