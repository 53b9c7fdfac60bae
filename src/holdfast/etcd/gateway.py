"""Requests and answers in the words of etcd's JSON gateway. Pure: bytes in, values out.

Keys and values are base64 there, and numbers of 64 bits are strings; msgspec reads and writes both.
An answer that is no success becomes a `Refusal`: the problem, and what a client may do about it.

A transaction that only reads or deletes one range, whatever there is, goes as a plain request: an
etcd without space takes those, but no transaction at all.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.etcd_calls import (
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
    Put,
    Request,
    Revoke,
    Revoked,
    Trouble,
    Txn,
    TxnDone,
)
from holdfast.etcd.refusals import (
    OK,
    UNAVAILABLE,
    Handling,
    Inner,
    Refusal,
    classify,
    not_understood,
    refusal_of,
)

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
        return Refusal(Problem(Trouble.COMPACTED, why))
    if result.canceled:
        refusal = classify(result.cancel_reason or "it ended the watch", UNAVAILABLE)
        if refusal.problem.kind is Trouble.DENIED:
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
    if refusal.problem.kind is Trouble.LEASE_GONE:
        if isinstance(request, KeepAlive):
            return KeptAlive(0)
        if isinstance(request, Revoke):
            return Revoked()
    return refusal
