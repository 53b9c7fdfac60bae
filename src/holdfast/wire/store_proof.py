"""Proves to the workers' store that an agent is a member of the generation that the store serves.

Workers use PyTorch's protocol, which has no authentication. The agent therefore opens a separate
connection and proves its membership. The first byte is not a valid operation of PyTorch's protocol::

    agent                                         store
      hello: purpose, generation, nonce    ->
                                           <-     nonce, proof
      proof                                ->
                                           <-     welcome

Each side proves that it has the key of the generation, which only members receive (`View.store_key`). Both sides
seal everything after the welcome (`SealedStream`). If the purpose is `FORWARD`, that is the traffic of one worker. If
it is `ATTEST`, the store asks which user owns each new connection from the agent's host::

    agent                                         store
      ready                                ->
                                           <-     query: number, address and port of the connection
      answer: number, whose it is, user    ->

No class performs I/O. The owner of the connection passes received bytes to `receive`, sends the
bytes that `receive` returns, and closes the connection if the exchange takes too long. A rejected
proof raises `ProofRefused`.
"""

from __future__ import annotations

import hmac
import os
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from holdfast.wire.frames import HEADER_BYTES, TAG_BYTES, FrameReader, Seal
from holdfast.wire.wire_errors import BadMessage, ProofRefused

if TYPE_CHECKING:
    from typing import Any

FIRST_BYTE = 0xA5
ATTEST = 1
"""Purpose: attest that this connection's host belongs to the job, and answer the store's queries."""
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
QUERIES_MAX = 256
"""How many queries one agent may have to answer at once. They fit into the kernel's buffers."""

# Whose a connection is; if several agents of a host answer, the highest counts, unless one answers `OWN`.
OWN = 1
NOT_FOUND = 2
"""The agent's host has no such connection."""
NOT_REPORTED = 3
"""The kernel of the agent's host does not report owners."""
OTHER = 4

_query = Struct("<QH16s")
_answer = Struct("<QBI")
_ready = Struct("<B")


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


# Queries for the owners of connections.

_MAPPED = bytes(10) + b"\xff\xff"


class OwnerQuery(NamedTuple):
    """The store asks whose a connection from the agent's host is."""

    number: int
    host: bytes
    """The address from which the connection comes: 4 bytes for IPv4, 16 for IPv6."""
    port: int


class OwnerAnswer(NamedTuple):
    """The agent's answer."""

    number: int
    whose: int
    user: int = 0
    """The owner, if it is another user."""


class OwnerQueries:
    """The store's side of an attested connection."""

    def __init__(self, stream: SealedStream) -> None:
        self._stream = stream
        self._unanswered: set[int] = set()
        self.is_ready = False
        """Whether the agent answers queries now."""

    @property
    def has_room(self) -> bool:
        return len(self._unanswered) < QUERIES_MAX

    def query(self, number: int, host: bytes, port: int) -> bytes:
        """Return the bytes that ask for the owner of a connection; `number` identifies it."""
        self._unanswered.add(number)
        address = host if len(host) == 16 else _MAPPED + host
        return self._stream.seal(_query.pack(number, port, address))

    def receive(self, data: bytes) -> list[OwnerAnswer]:
        """Return the answers in these bytes, or raise `WireError`."""
        opened = self._stream.open(data)
        if opened and not self.is_ready:
            self.is_ready = True
            opened = opened[_ready.size :]
        answers = [OwnerAnswer(*fields) for fields in _unpack(_answer, opened)]
        for one in answers:
            if one.number not in self._unanswered or not OWN <= one.whose <= OTHER:
                raise BadMessage("an answer without a query")
            self._unanswered.remove(one.number)
        return answers


class OwnerAnswers:
    """The agent's side of an attested connection."""

    def __init__(self, stream: SealedStream) -> None:
        self._stream = stream

    def start(self) -> bytes:
        """Return the first bytes to send."""
        return self._stream.seal(_ready.pack(1))

    def receive(self, data: bytes) -> list[OwnerQuery]:
        """Return the queries in these bytes, or raise `WireError`."""
        return [
            OwnerQuery(number, address.removeprefix(_MAPPED), port)
            for number, port, address in _unpack(_query, self._stream.open(data))
        ]

    def answer(self, one: OwnerAnswer) -> bytes:
        """Return the bytes of an answer."""
        return self._stream.seal(_answer.pack(*one))


def _unpack(record: Struct, data: bytes) -> list[tuple[Any, ...]]:
    """Return the records that these bytes consist of; each frame has one or more."""
    if len(data) % record.size:
        raise BadMessage("a message of an unexpected size")
    return list(record.iter_unpack(data))
