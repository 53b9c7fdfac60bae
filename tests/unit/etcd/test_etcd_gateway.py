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
from holdfast.etcd import protocol
from holdfast.etcd.protocol import Handling, Refusal

HUGE = 2**62 + 1  # No JSON number that every reader keeps whole.
HEADER = {"cluster_id": "1", "revision": "7", "raft_term": "2"}


def b64(data: bytes) -> str:
    return b64encode(data).decode()


def body_of(request: Request) -> Any:
    return json.loads(protocol.encode(request)[1])


def answer(request: Request, body: object, status: int = 200) -> object:
    return protocol.decode(request, status, json.dumps(body).encode())


def test_a_transaction_in_the_words_of_the_gateway() -> None:
    request = Txn(
        compare=(
            Compare(b"a", Field.CREATE, 0),
            Compare(b"a", Field.MOD, HUGE),
            Compare(b"a", Field.VERSION, 2),
            Compare(b"a", Field.VALUE, b"\xff"),
        ),
        success=(Put(b"k", b"v", HUGE), Put(b"k2", b"")),
        failure=(Get(b"k"), Get(b"a", b"b", keys_only=True), Delete(b"k"), Delete(b"a", b"b")),
    )
    assert protocol.encode(request)[0] == "/v3/kv/txn"
    a, b, k = b64(b"a"), b64(b"b"), b64(b"k")
    assert body_of(request) == {
        "compare": [
            {"key": a, "target": "CREATE", "result": "EQUAL", "create_revision": "0"},
            {"key": a, "target": "MOD", "result": "EQUAL", "mod_revision": str(HUGE)},
            {"key": a, "target": "VERSION", "result": "EQUAL", "version": "2"},
            {"key": a, "target": "VALUE", "result": "EQUAL", "value": b64(b"\xff")},
        ],
        "success": [
            {"request_put": {"key": k, "value": b64(b"v"), "lease": str(HUGE)}},
            {"request_put": {"key": b64(b"k2"), "value": ""}},
        ],
        "failure": [
            {"request_range": {"key": k}},
            {"request_range": {"key": a, "range_end": b, "keys_only": True}},
            {"request_delete_range": {"key": k}},
            {"request_delete_range": {"key": a, "range_end": b}},
        ],
    }


def test_the_range_of_all_keys_begins_after_the_empty_one() -> None:
    everything = Txn(success=(Get(b"", b"\0"),))
    assert body_of(everything) == {"key": b64(b"\0"), "range_end": b64(b"\0")}


@pytest.mark.parametrize(
    ("request_", "path", "body"),
    [
        (Txn(), "/v3/kv/txn", {}),
        (Grant(5), "/v3/lease/grant", {"TTL": "5"}),
        (KeepAlive(HUGE), "/v3/lease/keepalive", {"ID": str(HUGE)}),
        (Revoke(HUGE), "/v3/lease/revoke", {"ID": str(HUGE)}),
    ],
)
def test_other_requests(request_: Request, path: str, body: object) -> None:
    assert protocol.encode(request_)[0] == path
    assert body_of(request_) == body


def test_one_range_goes_as_a_plain_request() -> None:
    read, delete = Txn(success=(Get(b"a"),)), Txn(success=(Delete(b"a", b"b"),))
    assert protocol.encode(read)[0] == "/v3/kv/range"
    assert body_of(read) == {"key": b64(b"a")}
    assert protocol.encode(delete)[0] == "/v3/kv/deleterange"
    assert body_of(delete) == {"key": b64(b"a"), "range_end": b64(b"b")}
    found = {"key": b64(b"a"), "version": "1"}
    assert answer(read, {"header": HEADER, "kvs": [found], "count": "1"}) == TxnDone(
        7, succeeded=True, results=((KeyValue(key=b"a", version=1),),), deleted=(0,)
    )
    assert answer(delete, {"header": HEADER, "deleted": "3"}) == TxnDone(
        7, succeeded=True, results=((),), deleted=(3,)
    )
    on_condition = Compare(b"a", Field.MOD, 1)
    for other in (
        Txn(compare=(on_condition,), success=(Get(b"a"),)),
        Txn(success=(Get(b"a"), Get(b"b"))),
        Txn(success=(Put(b"a", b""),)),
        Txn(failure=(Get(b"a"),)),
    ):
        assert protocol.encode(other)[0] == "/v3/kv/txn"


def test_a_watch_and_a_user() -> None:
    assert json.loads(protocol.encode_watch(b"a", b"b", 8)) == {
        "create_request": {"key": b64(b"a"), "range_end": b64(b"b"), "start_revision": "8"}
    }
    assert json.loads(protocol.encode_user("u", 'p"ö')) == {"name": "u", "password": 'p"ö'}


@pytest.mark.parametrize(
    ("request_", "may"),
    [
        (Grant(5), True),
        (KeepAlive(1), True),
        (Revoke(1), True),
        (Txn(), True),
        (Txn(compare=(Compare(b"a", Field.MOD, 1),), success=(Get(b"a"),)), True),
        (Txn(success=(Get(b"a"), Put(b"a", b""))), False),
        (Txn(success=(Get(b"a"),), failure=(Delete(b"a"),)), False),
    ],
)
def test_what_may_be_sent_twice(request_: Request, may: bool) -> None:
    assert protocol.may_repeat(request_) is may


def test_the_results_of_a_transaction() -> None:
    kv = {"key": b64(b"k"), "value": b64(b"v"), "create_revision": "3", "mod_revision": "4"}
    said = {
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
    assert answer(Txn(success=ops), said) == done


def test_what_is_false_or_zero_is_left_out_by_etcd() -> None:
    assert answer(Txn(), {"header": HEADER}) == TxnDone(7, succeeded=False)
    assert answer(Revoke(1), {"header": HEADER}) == Revoked()
    assert answer(KeepAlive(1), {"result": {"header": HEADER, "ID": "1"}}) == KeptAlive(0)


def test_leases() -> None:
    assert answer(Grant(5), {"header": HEADER, "ID": str(HUGE), "TTL": "6"}) == Granted(HUGE, 6)
    kept = {"result": {"header": HEADER, "ID": "1", "TTL": "5"}}
    assert answer(KeepAlive(1), kept) == KeptAlive(5)


def test_for_who_wants_a_lease_to_end_its_end_is_no_problem() -> None:
    gone = {"error": "etcdserver: requested lease not found", "code": 5}
    assert answer(Revoke(1), gone, 404) == Revoked()
    assert answer(KeepAlive(1), gone, 404) == KeptAlive(0)
    refusal = answer(Txn(success=(Put(b"a", b"", 1),)), gone, 404)
    assert refusal == Refusal(Problem(ProblemKind.LEASE_GONE, "requested lease not found"))


def test_an_error_may_come_in_an_answer_that_began_well() -> None:
    said = {"error": {"grpc_code": 14, "message": "etcdserver: no leader", "http_code": 503}}
    refusal = answer(KeepAlive(1), said)
    assert refusal == Refusal(Problem(ProblemKind.UNREACHABLE, "no leader"), Handling.ELSEWHERE)


@pytest.mark.parametrize(
    ("request_", "body"),
    [
        (Txn(), b"{}"),
        (Txn(), b"<html>"),
        (Txn(), b""),
        (Txn(), b'{"header":{"revision":"x"}}'),
        (Txn(success=(Get(b"a"), Get(b"b"))), b'{"header":{"revision":"1"},"succeeded":true}'),
        (Txn(success=(Get(b"a"),)), b"{}"),
        (Grant(1), b'{"TTL":"1"}'),
        (KeepAlive(1), b'{"ID":"1","TTL":"1"}'),
        (Txn(), b'{"header":\xff}'),
    ],
)
def test_an_answer_that_cannot_be_read_is_no_etcds(request_: Request, body: bytes) -> None:
    refusal = protocol.decode(request_, 200, body)
    assert isinstance(refusal, Refusal)
    assert refusal.problem.kind is ProblemKind.REFUSED
    assert "not what an etcd says" in refusal.problem.why


def test_tokens() -> None:
    assert protocol.decode_token(200, b'{"header":{},"token":"abc.7"}') == "abc.7"
    off = {"error": "etcdserver: authentication is not enabled", "code": 9}
    assert protocol.decode_token(400, json.dumps(off).encode()) == ""
    wrong = {"error": "etcdserver: authentication failed, invalid user ID or password", "code": 3}
    refusal = protocol.decode_token(400, json.dumps(wrong).encode())
    assert refusal == Refusal(Problem(ProblemKind.DENIED, "wrong user or password"))
    assert isinstance(protocol.decode_token(200, b"{}"), Refusal)


def line(**result: object) -> protocol.News | Refusal:
    return protocol.decode_line(json.dumps({"result": {"header": HEADER, **result}}).encode())


def test_lines_of_a_watch() -> None:
    assert line(created=True) == protocol.News(7, ())
    kv = {"key": b64(b"k"), "mod_revision": "6"}
    events = [
        {"kv": {**kv, "value": b64(b"v"), "create_revision": "5"}},
        {"kv": {**kv, "create_revision": "6"}},
        {"type": "DELETE", "kv": {**kv, "mod_revision": "7"}},
    ]
    assert line(events=events) == protocol.News(
        7, (Change(b"k", b"v", 6, 5), Change(b"k", b"", 6, 6), Change(b"k", None, 7))
    )


def test_a_watch_that_catches_up_is_only_as_far_as_what_it_was_told() -> None:
    """Or whoever went on from etcd's own revision, after a loss, would miss the rest."""
    early = {"key": b64(b"k"), "mod_revision": "3"}
    assert line(events=[{"kv": early}]) == protocol.News(3, (Change(b"k", b"", 3),))


@pytest.mark.parametrize(
    ("result", "kind", "handling"),
    [
        ({"canceled": True, "compact_revision": "5"}, ProblemKind.COMPACTED, Handling.FINAL),
        ({"canceled": True}, ProblemKind.UNREACHABLE, Handling.UNSURE),
        (
            {"canceled": True, "cancel_reason": "etcdserver: no leader"},
            ProblemKind.UNREACHABLE,
            Handling.ELSEWHERE,
        ),
        (  # A token that has ended looks like this, too.
            {"created": True, "canceled": True, "cancel_reason": "etcdserver: permission denied"},
            ProblemKind.DENIED,
            Handling.RENEW_TOKEN,
        ),
    ],
)
def test_ends_of_a_watch(result: dict[str, object], kind: ProblemKind, handling: Handling) -> None:
    refusal = line(**result)
    assert isinstance(refusal, Refusal)
    assert (refusal.problem.kind, refusal.handling) == (kind, handling)


def test_errors_in_a_watch() -> None:
    said = b'{"error":{"grpc_code":14,"http_code":503,"message":"etcdserver: no leader"}}'
    refusal = protocol.decode_line(said)
    assert refusal == Refusal(Problem(ProblemKind.UNREACHABLE, "no leader"), Handling.ELSEWHERE)
    for garbage in (b"{}", b"x", b'{"result":{}}'):
        refusal = protocol.decode_line(garbage)
        assert isinstance(refusal, Refusal)
        assert refusal.problem.kind is ProblemKind.REFUSED
