"""The handshake: two sides of a new connection find out whether they fit together.

::

    client                                          server
      Hello(versions, nonce)                 ->
                                             <-     Challenge(version, nonce, proof)
      Proof(proof)                           ->
                                             <-     Welcome(version)  or  Refused(why)

A side that has a token goes on only with a side that proved to have the same; a side without one
goes on only with a side without one. There is no "if possible", or anybody in between could take
the proof away. Either side may end it with a `Goodbye` or a `Refusal` that carries the reason; the
error that is raised has it as `HandshakeRefused.reply`.

Neither machine reads, writes or waits: the owner of the connection decodes each frame (by
`messages.decode_handshake`, from a reader of `HANDSHAKE_FRAME_BYTES_MAX`), calls `receive`, sends
what that returns, and closes the connection if the whole takes too long.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.core.protocol import WHY_CHARS_MAX
from holdfast.errors import InternalError
from holdfast.printable import one_line, quoted
from holdfast.wire.errors import BadMessage, HandshakeRefused, NotOurProtocol
from holdfast.wire.frames import encode_frame
from holdfast.wire.limits import NONCE_BYTES
from holdfast.wire.messages import (
    MAGIC,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Challenge,
    Goodbye,
    Hello,
    Proof,
    Refusal,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.wire.messages import Message

VARIABLE = "HOLDFAST_TOKEN"
FILE_VARIABLE = "HOLDFAST_TOKEN_FILE"
SETTINGS = f"{VARIABLE} or {FILE_VARIABLE}"
SERVER = b"holdfast coordinator"
CLIENT = b"holdfast agent"
JOB_TOKEN_PREFIX = b"holdfast-job-"
"""What the token of one job begins with; any other is a master token, good for all jobs."""
Versions = tuple[int, int]
OUR_VERSIONS: Versions = (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION)


def draw_nonce() -> bytes:
    """Return bytes that cannot be guessed."""
    return os.urandom(NONCE_BYTES)


def refusal(why: str, *, permanent: bool = True) -> bytes:
    """Return the frame that turns a client away, as with too many connections."""
    return encode_frame(Refusal(why=one_line(why, WHY_CHARS_MAX), permanent=permanent))


class _Handshake:
    def __init__(
        self,
        token: bytes | None,
        *,
        nonce: Callable[[], bytes] = draw_nonce,
        versions: Versions = OUR_VERSIONS,
    ) -> None:
        if token is not None and not token:
            raise InternalError("an empty token is none")
        self._token = token
        self._nonce = nonce()
        self._versions = versions
        self._version = 0
        self._done = False

    @property
    def done(self) -> bool:
        """Whether each side has accepted the other."""
        return self._done

    @property
    def version(self) -> int:
        """The version that both sides speak from now on."""
        if not self._done:
            raise InternalError("asked for the version before the handshake was done")
        return self._version

    def _open(self) -> None:
        if self._done:
            raise InternalError("a message for a handshake that is done")


class ClientHandshake(_Handshake):
    """The side that connects: `start`, then `receive` until `done`."""

    _challenged = False

    def start(self) -> bytes:
        """Return the first bytes to send."""
        low, high = self._versions
        return encode_frame(Hello(version_min=low, version_max=high, nonce=self._nonce))

    def receive(self, message: Message) -> bytes:
        """Take the server's next message; return what to send, nothing once it is `done`."""
        self._open()
        match message:
            case Refusal():
                raise HandshakeRefused(
                    f"the coordinator refused: {one_line(message.why, WHY_CHARS_MAX)}",
                    permanent=message.permanent,
                )
            case Goodbye():
                raise HandshakeRefused(
                    f"the coordinator closed the connection: {one_line(message.why, WHY_CHARS_MAX)}",
                    permanent=False,
                )
            case Challenge() if not self._challenged:
                return self._answer(message)
            case Welcome(version=version) if self._challenged and version == self._version:
                self._done = True
                return b""
        raise BadMessage(f"unexpected {type(message).__name__} in the handshake")

    def _answer(self, challenge: Challenge) -> bytes:
        low, high = self._versions
        if not low <= challenge.version <= high:
            raise self._leave(
                f"the coordinator chose protocol version {challenge.version}, "
                f"the client speaks {_range(self._versions)}"
            )
        if self._token is None:
            if challenge.token_wanted:
                raise self._leave(
                    "the coordinator wants a token and the client has none: "
                    f"set {SETTINGS} to the coordinator's token where the client runs"
                )
            proof = b""
        else:
            proof = self._proof(self._token, challenge)
        self._challenged = True
        self._version = challenge.version
        return encode_frame(Proof(proof=proof))

    def _proof(self, token: bytes, challenge: Challenge) -> bytes:
        """Judge the server's proof and return our own."""
        if not challenge.token_wanted or not challenge.proof:
            raise self._leave(
                "the coordinator has no token and the client has one: set the same token where "
                f"the coordinator runs ({SETTINGS}), or remove the client's"
            )

        def proof_of(side: bytes) -> bytes:
            return prove(
                token,
                side,
                offered=self._versions,
                version=challenge.version,
                client_nonce=self._nonce,
                server_nonce=challenge.nonce,
            )

        if not same(challenge.proof, proof_of(SERVER)):
            raise self._leave(
                "the coordinator's token is not the client's: "
                f"set {SETTINGS} to the same on both sides"
            )
        return proof_of(CLIENT)

    def _leave(self, why: str) -> HandshakeRefused:
        return HandshakeRefused(why, reply=encode_frame(Goodbye(why=why)))


class ServerHandshake(_Handshake):
    """The side that listens: `receive` until `done`."""

    _hello: Hello | None = None

    def receive(self, message: Message) -> bytes:
        """Take the client's next message and return what to send."""
        self._open()
        match message:
            case Goodbye():
                raise HandshakeRefused(f"the client left: {one_line(message.why, WHY_CHARS_MAX)}")
            case Hello() if self._hello is None:
                return self._challenge(message)
            case Proof() if self._hello is not None:
                return self._welcome(self._hello, message)
        raise BadMessage(f"unexpected {type(message).__name__} in the handshake")

    def _challenge(self, hello: Hello) -> bytes:
        if hello.magic != MAGIC:
            raise NotOurProtocol(
                f"the first message has {quoted(repr(hello.magic))}, not {MAGIC!r}"
            )
        offered = (hello.version_min, hello.version_max)
        version = min(hello.version_max, self._versions[1])
        if version < max(hello.version_min, self._versions[0]):
            raise self._refuse(
                f"the client speaks protocol version {_range(offered)}, the coordinator "
                f"{_range(self._versions)}: install the same Holdfast on both sides"
            )
        self._hello = hello
        self._version = version
        proof = b"" if self._token is None else self._proof(self._token, hello, SERVER)
        return encode_frame(
            Challenge(
                version=version,
                nonce=self._nonce,
                token_wanted=self._token is not None,
                proof=proof,
            )
        )

    def _welcome(self, hello: Hello, theirs: Proof) -> bytes:
        if self._token is None:
            if theirs.proof:
                raise self._refuse("the client proved a token and the coordinator has none")
        elif not same(theirs.proof, self._proof(self._token, hello, CLIENT)):
            raise self._refuse(
                f"the client's token is not the coordinator's: set {SETTINGS} "
                "to the same on both sides"
            )
        self._done = True
        return encode_frame(Welcome(version=self._version))

    def _proof(self, token: bytes, hello: Hello, side: bytes) -> bytes:
        return prove(
            token,
            side,
            offered=(hello.version_min, hello.version_max),
            version=self._version,
            client_nonce=hello.nonce,
            server_nonce=self._nonce,
        )

    def _refuse(self, why: str) -> HandshakeRefused:
        return HandshakeRefused(why, reply=refusal(why))


def _range(versions: Versions) -> str:
    low, high = versions
    return str(low) if low == high else f"{low} to {high}"


def prove(
    token: bytes,
    side: bytes,
    *,
    offered: tuple[int, int],
    version: int,
    client_nonce: bytes,
    server_nonce: bytes,
) -> bytes:
    """Return the proof that `side` (`SERVER` or `CLIENT`) knows the token.

    An HMAC-SHA256 over what both sides sent so far, keyed by the token, with a label for the side
    that makes it; so the proof of one side, sent back to it, proves nothing.

    `offered` is the client's range of versions: nobody in between can make two sides settle on an
    older version than they would have.
    """
    import hashlib
    import hmac

    text = _with_lengths(side, b"%d %d %d" % (*offered, version), client_nonce, server_nonce)
    # HMAC fills a short key up with zeros, so that `x` and `x\0` would be the same to it.
    return hmac.digest(hashlib.sha256(token).digest(), text, "sha256")


def job_token(token: bytes, run_id: str) -> bytes:
    """Return the token of one job: derived from a master token, or the job's own as it is.

    Whoever has it can speak for that job alone, and cannot find the master token by it.
    """
    if is_job_token(token):
        return token
    import hashlib
    import hmac

    text = _with_lengths(b"holdfast job token", run_id.encode(errors="surrogatepass"))
    key = hmac.digest(hashlib.sha256(token).digest(), text, "sha256")
    return JOB_TOKEN_PREFIX + key.hex().encode()


def is_job_token(token: bytes) -> bool:
    """Whether a token is good for one job only."""
    return token.startswith(JOB_TOKEN_PREFIX)


def _with_lengths(*parts: bytes) -> bytes:
    """Join parts with their lengths, so that no two different lists make the same text."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def same(proof: bytes, expected: bytes) -> bool:
    """Compare in a time that does not depend on where the two differ."""
    import hmac

    return hmac.compare_digest(proof, expected)
