"""etcd's JSON gateway: requests and answers as bytes, and its errors as types. Pure.

The gateway encodes keys and values as base64, and 64-bit numbers as strings; msgspec converts both. An
unsuccessful answer becomes a `GatewayRefusal`: the problem, and the possible reactions of a client. etcd's errors
have a gRPC code and a text. A known text (`ErrorCode`) determines the refusal, because one code has many meanings;
no other module reads these texts.

A transaction that only reads or deletes one range, unconditionally, is sent as a plain request: an etcd
that is out of space accepts plain requests, but no transactions.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import msgspec

from holdfast.core.bounded import MALFORMED
from holdfast.core.etcd.calls import (
    AddMember,
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
    ListMembers,
    MemberRequest,
    Members,
    Op,
    Problem,
    ProblemKind,
    Put,
    RemoveMember,
    Request,
    Revoke,
    Revoked,
    Txn,
    TxnDone,
)
from holdfast.printable import one_line, quoted

RANGE, DELETE_RANGE = "/v3/kv/range", "/v3/kv/deleterange"
TXN, GRANT, KEEP_ALIVE = "/v3/kv/txn", "/v3/lease/grant", "/v3/lease/keepalive"
MEMBERS, STATUS = "/v3/cluster/member", "/v3/maintenance/status"
REVOKE, WATCH, AUTHENTICATE = "/v3/lease/revoke", "/v3/watch", "/v3/auth/authenticate"

NO_GATEWAY = (
    "it does not know /v3: this is etcd before 3.4, an etcd with its gateway disabled "
    "(enable-grpc-gateway), its peer port (2380), or not etcd"
)
TLS_ONLY = "it accepts TLS only: write https:// before the endpoint"

OK = 200
_NOT_FOUND = 404
_PROXY_ERRORS = (502, 503, 504)
# Codes of gRPC that the gateway passes on.
_DEADLINE_EXCEEDED, _PERMISSION_DENIED, _UNAVAILABLE, _UNAUTHENTICATED = 4, 7, 14, 16
QUOTE_CHARS_MAX = 60
"""The maximum length of a quote from an answer that does not come from etcd."""


# Errors.


class Reaction(Enum):
    """How a client may react to an unsuccessful answer."""

    FINAL = "final"
    """Nothing was done, and other endpoints will not do it either."""
    ELSEWHERE = "elsewhere"
    """Nothing was done. Another endpoint may do it, or this one later."""
    UNSURE = "unsure"
    """It may have been done. If doing it twice is harmless, another endpoint may be tried."""
    RENEW_TOKEN = "renew token"  # noqa: S105 (not a password)
    """Nothing was done; a retry with a new token may succeed."""


class ErrorCode(Enum):
    """etcd's errors, by a part of their text; the first match decides."""

    LEASE_NOT_FOUND = "requested lease not found"
    NO_SPACE = "database space exceeded"
    COMPACTED = "required revision has been compacted"
    TOO_LARGE = "request is too large"
    MESSAGE_TOO_LARGE = "larger than max"
    NO_LEADER = "no leader"
    TOO_MANY_REQUESTS = "too many requests"
    NOT_CAPABLE = "not capable"
    LEADER_CHANGED = "leader changed"
    TIMED_OUT = "request timed out"
    STOPPED = "server stopped"
    INVALID_TOKEN = "invalid auth token"  # noqa: S105
    AUTH_STORE_OLD = "revision of auth store is old"
    AUTH_HEADER_OLD = "revision in header is old"
    NO_USER = "user name is empty"
    PERMISSION_DENIED = "permission denied"
    WRONG_PASSWORD = "invalid user ID or password"  # noqa: S105
    AUTH_NOT_ENABLED = "authentication is not enabled"
    PASSWORD = "password"  # noqa: S105
    USER_NAME = "user name"
    UNKNOWN = ""


_MEANINGS: dict[ErrorCode, tuple[ProblemKind, Reaction]] = {
    ErrorCode.LEASE_NOT_FOUND: (ProblemKind.LEASE_GONE, Reaction.FINAL),
    ErrorCode.NO_SPACE: (ProblemKind.NO_SPACE, Reaction.FINAL),
    ErrorCode.COMPACTED: (ProblemKind.COMPACTED, Reaction.FINAL),
    ErrorCode.TOO_LARGE: (ProblemKind.REFUSED, Reaction.FINAL),
    ErrorCode.MESSAGE_TOO_LARGE: (ProblemKind.REFUSED, Reaction.FINAL),
    ErrorCode.NO_LEADER: (ProblemKind.UNREACHABLE, Reaction.ELSEWHERE),
    ErrorCode.TOO_MANY_REQUESTS: (ProblemKind.UNREACHABLE, Reaction.ELSEWHERE),
    ErrorCode.NOT_CAPABLE: (ProblemKind.UNREACHABLE, Reaction.ELSEWHERE),
    ErrorCode.LEADER_CHANGED: (ProblemKind.UNREACHABLE, Reaction.UNSURE),
    ErrorCode.TIMED_OUT: (ProblemKind.UNREACHABLE, Reaction.UNSURE),
    ErrorCode.STOPPED: (ProblemKind.UNREACHABLE, Reaction.UNSURE),
    ErrorCode.INVALID_TOKEN: (ProblemKind.DENIED, Reaction.RENEW_TOKEN),
    ErrorCode.AUTH_STORE_OLD: (ProblemKind.DENIED, Reaction.RENEW_TOKEN),
    ErrorCode.AUTH_HEADER_OLD: (ProblemKind.DENIED, Reaction.RENEW_TOKEN),
    ErrorCode.NO_USER: (ProblemKind.DENIED, Reaction.RENEW_TOKEN),
    ErrorCode.PERMISSION_DENIED: (ProblemKind.DENIED, Reaction.FINAL),
    ErrorCode.WRONG_PASSWORD: (ProblemKind.DENIED, Reaction.FINAL),
    ErrorCode.AUTH_NOT_ENABLED: (ProblemKind.REFUSED, Reaction.FINAL),
    ErrorCode.PASSWORD: (ProblemKind.DENIED, Reaction.FINAL),
    ErrorCode.USER_NAME: (ProblemKind.DENIED, Reaction.FINAL),
}
_CLEARER_TEXTS = {
    ErrorCode.NO_USER: "it requires a user and a password",
    ErrorCode.WRONG_PASSWORD: "wrong user or password",
}
_PREFIX = re.compile(r"(rpc error: code = \w+ desc = )?(etcdserver: )?(mvcc: )?")


class GatewayRefusal(msgspec.Struct, frozen=True):
    """An unsuccessful answer: the problem, and the possible reaction."""

    problem: Problem
    handling: Reaction = Reaction.FINAL
    code: ErrorCode = ErrorCode.UNKNOWN


class _StreamError(msgspec.Struct):
    message: str = ""
    code: int = 0
    grpc_code: int = 0


class _Error(msgspec.Struct):
    """An error in the format of the gateway; in a stream it is inside `error`."""

    message: str = ""
    code: int = 0
    error: str | _StreamError = ""

    @property
    def text(self) -> str:
        """The text of etcd's error; empty if this is not one."""
        return self.message or (self.error if isinstance(self.error, str) else self.error.message)

    @property
    def grpc_code(self) -> int:
        inner = self.error
        return self.code or (0 if isinstance(inner, str) else inner.grpc_code or inner.code)


_error = msgspec.json.Decoder(_Error, strict=False)


def decode_refusal(status: int, body: bytes) -> GatewayRefusal:
    """Return the meaning of an unsuccessful answer."""
    try:
        error = _error.decode(body)
    except MALFORMED:
        error = _Error()
    if error.text and error.text != "Not Found":  # This is the answer for an unknown path.
        return _classify(error.text, error.grpc_code)
    if status == _NOT_FOUND:
        return GatewayRefusal(Problem(ProblemKind.REFUSED, NO_GATEWAY), Reaction.ELSEWHERE)
    if status in _PROXY_ERRORS:
        why = f"it responded with HTTP {status}"
        return GatewayRefusal(Problem(ProblemKind.UNREACHABLE, why), Reaction.UNSURE)
    words = quoted(body.decode(errors="replace").strip())
    if "HTTPS server" in words:  # The default text of servers in Go.
        return GatewayRefusal(Problem(ProblemKind.DENIED, TLS_ONLY), Reaction.ELSEWHERE)
    why = f"it responded with HTTP {status}, which etcd never sends: {words}"
    return GatewayRefusal(Problem(ProblemKind.REFUSED, why), Reaction.ELSEWHERE)


def _classify(text: str, grpc_code: int) -> GatewayRefusal:
    words = quoted(_PREFIX.sub("", text, count=1))
    code = next(one for one in ErrorCode if one.value in text)
    if code is not ErrorCode.UNKNOWN:
        kind, handling = _MEANINGS[code]
        return GatewayRefusal(Problem(kind, _CLEARER_TEXTS.get(code, words)), handling, code)
    if grpc_code in (_UNAVAILABLE, _DEADLINE_EXCEEDED):
        return GatewayRefusal(Problem(ProblemKind.UNREACHABLE, words), Reaction.UNSURE)
    if grpc_code in (_PERMISSION_DENIED, _UNAUTHENTICATED):
        return GatewayRefusal(Problem(ProblemKind.DENIED, words))
    return GatewayRefusal(Problem(ProblemKind.REFUSED, words))


def _invalid_response(error: Exception, answer: bytes = b"") -> GatewayRefusal:
    """Return the refusal for an invalid answer; another endpoint may be an etcd."""
    words = one_line(
        answer[: 4 * QUOTE_CHARS_MAX].decode(errors="replace").strip(), QUOTE_CHARS_MAX
    )
    why = f"invalid response: {quoted(str(error))}"
    why += f": {words}" if words else ""
    return GatewayRefusal(Problem(ProblemKind.REFUSED, why), Reaction.UNSURE)


# Answers of etcd, with the fields that are used.


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
    """The answer to a plain request, in the form of a transaction's."""

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


class _Member(msgspec.Struct):
    ID: int
    peerURLs: tuple[str, ...] = ()  # noqa: N815 (etcd's name)


class _MembersAnswer(msgspec.Struct):
    members: tuple[_Member, ...] = ()


class _StatusHeader(msgspec.Struct):
    cluster_id: int = 0


class _Status(msgspec.Struct):
    header: _StatusHeader
    leader: int = 0


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
    error: _StreamError | None = None


class WatchEvents(msgspec.Struct, frozen=True):
    """One line of a watch that does not end it. The first line has no changes."""

    revision: int
    """The revision of the last change; the header's may be ahead of the changes sent so far."""
    changes: tuple[Change, ...]


_txn = msgspec.json.Decoder(_TxnAnswer, strict=False)
_plain = msgspec.json.Decoder(_PlainAnswer, strict=False)
_lease = msgspec.json.Decoder(_Lease, strict=False)
_lease_line = msgspec.json.Decoder(_LeaseLine, strict=False)
_watch_line = msgspec.json.Decoder(_WatchLine, strict=False)
_authenticated = msgspec.json.Decoder(_Authenticated)
_members = msgspec.json.Decoder(_MembersAnswer, strict=False)
_status = msgspec.json.Decoder(_Status, strict=False)
_encoder = msgspec.json.Encoder()


# Requests.


def encode(request: Request | MemberRequest) -> tuple[str, bytes]:
    """Return the path and the body of a request."""
    if isinstance(request, ListMembers):
        return f"{MEMBERS}/list", b"{}"
    if isinstance(request, AddMember):
        return f"{MEMBERS}/add", _encoder.encode({"peerURLs": [request.peer_url]})
    if isinstance(request, RemoveMember):
        return f"{MEMBERS}/remove", _encoder.encode({"ID": str(request.id)})
    if isinstance(request, Txn):
        plain = _plain_operation(request)
        if plain is not None:
            ((_, range_body),) = _operation(plain).items()
            return RANGE if isinstance(plain, Get) else DELETE_RANGE, _encoder.encode(range_body)
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
    """Return the body of a request for a watch."""
    create = {**_range(key, end), "start_revision": str(start_revision)}
    return _encoder.encode({"create_request": create})


def encode_user(user: str, password: str) -> bytes:
    """Return the body of a request for a token."""
    return _encoder.encode({"name": user, "password": password})


def may_repeat(request: Request | MemberRequest) -> bool:
    """Whether performing a request twice is harmless.

    An unneeded second lease expires. Ids of leases are not reused, so a second revocation has no effect.
    """
    if isinstance(request, Txn):
        return all(isinstance(one, Get) for one in (*request.success, *request.failure))
    return not isinstance(request, AddMember)


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
        body = _range(op.key, op.end)
        if op.keys_only:
            body["keys_only"] = True
        return {"request_range": body}
    return {"request_delete_range": _range(op.key, op.end)}


def _range(key: bytes, end: bytes) -> dict[str, Any]:
    if not end:
        return {"key": key}
    # etcd rejects the empty key, which precedes all others.
    return {"key": key or b"\0", "range_end": end}


# Answers.


def decode(
    request: Request | MemberRequest, status: int, body: bytes
) -> Answer | Members | GatewayRefusal:
    """Return etcd's answer to a request."""
    try:
        if status != OK:
            return _missing_lease(request, decode_refusal(status, body))
        if isinstance(request, MemberRequest):
            members = _members.decode(body).members
            return Members({url: one.ID for one in members for url in one.peerURLs})
        if isinstance(request, Txn):
            if _plain_operation(request) is not None:
                answer = _plain.decode(body)
                return TxnDone(
                    answer.header.revision,
                    succeeded=True,
                    results=(answer.kvs,),
                    deleted=(answer.deleted,),
                )
            return _txn_done(request, _txn.decode(body))
        if isinstance(request, Grant):
            lease = _lease.decode(body)
            return Granted(lease.ID, lease.TTL)
        if isinstance(request, Revoke):
            return Revoked()
        if body.startswith(b'{"error"'):
            return _missing_lease(request, decode_refusal(status, body))
        return KeptAlive(max(_lease_line.decode(body).result.TTL, 0))
    except MALFORMED as error:
        return _invalid_response(error, body)


def decode_token(status: int, body: bytes) -> str | GatewayRefusal:
    """Return a token; it is empty if etcd has no authentication."""
    if status == OK:
        try:
            return _authenticated.decode(body).token
        except MALFORMED as error:
            return _invalid_response(error)
    refusal = decode_refusal(status, body)
    return "" if refusal.code is ErrorCode.AUTH_NOT_ENABLED else refusal


def decode_value(body: bytes) -> bytes | None:
    """Return the value of the only key that was read, or None."""
    try:
        found = _plain.decode(body).kvs
    except msgspec.MsgspecError:
        return None
    return found[0].value if found else None


def decode_status(body: bytes) -> tuple[str, bool] | None:
    """Return a member's status: its cluster, and whether the cluster has a leader."""
    try:
        status = _status.decode(body)
    except msgspec.MsgspecError:
        return None
    return f"{status.header.cluster_id:x}", status.leader != 0


def decode_line(line: bytes) -> WatchEvents | GatewayRefusal:
    """Return the meaning of one line of a watch."""
    try:
        answer = _watch_line.decode(line)
    except MALFORMED as error:
        return _invalid_response(error, line)
    result, failed = answer.result, answer.error
    if failed is not None and failed.message:
        return _classify(failed.message, failed.grpc_code or failed.code)
    if result is None:
        return _invalid_response(ValueError("an empty line of a watch"))
    if result.compact_revision:
        why = f"everything before revision {result.compact_revision} is compacted"
        return GatewayRefusal(Problem(ProblemKind.COMPACTED, why))
    if result.canceled:
        refusal = _classify(result.cancel_reason or "it ended the watch", _UNAVAILABLE)
        if refusal.problem.kind is ProblemKind.DENIED:
            # etcd also sends this for an expired token.
            return GatewayRefusal(refusal.problem, Reaction.RENEW_TOKEN)
        return refusal
    if not result.events:
        return WatchEvents(result.header.revision, ())
    changes = tuple(map(_change, result.events))
    return WatchEvents(changes[-1].mod_revision, changes)


def _change(event: _Event) -> Change:
    kv = event.kv
    gone = event.type == "DELETE"
    return Change(kv.key, None if gone else kv.value, kv.mod_revision, kv.create_revision)


def _txn_done(request: Txn, answer: _TxnAnswer) -> TxnDone:
    results = tuple(
        one.response_range.kvs if one.response_range is not None else () for one in answer.responses
    )
    deleted = tuple(
        one.response_delete_range.deleted if one.response_delete_range is not None else 0
        for one in answer.responses
    )
    operations = request.success if answer.succeeded else request.failure
    if len(results) != len(operations):
        raise msgspec.ValidationError(f"{len(results)} results for {len(operations)} operations")
    return TxnDone(answer.header.revision, answer.succeeded, results, deleted)


def _missing_lease(
    request: Request | MemberRequest, refusal: GatewayRefusal
) -> Answer | GatewayRefusal:
    """For a request that revokes or renews a lease, the end of the lease is not a problem."""
    if refusal.problem.kind is ProblemKind.LEASE_GONE:
        if isinstance(request, KeepAlive):
            return KeptAlive(0)
        if isinstance(request, Revoke):
            return Revoked()
    return refusal
