"""The handshake: both sides of a new connection authenticate each other and compare versions.

::

    client                                          server
      Hello(version, nonce, job, endpoint)   ->
                                             <-     Challenge(nonce, proof)
      Proof(proof)                           ->
                                             <-     Welcome  or  Refusal(why)

A side with a token accepts only a side that proves the same token. A side without a token accepts only a
side without one. A token is never optional: otherwise an attacker in the middle could remove the proof.
Either side may end the handshake with a `Goodbye` or a `Refusal` that carries the reason
(`HandshakeRefused.reply`).

**Keys.** A master token authorizes all jobs. Both sides derive the token of one job from the master token
and the run id. A node or a coordinator may have only the job's token. Each proof covers every byte
sent before it, so a proof for one job, endpoint or version is invalid for another. With a token, the
handshake also yields two keys, and both sides seal everything after the client's proof (`wire.frames`),
including the `Welcome`. An attacker who relays the handshake can therefore only continue to relay.

Before the server's proof, anyone can send a refusal. A client with a token therefore does not treat such a
refusal as permanent. For this reason the server refuses a client of another version only after both proofs: the
refusal is sealed, and the client gives up at once. The messages of the handshake and the proofs must therefore
be the same in all versions.

Neither class performs I/O. The owner of the connection passes the body of each frame (from a reader of
`HANDSHAKE_FRAME_BYTES_MAX`) to `receive`, sets the reader's `tag_bytes`, sends the bytes that `receive`
returns, and closes the connection if the handshake takes too long.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from holdfast.core.limits import NAME_CHARS_MAX, WHY_CHARS_MAX
from holdfast.defaults import PROTOCOL_VERSION
from holdfast.errors import InternalError
from holdfast.printable import one_line, quoted
from holdfast.wire.frames import HEADER_BYTES, TAG_BYTES, Seal, encode_frame
from holdfast.wire.messages import (
    MAGIC,
    Challenge,
    Goodbye,
    Hello,
    Proof,
    Refusal,
    Welcome,
    decode_handshake,
)
from holdfast.wire.wire_errors import BadMessage, HandshakeRefused, NotOurProtocol
from holdfast.wire.wire_limits import NONCE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "HOLDFAST_TOKEN"
FILE_VARIABLE = "HOLDFAST_TOKEN_FILE"
OWN_FILE = "~/.holdfast/token"
# Hints for mismatched tokens. Both sides may show them, so they name the side to change.
CONFIGURE_TOKEN = (
    f"remove auth=none there, or set auth=token to use {OWN_FILE}, or {FILE_VARIABLE} or {VARIABLE}"
)
USE_SAME_TOKEN = (
    f"copy {OWN_FILE} from one machine to the other, or set {FILE_VARIABLE} or {VARIABLE} to the same "
    "value on both"
)
USE_JOB_TOKEN = (
    f"use the job's token ({VARIABLE}, {FILE_VARIABLE}, with --ha also {OWN_FILE}); or another agent "
    "uses that port now"
)
SERVER = b"holdfast coordinator"
COORDINATOR = "the coordinator"
JOB_TOKEN_PREFIX = b"holdfast-job-"
"""The prefix of a token for one job. A token without it is a master token, valid for all jobs."""
READ_ONLY_PREFIX = b"holdfast-read-only-"
"""The prefix of a read-only token."""
READ_ONLY_ALL_PREFIX = READ_ONLY_PREFIX + b"all-"
"""The prefix of a read-only token for all jobs. Its client sends an empty run id."""
PROOF_BYTES = 32
SEAL_KEY_BYTES = 32


def random_nonce() -> bytes:
    """Return unpredictable bytes."""
    return os.urandom(NONCE_BYTES)


def refusal(why: str, *, permanent: bool = True) -> bytes:
    """Return the frame that refuses a client, for example because of too many connections."""
    return encode_frame(Refusal(why=one_line(why, WHY_CHARS_MAX), permanent=permanent))


class _Handshake:
    """One side of a handshake.

    `key_for` replaces the key of the token (see `control_key`). `server` names the listening side in
    messages.
    """

    def __init__(
        self,
        token: bytes | None,
        *,
        key_for: Callable[[Hello], bytes] | None = None,
        server: str = COORDINATOR,
        nonce: Callable[[], bytes] = random_nonce,
    ) -> None:
        if token is not None and not token:
            raise InternalError("the token is empty")
        if token is not None and key_for is None:
            key_for = lambda hello: _key(token, hello.run_id, read_only=hello.read_only)  # noqa: E731
        self._key_for = key_for
        self._server = server
        self._remedy = USE_SAME_TOKEN if server is COORDINATOR else USE_JOB_TOKEN
        self._nonce = nonce()
        self._transcript: blake2b | None = None  # All bytes so far, keyed; None without a key.
        self._seals: tuple[Seal, Seal] | None = None
        self._done = False

    @property
    def done(self) -> bool:
        """Whether both sides have accepted each other."""
        return self._done

    @property
    def seals(self) -> tuple[Seal, Seal] | None:
        """The seals for sending and for receiving, after the handshake; None without a token."""
        self._require_done()
        return self._seals

    @property
    def tag_bytes(self) -> int | None:
        """The `FrameReader.tag_bytes` for the next frame, to set after each `receive`."""
        if self._seals is not None:
            return TAG_BYTES
        return 0 if self._done else None

    def _require_done(self) -> None:
        if not self._done:
            raise InternalError("the handshake is not complete")

    def _require_open(self) -> None:
        if self._done:
            raise InternalError("the handshake is already complete")

    def _derive_seals(self, transcript: blake2b, *, serving: bool) -> None:
        """Derive the seals from the transcript, after both proofs."""
        keys = transcript.digest()
        of_client, of_server = Seal(keys[:SEAL_KEY_BYTES]), Seal(keys[SEAL_KEY_BYTES:])
        self._seals = (of_server, of_client) if serving else (of_client, of_server)
        self._transcript = None


class ClientHandshake(_Handshake):
    """The connecting side: call `start`, then `receive` until `done`.

    `run_id` is the job, or empty for an operator. `host` and `port` are the endpoint as the user wrote it.
    `endpoint_index` is its index in a list of endpoints.
    """

    _challenged = False

    def __init__(
        self,
        token: bytes | None,
        *,
        run_id: str = "",
        host: str = "",
        port: int = 0,
        endpoint_index: int = 0,
        read_only: bool = False,
        key_for: Callable[[Hello], bytes] | None = None,
        server: str = COORDINATOR,
        nonce: Callable[[], bytes] = random_nonce,
    ) -> None:
        super().__init__(token, key_for=key_for, server=server, nonce=nonce)
        self._read_only = read_only or (token is not None and token.startswith(READ_ONLY_PREFIX))
        self._run_id, self._host, self._port, self._endpoint_index = (
            run_id,
            host,
            port,
            endpoint_index,
        )

    def start(self) -> bytes:
        """Return the first bytes to send."""
        hello = Hello(
            nonce=self._nonce,
            run_id=self._run_id,
            host=one_line(self._host, NAME_CHARS_MAX),
            port=self._port,
            endpoint_index=self._endpoint_index,
            read_only=self._read_only,
        )
        frame = encode_frame(hello)
        if self._key_for is not None:
            self._transcript = _transcript_hash(self._key_for(hello), frame)
        return frame

    def receive(self, body: bytes) -> bytes:
        """Process the body of the server's next frame; return the bytes to send, if any."""
        self._require_open()
        if self._seals is not None:
            body = self._seals[1].open(body)
        message = decode_handshake(body)
        is_authenticated = self._key_for is None or self._seals is not None
        match message:
            case Refusal():
                raise HandshakeRefused(
                    f"{self._server} refused: {one_line(message.why, WHY_CHARS_MAX)}",
                    permanent=message.permanent and is_authenticated,
                )
            case Goodbye():
                raise HandshakeRefused(
                    f"{self._server} closed the connection: {one_line(message.why, WHY_CHARS_MAX)}",
                    permanent=False,
                )
            case Challenge() if not self._challenged:
                return self._answer(message, body)
            case Welcome() if self._challenged:
                self._done = True
                return b""
        raise BadMessage(f"unexpected {type(message).__name__} in the handshake")

    def _answer(self, challenge: Challenge, body: bytes) -> bytes:
        if self._key_for is None:
            if challenge.token_wanted:
                raise self._goodbye(
                    f"{self._server} requires a token and the client has none; on the client's machine: "
                    + CONFIGURE_TOKEN
                )
            self._challenged = True
            return encode_frame(Proof())
        if not challenge.token_wanted or not challenge.proof:
            raise self._goodbye(
                f"{self._server} has no token and the client has one; on the machine of {self._server}: "
                + CONFIGURE_TOKEN
            )
        transcript = self._transcript
        assert transcript is not None
        if not equal_in_constant_time(
            challenge.proof, _proof_of_server(transcript, challenge.nonce)
        ):
            raise self._goodbye(
                f"{self._server} has a different token than the client: {self._remedy}"
            )
        transcript.update(_framed(body))
        frame = encode_frame(Proof(proof=_proof_of_client(transcript)))
        transcript.update(frame)
        self._derive_seals(transcript, serving=False)
        self._challenged = True
        return frame

    def _goodbye(self, why: str) -> HandshakeRefused:
        return HandshakeRefused(why, reply=encode_frame(Goodbye(why=why)))


class ServerHandshake(_Handshake):
    """The listening side: call `receive` until `done`.

    After a client has authenticated itself, `check_hello` checks its hello. It may raise `HandshakeRefused`; the
    client receives the reason.
    """

    _hello: Hello | None = None

    def __init__(
        self,
        token: bytes | None,
        *,
        check_hello: Callable[[Hello], None] | None = None,
        key_for: Callable[[Hello], bytes] | None = None,
        server: str = COORDINATOR,
        nonce: Callable[[], bytes] = random_nonce,
    ) -> None:
        super().__init__(token, key_for=key_for, server=server, nonce=nonce)
        self._check_hello = check_hello

    def receive(self, body: bytes) -> bytes:
        """Process the body of the client's next frame; return the bytes to send."""
        self._require_open()
        message = decode_handshake(body)
        match message:
            case Goodbye():
                raise HandshakeRefused(
                    f"the client closed the connection: {one_line(message.why, WHY_CHARS_MAX)}"
                )
            case Hello() if self._hello is None:
                return self._challenge(message, body)
            case Proof() if self._hello is not None:
                return self._welcome(self._hello, message, body)
        raise BadMessage(f"unexpected {type(message).__name__} in the handshake")

    def _challenge(self, hello: Hello, body: bytes) -> bytes:
        if hello.magic != MAGIC:
            raise NotOurProtocol(
                f"the first message has {quoted(repr(hello.magic))}, not {MAGIC!r}"
            )
        self._hello = hello
        if self._key_for is None:
            return encode_frame(Challenge(nonce=self._nonce, token_wanted=False))
        self._transcript = transcript = _transcript_hash(self._key_for(hello), _framed(body))
        proof = _proof_of_server(transcript, self._nonce)
        frame = encode_frame(Challenge(nonce=self._nonce, token_wanted=True, proof=proof))
        transcript.update(frame)
        return frame

    def _welcome(self, hello: Hello, theirs: Proof, body: bytes) -> bytes:
        transcript = self._transcript
        if transcript is None:
            if theirs.proof:
                raise self._refuse(f"the client has a token and {self._server} has none")
        else:
            if not equal_in_constant_time(theirs.proof, _proof_of_client(transcript)):
                raise self._refuse(
                    f"the client has a different token than {self._server}: {self._remedy}"
                )
            transcript.update(_framed(body))
            self._derive_seals(transcript, serving=True)
        if hello.version != PROTOCOL_VERSION:
            raise self._refuse(
                f"the client speaks protocol version {hello.version}, {self._server} "
                f"{PROTOCOL_VERSION}: install the same Holdfast on both sides"
            )
        if self._check_hello is not None:
            try:
                self._check_hello(hello)
            except HandshakeRefused as refused:
                refused.reply = self._sealed(refusal(refused.why, permanent=refused.permanent))
                raise
        self._done = True
        return self._sealed(encode_frame(Welcome()))

    def _sealed(self, frame: bytes) -> bytes:
        return self._seals[0].seal(frame) if self._seals is not None else frame

    def _refuse(self, why: str) -> HandshakeRefused:
        return HandshakeRefused(why, reply=self._sealed(refusal(why, permanent=True)))


# Tokens and keys.


def job_token(token: bytes, run_id: str) -> bytes:
    """Derive the token of one job from a master token; return the token of a job unchanged.

    The token of a job is valid for that job only, and its holder cannot derive the master token. An
    operator uses the token of the empty run id.
    """
    if is_job_token(token):
        return token
    text = _with_lengths(b"holdfast job token", run_id.encode(errors="surrogatepass"))
    key = hmac.digest(hashlib.sha256(token).digest(), text, "sha256")
    return JOB_TOKEN_PREFIX + key.hex().encode()


def read_only_token(token: bytes, run_id: str) -> bytes:
    """Derive the read-only token of one job, or of all jobs for an empty run id.

    Return a read-only token unchanged. Its holder cannot derive any other token from it.
    """
    if token.startswith(READ_ONLY_PREFIX):
        return token
    text = _with_lengths(b"holdfast read-only token")
    key = hmac.digest(hashlib.sha256(job_token(token, run_id)).digest(), text, "sha256")
    is_for_all = not run_id and not is_job_token(token)
    prefix = READ_ONLY_ALL_PREFIX if is_for_all else READ_ONLY_PREFIX + b"job-"
    return prefix + key.hex().encode()


def is_job_token(token: bytes) -> bool:
    """Whether a token is valid for one job only."""
    return token.startswith(JOB_TOKEN_PREFIX)


def tls_key(token: bytes, run_id: str) -> bytes:
    """Return the TLS pre-shared key of a job (`tls=psk`)."""
    return blake2b(b"holdfast tls", key=_key(token, run_id), digest_size=32).digest()


def control_key(
    agent_secret: bytes, token: bytes | None, run_id: str, *, read_only: bool = False
) -> bytes:
    """Return the key of an agent's control port, from the agent's secret and the token, if any."""
    own = _key(token, run_id, read_only=read_only) if token is not None else b""
    return blake2b(
        _with_lengths(b"holdfast control", agent_secret), key=own, digest_size=32
    ).digest()


@lru_cache(maxsize=64)
def _key(token: bytes, run_id: str, *, read_only: bool = False) -> bytes:
    """Return the key of a job. It is cached, because all nodes of a job use the same key."""
    if read_only:
        return hashlib.sha256(read_only_token(token, run_id)).digest()
    # HMAC pads a short key with zeros, so `x` and `x\0` would be equal.
    return hashlib.sha256(job_token(token, run_id)).digest()


# Each proof, and the keys of the seals, are the keyed BLAKE2b of all earlier frames of both sides. The
# server's proof also covers its nonce. No two of these values are equal, so an attacker cannot reuse a proof
# by sending it back.


def _transcript_hash(key: bytes, frame: bytes) -> blake2b:
    return blake2b(frame, key=key, digest_size=2 * SEAL_KEY_BYTES)


def _proof_of_server(transcript: blake2b, nonce: bytes) -> bytes:
    more = transcript.copy()
    more.update(b"%b %b" % (SERVER, nonce))
    return more.digest()[:PROOF_BYTES]


def _proof_of_client(transcript: blake2b) -> bytes:
    return transcript.digest()[:PROOF_BYTES]


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def _with_lengths(*parts: bytes) -> bytes:
    """Join parts with their lengths, so that different lists yield different bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def equal_in_constant_time(proof: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(proof, expected)
