"""The encoding of requests to etcd's gateway, and the decoding of its responses and errors."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest

from holdfast.core.etcd.calls import (
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
    Problem,
    ProblemKind,
    Put,
    Request,
    Revoke,
    Revoked,
    Txn,
    TxnDone,
)
from holdfast.etcd import json_gateway
from holdfast.etcd.json_gateway import NO_GATEWAY, TLS_ONLY, GatewayRefusal, Reaction, WatchEvents

HUGE = 2**62 + 1  # Some JSON parsers lose precision at this size.
HEADER = {"cluster_id": "1", "revision": "7", "raft_term": "2"}
K, H = ProblemKind, Reaction


def b64(data: bytes) -> str:
    return b64encode(data).decode()


A, B, KEY = b64(b"a"), b64(b"b"), b64(b"k")


def body_of(request: Request) -> Any:
    return json.loads(json_gateway.encode(request)[1])


def answer(request: Request, body: object, status: int = 200) -> object:
    return json_gateway.decode(request, status, json.dumps(body).encode())


# Requests.


def test_transaction_is_encoded_as_json() -> None:
    request = Txn(
        compare=(
            Compare(b"a", Field.CREATE, 0),
            Compare(b"a", Field.MOD, HUGE),
            Compare(b"a", Field.VERSION, 2),
            Compare(b"a", Field.VALUE, b"\xff"),
        ),
        success=(Put(b"k", b"v", HUGE), Put(b"k", b"")),
        failure=(Get(b"k"), Get(b"a", b"b", keys_only=True), Delete(b"k"), Delete(b"a", b"b")),
    )
    assert json_gateway.encode(request)[0] == "/v3/kv/txn"
    assert body_of(request) == {
        "compare": [
            {"key": A, "target": "CREATE", "result": "EQUAL", "create_revision": "0"},
            {"key": A, "target": "MOD", "result": "EQUAL", "mod_revision": str(HUGE)},
            {"key": A, "target": "VERSION", "result": "EQUAL", "version": "2"},
            {"key": A, "target": "VALUE", "result": "EQUAL", "value": b64(b"\xff")},
        ],
        "success": [
            {"request_put": {"key": KEY, "value": b64(b"v"), "lease": str(HUGE)}},
            {"request_put": {"key": KEY, "value": ""}},
        ],
        "failure": [
            {"request_range": {"key": KEY}},
            {"request_range": {"key": A, "range_end": B, "keys_only": True}},
            {"request_delete_range": {"key": KEY}},
            {"request_delete_range": {"key": A, "range_end": B}},
        ],
    }


@pytest.mark.parametrize(
    ("request_", "path", "body"),
    [
        (Txn(), "kv/txn", {}),
        (Grant(5), "lease/grant", {"TTL": "5"}),
        (KeepAlive(HUGE), "lease/keepalive", {"ID": str(HUGE)}),
        (Revoke(HUGE), "lease/revoke", {"ID": str(HUGE)}),
        # A single unconditional range is a plain request, which a full etcd accepts.
        (Txn(success=(Get(b"a"),)), "kv/range", {"key": A}),
        (Txn(success=(Delete(b"a", b"b"),)), "kv/deleterange", {"key": A, "range_end": B}),
        # The range of all keys starts after the empty key.
        (Txn(success=(Get(b"", b"\0"),)), "kv/range", {"key": b64(b"\0"), "range_end": b64(b"\0")}),
    ],
)
def test_other_requests_have_their_paths_and_bodies(
    request_: Request, path: str, body: object
) -> None:
    assert json_gateway.encode(request_)[0] == f"/v3/{path}"
    assert body_of(request_) == body


def test_watch_and_authentication_are_encoded() -> None:
    assert json.loads(json_gateway.encode_watch(b"a", b"b", 8)) == {
        "create_request": {"key": A, "range_end": B, "start_revision": "8"}
    }
    assert json.loads(json_gateway.encode_user("u", 'p"ö')) == {"name": "u", "password": 'p"ö'}


@pytest.mark.parametrize(
    ("request_", "may"),
    [
        (Grant(5), True),
        (KeepAlive(1), True),
        (Revoke(1), True),
        (Txn(compare=(Compare(b"a", Field.MOD, 1),), success=(Get(b"a"),)), True),
        (Txn(success=(Get(b"a"), Put(b"a", b""))), False),
        (Txn(success=(Get(b"a"),), failure=(Delete(b"a"),)), False),
    ],
)
def test_only_idempotent_requests_may_be_repeated(request_: Request, *, may: bool) -> None:
    assert json_gateway.may_repeat(request_) is may


# Responses. etcd omits false and zero values.


def test_results_of_a_transaction_are_decoded() -> None:
    kv = {"key": KEY, "value": b64(b"v"), "create_revision": "3", "mod_revision": "4"}
    body = {
        "header": HEADER,
        "succeeded": True,
        "responses": [
            {"response_put": {"header": HEADER}},
            {"response_range": {"kvs": [{**kv, "version": "2", "lease": str(HUGE)}], "count": "1"}},
            {"response_range": {"header": HEADER}},
            {"response_delete_range": {"deleted": "3"}},
        ],
    }
    ops = (Put(b"a", b""), Get(b"k"), Get(b"l"), Delete(b"x", b"y"))
    found = KeyValue(key=b"k", value=b"v", create_revision=3, mod_revision=4, version=2, lease=HUGE)
    done = TxnDone(7, succeeded=True, results=((), (found,), (), ()), deleted=(0, 0, 0, 3))
    assert answer(Txn(success=ops), body) == done
    assert answer(Txn(), {"header": HEADER}) == TxnDone(7, succeeded=False)
    read = {"header": HEADER, "kvs": [{"key": A, "version": "1"}], "count": "1"}
    assert answer(Txn(success=(Get(b"a"),)), read) == TxnDone(
        7, succeeded=True, results=((KeyValue(key=b"a", version=1),),), deleted=(0,)
    )
    assert answer(Txn(success=(Delete(b"a"),)), {"header": HEADER, "deleted": "3"}) == TxnDone(
        7, succeeded=True, results=((),), deleted=(3,)
    )


def test_lease_replies_are_decoded() -> None:
    assert answer(Grant(5), {"header": HEADER, "ID": str(HUGE), "TTL": "6"}) == Granted(HUGE, 6)
    assert answer(KeepAlive(1), {"result": {"header": HEADER, "TTL": "5", "ID": "1"}}) == KeptAlive(
        5
    )
    assert answer(KeepAlive(1), {"result": {"header": HEADER, "ID": "1"}}) == KeptAlive(0)
    assert answer(Revoke(1), {"header": HEADER}) == Revoked()
    # An expired lease is a problem only for a write with this lease.
    gone = {"error": "etcdserver: requested lease not found", "code": 5}
    assert answer(Revoke(1), gone, 404) == Revoked()
    assert answer(KeepAlive(1), gone, 404) == KeptAlive(0)
    refusal = answer(Txn(success=(Put(b"a", b"", 1),)), gone, 404)
    assert isinstance(refusal, GatewayRefusal)
    assert refusal.problem.kind is K.LEASE_GONE


def test_token_reply_is_decoded() -> None:
    assert json_gateway.decode_token(200, b'{"header":{},"token":"abc.7"}') == "abc.7"
    off = {"error": "etcdserver: authentication is not enabled", "code": 9}
    assert json_gateway.decode_token(400, json.dumps(off).encode()) == ""
    wrong = {"error": "etcdserver: authentication failed, invalid user ID or password", "code": 3}
    for refusal in (
        json_gateway.decode_token(400, json.dumps(wrong).encode()),
        json_gateway.decode_token(200, b"{}"),
    ):
        assert isinstance(refusal, GatewayRefusal)


def line(**result: object) -> WatchEvents | GatewayRefusal:
    return json_gateway.decode_line(json.dumps({"result": {"header": HEADER, **result}}).encode())


def test_lines_of_a_watch_are_decoded() -> None:
    assert line(created=True) == WatchEvents(7, ())
    kv = {"key": KEY, "mod_revision": "6"}
    events = [
        {"kv": {**kv, "value": b64(b"v"), "create_revision": "5"}},
        {"kv": {**kv, "create_revision": "6"}},
        {"type": "DELETE", "kv": kv},
    ]
    # The revision is that of the last change. A client that continued from etcd's own revision after a loss would
    # miss the changes that a lagging watch has not sent yet.
    assert line(events=events) == WatchEvents(
        6, (Change(b"k", b"v", 6, 5), Change(b"k", b"", 6, 6), Change(b"k", None, 6))
    )


@pytest.mark.parametrize(
    ("result", "kind", "handling"),
    [
        ({"compact_revision": "5"}, K.COMPACTED, H.FINAL),
        ({}, K.UNREACHABLE, H.UNSURE),
        ({"cancel_reason": "etcdserver: no leader"}, K.UNREACHABLE, H.ELSEWHERE),
        # etcd reports an expired token in the same way.
        ({"cancel_reason": "etcdserver: permission denied"}, K.DENIED, H.RENEW_TOKEN),
    ],
)
def test_ends_of_a_watch_become_problems(
    result: dict[str, object], kind: ProblemKind, handling: Reaction
) -> None:
    refusal = line(canceled=True, **result)
    assert isinstance(refusal, GatewayRefusal)
    assert (refusal.problem.kind, refusal.handling) == (kind, handling)


# Errors.


@pytest.mark.parametrize(
    ("status", "text", "code", "kind", "handling"),
    [
        (404, "etcdserver: requested lease not found", 5, K.LEASE_GONE, H.FINAL),
        (429, "etcdserver: mvcc: database space exceeded", 8, K.NO_SPACE, H.FINAL),
        (400, "etcdserver: mvcc: required revision has been compacted", 11, K.COMPACTED, H.FINAL),
        (400, "etcdserver: request is too large", 3, K.REFUSED, H.FINAL),
        (429, "trying to send message larger than max (9 vs. 8)", 8, K.REFUSED, H.FINAL),
        (400, "etcdserver: duplicate key given in txn request", 3, K.REFUSED, H.FINAL),
        (503, "etcdserver: no leader", 14, K.UNREACHABLE, H.ELSEWHERE),
        (429, "etcdserver: too many requests", 8, K.UNREACHABLE, H.ELSEWHERE),
        (503, "etcdserver: leader changed", 14, K.UNREACHABLE, H.UNSURE),
        (503, "etcdserver: request timed out, possibly due to", 14, K.UNREACHABLE, H.UNSURE),
        (503, "transport is closing", 14, K.UNREACHABLE, H.UNSURE),
        (504, "context deadline exceeded", 4, K.UNREACHABLE, H.UNSURE),
        (401, "etcdserver: invalid auth token", 16, K.DENIED, H.RENEW_TOKEN),
        (400, "etcdserver: revision of auth store is old", 3, K.DENIED, H.RENEW_TOKEN),
        (400, "etcdserver: user name is empty", 3, K.DENIED, H.RENEW_TOKEN),
        (403, "etcdserver: permission denied", 7, K.DENIED, H.FINAL),
        (400, "etcdserver: user name not found", 9, K.DENIED, H.FINAL),
        (401, "something new", 16, K.DENIED, H.FINAL),
    ],
)
def test_errors_of_etcd_are_classified(
    status: int, text: str, code: int, kind: ProblemKind, handling: Reaction
) -> None:
    body = json.dumps({"error": text, "code": code, "message": text}).encode()
    refusal = json_gateway.decode_refusal(status, body)
    assert (refusal.problem.kind, refusal.handling) == (kind, handling)
    in_stream = {"error": {"grpc_code": code, "message": text, "http_code": status}}
    for refused in (
        answer(Txn(), in_stream, status),
        json_gateway.decode_line(json.dumps(in_stream).encode()),
    ):
        assert isinstance(refused, GatewayRefusal)
        assert (refused.problem.kind, refused.handling) == (kind, handling)


def test_error_messages_are_one_line_without_prefixes() -> None:
    long = "rpc error: code = Unknown desc = etcdserver: a\nb"
    refusal = json_gateway.decode_refusal(400, json.dumps({"error": long}).encode())
    assert refusal.problem == Problem(K.REFUSED, "a b")


@pytest.mark.parametrize(
    ("status", "body", "kind", "handling", "why"),
    [
        (404, b"404 page not found\n", K.REFUSED, H.ELSEWHERE, NO_GATEWAY),
        (404, b'{"code":5,"message":"Not Found"}', K.REFUSED, H.ELSEWHERE, NO_GATEWAY),
        (502, b"<html>", K.UNREACHABLE, H.UNSURE, "502"),
        (400, b"sent an HTTP request to an HTTPS server.\n", K.DENIED, H.ELSEWHERE, TLS_ONLY),
        (500, b"[1]", K.REFUSED, H.ELSEWHERE, "[1]"),
        (500, b"x" * 1000, K.REFUSED, H.ELSEWHERE, "..."),
    ],
)
def test_responses_of_other_servers_are_classified(
    status: int, body: bytes, kind: ProblemKind, handling: Reaction, why: str
) -> None:
    refusal = json_gateway.decode_refusal(status, body)
    assert (refusal.problem.kind, refusal.handling) == (kind, handling)
    assert why in refusal.problem.why
    assert len(refusal.problem.why) < 300


@pytest.mark.parametrize(
    ("request_", "body"),
    [
        (Txn(), b"{}"),
        (Txn(), b"<html>"),
        (Txn(), b'{"header":{"revision":"x"}}'),
        (Txn(success=(Get(b"a"), Get(b"b"))), b'{"header":{"revision":"1"},"succeeded":true}'),
        (Txn(success=(Get(b"a"),)), b"{}"),
        (Grant(1), b'{"TTL":"1"}'),
        (KeepAlive(1), b'{"ID":"1","TTL":"1"}'),
        (Txn(), b'{"header":\xff}'),
    ],
)
def test_invalid_response_is_reported_as_not_from_etcd(request_: Request, body: bytes) -> None:
    refusal = json_gateway.decode(request_, 200, body)
    assert isinstance(refusal, GatewayRefusal)
    assert (refusal.problem.kind, refusal.handling) == (K.REFUSED, H.UNSURE)
    for garbage in (b"{}", b"x", b'{"result":{}}'):
        refused = json_gateway.decode_line(garbage)
        assert isinstance(refused, GatewayRefusal)
        assert refused.problem.kind is K.REFUSED
