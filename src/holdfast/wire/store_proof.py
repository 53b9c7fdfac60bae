"""How an agent proves to the workers' store that it is a member of the generation it serves.

PyTorch's protocol, in which workers speak to the store, asks nobody who he is. An agent says
something else first, on a connection of its own, whose first byte is no operation there::

    agent                                         store
      hello: purpose, generation, nonce    ->
                                           <-     nonce, proof
      proof                                ->
                                           <-     welcome

Both prove the key of the generation, which its members alone are told (`View.store_key`). Where the
agent is to `FORWARD` what a worker says, all that follows is sealed (`SealedStream`). Neither machine
reads, writes or waits: the owner of the connection calls `receive` with what came, sends what that
returns, and closes the connection if the whole takes too long. What cannot be accepted raises
`ProofRefused`.
"""

from __future__ import annotations

import hmac
import os
from struct import Struct

from holdfast.wire.errors import ProofRefused
from holdfast.wire.frames import HEADER_BYTES, FrameReader
from holdfast.wire.sealing import TAG_BYTES, Seal

FIRST_BYTE = 0xA5
VOUCH = 1
"""Workers on the host of this connection are of this job."""
FORWARD = 2
"""What follows is what one worker says, and what it is answered."""
WELCOME = b"\x01"
NONCE_BYTES = 32
PROOF_BYTES = 32

_hello = Struct(f"<BBQ{NONCE_BYTES}s")
_AGENT, _STORE = b"holdfast agent", b"holdfast workers' store"
_FROM_AGENT, _FROM_STORE = b"holdfast sealed by the agent", b"holdfast sealed by the store"
CHUNK_BYTES = 64 * 1024
"""Of what is forwarded, so much is sealed at once."""


class _Side:
    def __init__(self, key: bytes, nonce: bytes | None) -> None:
        self._key = key
        self._nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        self._received = b""
        self._spoken = b""  # All that both have said, before the proofs.
        self.done = False

    def _take(self, data: bytes, count: int) -> bytes:
        """Return the next `count` bytes, or nothing while they are not all there."""
        self._received += data
        if len(self._received) > count:  # Neither speaks before it is its turn.
            raise ProofRefused("it sent more than it was asked for")
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
        """Return what to send for some bytes."""
        seal = self._out.seal
        starts = range(0, len(data), CHUNK_BYTES)
        pieces = [data[at : at + CHUNK_BYTES] for at in starts]
        return b"".join([seal(len(one).to_bytes(HEADER_BYTES, "big") + one) for one in pieces])

    def open(self, data: bytes) -> bytes:
        """Return the bytes that are whole in what came, or raise `WireError`."""
        return b"".join([self._in.open(body) for body in self._reader.feed(data)])


class AgentProof(_Side):
    """The side that connects: `start`, then `receive` until `done`."""

    def __init__(
        self, key: bytes, generation: int, purpose: int = VOUCH, *, nonce: bytes | None = None
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
        """Return what follows, once it is `done`."""
        return SealedStream(self._proof(_FROM_AGENT), self._proof(_FROM_STORE))


class StoreProof(_Side):
    """The side that listens: `receive` until `done`. It accepts agents with one `purpose`."""

    def __init__(
        self, key: bytes, generation: int, purpose: int = VOUCH, *, nonce: bytes | None = None
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
            raise ProofRefused(f"it is of generation {generation}, not {self._generation}")
        self._spoken = hello + self._nonce
        return self._nonce + self._proof(_STORE)

    def stream(self) -> SealedStream:
        """Return what follows, once it is `done`."""
        return SealedStream(self._proof(_FROM_STORE), self._proof(_FROM_AGENT))
