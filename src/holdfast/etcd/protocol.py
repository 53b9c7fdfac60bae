"""What etcd says when it does not do what was asked, and what a client may do about it. Pure.

Etcd's errors have a code of gRPC and a text. The text decides where it is known, because one code
stands for many things.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import msgspec

from holdfast.core.etcd.calls import (
    Answer,
    Change,
    Compare,
    Delete,
    Field,
    Get,
    Grant,
    Granted,
    KeepAlive,
    KeptAlive,
    KeyValue,
    Op,
    Problem,
    ProblemKind,
    Put,
    Request,
    Revoke,
    Revoked,
    Txn,
    TxnDone,
)
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
        return Refusal(Problem(ProblemKind.REFUSED, NO_GATEWAY), Handling.ELSEWHERE)
    if status in _OF_PROXIES:
        why = f"it answered HTTP {status}"
        return Refusal(Problem(ProblemKind.UNREACHABLE, why), Handling.UNSURE)
    words = quoted(body.decode(errors="replace").strip())
    if "HTTPS server" in words:
        return Refusal(Problem(ProblemKind.DENIED, TLS_ONLY), Handling.ELSEWHERE)
    why = f"it answered HTTP {status}, as no etcd does: {words}"
    return Refusal(Problem(ProblemKind.REFUSED, why), Handling.ELSEWHERE)


# Etcd's words and what they mean; the first that is found decides.
_MEANINGS: tuple[tuple[str, ProblemKind, Handling], ...] = (
    ("requested lease not found", ProblemKind.LEASE_GONE, Handling.FINAL),
    ("database space exceeded", ProblemKind.NO_SPACE, Handling.FINAL),
    ("required revision has been compacted", ProblemKind.COMPACTED, Handling.FINAL),
    ("request is too large", ProblemKind.REFUSED, Handling.FINAL),
    ("larger than max", ProblemKind.REFUSED, Handling.FINAL),
    ("no leader", ProblemKind.UNREACHABLE, Handling.ELSEWHERE),
    ("too many requests", ProblemKind.UNREACHABLE, Handling.ELSEWHERE),
    ("not capable", ProblemKind.UNREACHABLE, Handling.ELSEWHERE),
    ("leader changed", ProblemKind.UNREACHABLE, Handling.UNSURE),
    ("request timed out", ProblemKind.UNREACHABLE, Handling.UNSURE),
    ("server stopped", ProblemKind.UNREACHABLE, Handling.UNSURE),
    ("invalid auth token", ProblemKind.DENIED, Handling.RENEW_TOKEN),
    ("revision of auth store is old", ProblemKind.DENIED, Handling.RENEW_TOKEN),
    ("revision in header is old", ProblemKind.DENIED, Handling.RENEW_TOKEN),
    ("user name is empty", ProblemKind.DENIED, Handling.RENEW_TOKEN),
    ("permission denied", ProblemKind.DENIED, Handling.FINAL),
    ("invalid user ID or password", ProblemKind.DENIED, Handling.FINAL),
    ("password", ProblemKind.DENIED, Handling.FINAL),
    ("user name", ProblemKind.DENIED, Handling.FINAL),
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
        return Refusal(Problem(ProblemKind.UNREACHABLE, words), Handling.UNSURE)
    if code in (_PERMISSION_DENIED, _UNAUTHENTICATED):
        return Refusal(Problem(ProblemKind.DENIED, words))
    return Refusal(Problem(ProblemKind.REFUSED, words))


def not_understood(error: Exception, said: bytes = b"") -> Refusal:
    """Return what to make of an answer that cannot be read; the other endpoints may be etcds."""
    words = quoted(said[: 4 * SAID_CHARS_MAX].decode(errors="replace").strip(), SAID_CHARS_MAX)
    why = f"its answer is not what an etcd says: {quoted(str(error))}"
    why += f": {words}" if words else ""
    return Refusal(Problem(ProblemKind.REFUSED, why), Handling.UNSURE)


# Requests and answers in the words of etcd's JSON gateway. Pure: bytes in, values out.
#
# Keys and values are base64 there, and numbers of 64 bits are strings; msgspec reads and writes
# both.
# An answer that is no success becomes a `Refusal`: the problem, and what a client may do about it.
#
# A transaction that only reads or deletes one range, whatever there is, goes as a plain request:
# an
# etcd without space takes those, but no transaction at all.


RANGE, DELETE_RANGE = "/v3/kv/range", "/v3/kv/deleterange"
TXN, GRANT, KEEP_ALIVE = "/v3/kv/txn", "/v3/lease/grant", "/v3/lease/keepalive"
REVOKE, WATCH, AUTHENTICATE = "/v3/lease/revoke", "/v3/watch", "/v3/auth/authenticate"

# What etcd sends, as far as it matters here.


class _Header(msgspec.Struct):
    revision: int = 0


class _Range(msgspec.Struct):
    kvs: tuple[KeyValue, ...] = ()


class _Deleted(msgspec.Struct):
    deleted: int = 0


class _Result(msgspec.Struct):
    response_range: _Range | None = None
    response_delete_range: _Deleted | None = None


class _TxnAnswer(msgspec.Struct):
    header: _Header
    succeeded: bool = False
    responses: tuple[_Result, ...] = ()


class _PlainAnswer(msgspec.Struct):
    """To a plain request; as if it were a transaction."""

    header: _Header
    kvs: tuple[KeyValue, ...] = ()
    deleted: int = 0


class _Lease(msgspec.Struct):
    ID: int
    TTL: int = 0


class _LeaseLine(msgspec.Struct):
    result: _Lease


class _Authenticated(msgspec.Struct):
    token: str


class _Event(msgspec.Struct):
    kv: KeyValue
    type: str = "PUT"


class _WatchResult(msgspec.Struct):
    header: _Header
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[_Event, ...] = ()


class _WatchLine(msgspec.Struct):
    result: _WatchResult | None = None
    error: Inner | None = None


class News(msgspec.Struct, frozen=True):
    """One line of a watch that is no end of it; the first one has no changes."""

    revision: int
    """Of the last change: etcd's own may be ahead of what it has told so far."""
    changes: tuple[Change, ...]


_txn = msgspec.json.Decoder(_TxnAnswer, strict=False)
_plain = msgspec.json.Decoder(_PlainAnswer, strict=False)
_lease = msgspec.json.Decoder(_Lease, strict=False)
_lease_line = msgspec.json.Decoder(_LeaseLine, strict=False)
_watch_line = msgspec.json.Decoder(_WatchLine, strict=False)
_authenticated = msgspec.json.Decoder(_Authenticated)
_encoder = msgspec.json.Encoder()


# Requests.


def encode(request: Request) -> tuple[str, bytes]:
    """Return the path and the body of a request."""
    if isinstance(request, Txn):
        plain = _plain_operation(request)
        if plain is not None:
            ((_, asked),) = _operation(plain).items()
            return RANGE if isinstance(plain, Get) else DELETE_RANGE, _encoder.encode(asked)
        body: dict[str, Any] = {}
        if request.compare:
            body["compare"] = [_comparison(one) for one in request.compare]
        if request.success:
            body["success"] = [_operation(one) for one in request.success]
        if request.failure:
            body["failure"] = [_operation(one) for one in request.failure]
        return TXN, _encoder.encode(body)
    if isinstance(request, KeepAlive):
        return KEEP_ALIVE, _encoder.encode({"ID": str(request.lease)})
    if isinstance(request, Grant):
        return GRANT, _encoder.encode({"TTL": str(request.ttl_s)})
    return REVOKE, _encoder.encode({"ID": str(request.lease)})


def encode_watch(key: bytes, end: bytes, start_revision: int) -> bytes:
    """Return the body that asks for a watch."""
    create = {**_range(key, end), "start_revision": str(start_revision)}
    return _encoder.encode({"create_request": create})


def encode_user(user: str, password: str) -> bytes:
    """Return the body that asks for a token."""
    return _encoder.encode({"name": user, "password": password})


def may_repeat(request: Request) -> bool:
    """Whether it does no harm if a request is carried out twice.

    A lease that is granted twice ends unused; a lease is revoked once, as its id is never reused.
    """
    if isinstance(request, Txn):
        return all(isinstance(one, Get) for one in (*request.success, *request.failure))
    return True


def _plain_operation(request: Txn) -> Get | Delete | None:
    if not request.compare and len(request.success) == 1:
        op = request.success[0]
        return None if isinstance(op, Put) else op
    return None


def _comparison(compare: Compare) -> dict[str, Any]:
    field, value = compare.field, compare.equals
    name = "value" if field is Field.VALUE else _COMPARED[field]
    return {
        "key": compare.key,
        "target": field.name,
        "result": "EQUAL",
        name: value if isinstance(value, bytes) else str(value),
    }


_COMPARED = {
    Field.CREATE: "create_revision",
    Field.MOD: "mod_revision",
    Field.VERSION: "version",
}


def _operation(op: Op) -> dict[str, Any]:
    if isinstance(op, Put):
        put: dict[str, Any] = {"key": op.key, "value": op.value}
        if op.lease:
            put["lease"] = str(op.lease)
        return {"request_put": put}
    if isinstance(op, Get):
        asked = _range(op.key, op.end)
        if op.keys_only:
            asked["keys_only"] = True
        return {"request_range": asked}
    return {"request_delete_range": _range(op.key, op.end)}


def _range(key: bytes, end: bytes) -> dict[str, Any]:
    if not end:
        return {"key": key}
    # All keys there are begin after the empty one, which etcd does not take.
    return {"key": key or b"\0", "range_end": end}


# Answers.


def decode(request: Request, status: int, body: bytes) -> Answer | Refusal:
    """Return what etcd answered to a request."""
    try:
        if status != OK:
            return _missing_lease(request, refusal_of(status, body))
        if isinstance(request, Txn):
            if _plain_operation(request) is not None:
                said = _plain.decode(body)
                return TxnDone(
                    said.header.revision,
                    succeeded=True,
                    results=(said.kvs,),
                    deleted=(said.deleted,),
                )
            return _txn_done(request, _txn.decode(body))
        if isinstance(request, Grant):
            lease = _lease.decode(body)
            return Granted(lease.ID, lease.TTL)
        if isinstance(request, Revoke):
            return Revoked()
        if body.startswith(b'{"error"'):
            return _missing_lease(request, refusal_of(status, body))
        return KeptAlive(max(_lease_line.decode(body).result.TTL, 0))
    except msgspec.MsgspecError as error:
        return not_understood(error, body)


def decode_token(status: int, body: bytes) -> str | Refusal:
    """Return a token; it is empty if etcd asks nobody for a password."""
    if status == OK:
        try:
            return _authenticated.decode(body).token
        except msgspec.MsgspecError as error:
            return not_understood(error)
    refusal = refusal_of(status, body)
    if "authentication is not enabled" in refusal.problem.why:
        return ""
    return refusal


def decode_line(line: bytes) -> News | Refusal:
    """Return what one line of a watch says."""
    try:
        said = _watch_line.decode(line)
    except msgspec.MsgspecError as error:
        return not_understood(error, line)
    result, failed = said.result, said.error
    if failed is not None and failed.message:
        return classify(failed.message, failed.grpc_code or failed.code)
    if result is None:
        return not_understood(ValueError("a line of a watch without anything in it"))
    if result.compact_revision:
        why = f"all before revision {result.compact_revision} is compacted"
        return Refusal(Problem(ProblemKind.COMPACTED, why))
    if result.canceled:
        refusal = classify(result.cancel_reason or "it ended the watch", UNAVAILABLE)
        if refusal.problem.kind is ProblemKind.DENIED:
            # It says the same of a token that has ended.
            return Refusal(refusal.problem, Handling.RENEW_TOKEN)
        return refusal
    if not result.events:
        return News(result.header.revision, ())
    changes = tuple(map(_change, result.events))
    return News(changes[-1].mod_revision, changes)


def _change(event: _Event) -> Change:
    kv = event.kv
    gone = event.type == "DELETE"
    return Change(kv.key, None if gone else kv.value, kv.mod_revision, kv.create_revision)


def _txn_done(request: Txn, said: _TxnAnswer) -> TxnDone:
    results = tuple(
        one.response_range.kvs if one.response_range is not None else () for one in said.responses
    )
    deleted = tuple(
        one.response_delete_range.deleted if one.response_delete_range is not None else 0
        for one in said.responses
    )
    asked = request.success if said.succeeded else request.failure
    if len(results) != len(asked):
        raise msgspec.ValidationError(f"{len(results)} results for {len(asked)} operations")
    return TxnDone(said.header.revision, said.succeeded, results, deleted)


def _missing_lease(request: Request, refusal: Refusal) -> Answer | Refusal:
    """For who wants a lease to end, or asks whether it is there, its end is no problem."""
    if refusal.problem.kind is ProblemKind.LEASE_GONE:
        if isinstance(request, KeepAlive):
            return KeptAlive(0)
        if isinstance(request, Revoke):
            return Revoked()
    return refusal
