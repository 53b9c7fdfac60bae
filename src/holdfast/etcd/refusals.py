"""What etcd says when it does not do what was asked, and what a client may do about it. Pure.

Etcd's errors have a code of gRPC and a text. The text decides where it is known, because one code
stands for many things.
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec

from holdfast.core.etcd_calls import Problem, Trouble
from holdfast.wire.errors import quoted

NO_GATEWAY = (
    "it does not know /v3: this is an etcd older than 3.4, one whose gateway is off "
    "(enable-grpc-gateway), its peer port (2380), or no etcd"
)
TLS_ONLY = "it speaks TLS only: write https:// before it"
WANTS_USER = "it wants a user and a password"
WRONG_PASSWORD = "wrong user or password"  # noqa: S105 (a message)

# Codes of gRPC that the gateway passes on.
_DEADLINE_EXCEEDED, _PERMISSION_DENIED, UNAVAILABLE, _UNAUTHENTICATED = 4, 7, 14, 16
_NOT_FOUND = 404
_NO_SUCH_PATH = "Not Found"
OK = 200
SAID_CHARS_MAX = 60
"""What is shown of the words of something that is no etcd."""
_OF_PROXIES = (502, 503, 504)


class Handling(Enum):
    """What a client may do about an answer that is no success."""

    FINAL = "final"
    """Nothing was done, and nobody else will do it."""
    ELSEWHERE = "elsewhere"
    """Nothing was done, and another endpoint may do it, or this one in a moment."""
    UNSURE = "unsure"
    """It may have been done; another endpoint may be asked what does no harm twice."""
    RENEW_TOKEN = "renew token"  # noqa: S105 (not a password)
    """Nothing was done; it is worth trying again with a new token."""


class Refusal(msgspec.Struct, frozen=True):
    """No success: why, and what may be done about it."""

    problem: Problem
    handling: Handling = Handling.FINAL


class Inner(msgspec.Struct):
    """An error in a stream."""

    message: str = ""
    code: int = 0
    grpc_code: int = 0


class ErrorSaid(msgspec.Struct):
    """An error as the gateway writes it: in a stream, what matters is inside `error`."""

    message: str = ""
    code: int = 0
    error: str | Inner = ""

    @property
    def text(self) -> str:
        """Its words; empty if this is no error of etcd's."""
        return self.message or (self.error if isinstance(self.error, str) else self.error.message)

    @property
    def grpc_code(self) -> int:
        """Its code of gRPC, 0 if it has none."""
        inner = self.error
        return self.code or (0 if isinstance(inner, str) else inner.grpc_code or inner.code)


_error = msgspec.json.Decoder(ErrorSaid, strict=False)


def refusal_of(status: int, body: bytes) -> Refusal:
    """Return what an answer that is no success means."""
    try:
        said = _error.decode(body)
    except msgspec.MsgspecError:
        said = ErrorSaid()
    if said.text and said.text != _NO_SUCH_PATH:
        return classify(said.text, said.grpc_code)
    if status == _NOT_FOUND:
        return Refusal(Problem(Trouble.REFUSED, NO_GATEWAY), Handling.ELSEWHERE)
    if status in _OF_PROXIES:
        why = f"it answered HTTP {status}"
        return Refusal(Problem(Trouble.UNREACHABLE, why), Handling.UNSURE)
    words = quoted(body.decode(errors="replace").strip())
    if "HTTPS server" in words:
        return Refusal(Problem(Trouble.DENIED, TLS_ONLY), Handling.ELSEWHERE)
    why = f"it answered HTTP {status}, as no etcd does: {words}"
    return Refusal(Problem(Trouble.REFUSED, why), Handling.ELSEWHERE)


# Etcd's words and what they mean; the first that is found decides.
_MEANINGS: tuple[tuple[str, Trouble, Handling], ...] = (
    ("requested lease not found", Trouble.LEASE_GONE, Handling.FINAL),
    ("database space exceeded", Trouble.NO_SPACE, Handling.FINAL),
    ("required revision has been compacted", Trouble.COMPACTED, Handling.FINAL),
    ("request is too large", Trouble.REFUSED, Handling.FINAL),
    ("larger than max", Trouble.REFUSED, Handling.FINAL),
    ("no leader", Trouble.UNREACHABLE, Handling.ELSEWHERE),
    ("too many requests", Trouble.UNREACHABLE, Handling.ELSEWHERE),
    ("not capable", Trouble.UNREACHABLE, Handling.ELSEWHERE),
    ("leader changed", Trouble.UNREACHABLE, Handling.UNSURE),
    ("request timed out", Trouble.UNREACHABLE, Handling.UNSURE),
    ("server stopped", Trouble.UNREACHABLE, Handling.UNSURE),
    ("invalid auth token", Trouble.DENIED, Handling.RENEW_TOKEN),
    ("revision of auth store is old", Trouble.DENIED, Handling.RENEW_TOKEN),
    ("revision in header is old", Trouble.DENIED, Handling.RENEW_TOKEN),
    ("user name is empty", Trouble.DENIED, Handling.RENEW_TOKEN),
    ("permission denied", Trouble.DENIED, Handling.FINAL),
    ("invalid user ID or password", Trouble.DENIED, Handling.FINAL),
    ("password", Trouble.DENIED, Handling.FINAL),
    ("user name", Trouble.DENIED, Handling.FINAL),
)
_PREFIX = re.compile(r"(rpc error: code = \w+ desc = )?(etcdserver: )?(mvcc: )?")
_CLEARER = {
    "user name is empty": WANTS_USER,
    "invalid user ID or password": WRONG_PASSWORD,
}


def classify(text: str, code: int) -> Refusal:
    """Return what an error of etcd's means."""
    words = quoted(_PREFIX.sub("", text, count=1))
    for part, kind, handling in _MEANINGS:
        if part in text:
            return Refusal(Problem(kind, _CLEARER.get(part, words)), handling)
    if code in (UNAVAILABLE, _DEADLINE_EXCEEDED):
        return Refusal(Problem(Trouble.UNREACHABLE, words), Handling.UNSURE)
    if code in (_PERMISSION_DENIED, _UNAUTHENTICATED):
        return Refusal(Problem(Trouble.DENIED, words))
    return Refusal(Problem(Trouble.REFUSED, words))


def not_understood(error: Exception, said: bytes = b"") -> Refusal:
    """Return what to make of an answer that cannot be read; the other endpoints may be etcds."""
    words = quoted(said[: 4 * SAID_CHARS_MAX].decode(errors="replace").strip(), SAID_CHARS_MAX)
    why = f"its answer is not what an etcd says: {quoted(str(error))}"
    why += f": {words}" if words else ""
    return Refusal(Problem(Trouble.REFUSED, why), Handling.UNSURE)
