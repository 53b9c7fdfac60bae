from __future__ import annotations

import json

import pytest

from holdfast.core.etcd_calls import Trouble
from holdfast.etcd.refusals import NO_GATEWAY, Handling, Refusal, refusal_of

FINAL, ELSEWHERE = Handling.FINAL, Handling.ELSEWHERE
UNSURE, RENEW = Handling.UNSURE, Handling.RENEW_TOKEN


def said(status: int, text: str, code: int = 0) -> Refusal:
    return refusal_of(status, json.dumps({"error": text, "code": code, "message": text}).encode())


@pytest.mark.parametrize(
    ("status", "text", "code", "kind", "handling"),
    [
        (404, "etcdserver: requested lease not found", 5, Trouble.LEASE_GONE, FINAL),
        (429, "etcdserver: mvcc: database space exceeded", 8, Trouble.NO_SPACE, FINAL),
        (
            400,
            "etcdserver: mvcc: required revision has been compacted",
            11,
            Trouble.COMPACTED,
            FINAL,
        ),
        (400, "etcdserver: request is too large", 3, Trouble.REFUSED, FINAL),
        (429, "trying to send message larger than max (9 vs. 8)", 8, Trouble.REFUSED, FINAL),
        (400, "etcdserver: duplicate key given in txn request", 3, Trouble.REFUSED, FINAL),
        (503, "etcdserver: no leader", 14, Trouble.UNREACHABLE, ELSEWHERE),
        (429, "etcdserver: too many requests", 8, Trouble.UNREACHABLE, ELSEWHERE),
        (503, "etcdserver: leader changed", 14, Trouble.UNREACHABLE, UNSURE),
        (503, "etcdserver: request timed out", 14, Trouble.UNREACHABLE, UNSURE),
        (
            503,
            "etcdserver: request timed out, possibly due to previous leader failure",
            14,
            Trouble.UNREACHABLE,
            UNSURE,
        ),
        (503, "transport is closing", 14, Trouble.UNREACHABLE, UNSURE),
        (504, "context deadline exceeded", 4, Trouble.UNREACHABLE, UNSURE),
        (401, "etcdserver: invalid auth token", 16, Trouble.DENIED, RENEW),
        (400, "etcdserver: revision of auth store is old", 3, Trouble.DENIED, RENEW),
        (400, "etcdserver: user name is empty", 3, Trouble.DENIED, RENEW),
        (403, "etcdserver: permission denied", 7, Trouble.DENIED, FINAL),
        (400, "etcdserver: user name not found", 9, Trouble.DENIED, FINAL),
        (401, "something new", 16, Trouble.DENIED, FINAL),
    ],
)
def test_what_etcd_says_and_what_it_means(
    status: int, text: str, code: int, kind: Trouble, handling: Handling
) -> None:
    refusal = said(status, text, code)
    assert (refusal.problem.kind, refusal.handling) == (kind, handling)


def test_words_are_told_without_what_only_programmers_need() -> None:
    assert said(403, "etcdserver: permission denied", 7).problem.why == "permission denied"
    long = "rpc error: code = PermissionDenied desc = etcdserver: permission denied"
    assert said(403, long, 7).problem.why == "permission denied"
    assert said(400, "a\nb", 3).problem.why == "a?b"
    assert (
        said(400, "etcdserver: user name is empty").problem.why == "it wants a user and a password"
    )


@pytest.mark.parametrize(
    ("status", "body", "kind", "handling", "why"),
    [
        (404, b"404 page not found\n", Trouble.REFUSED, ELSEWHERE, NO_GATEWAY),
        (404, b'{"code":5,"message":"Not Found"}', Trouble.REFUSED, ELSEWHERE, NO_GATEWAY),
        (502, b"<html>", Trouble.UNREACHABLE, UNSURE, "it answered HTTP 502"),
        (200, b"<html>\n", Trouble.REFUSED, ELSEWHERE, "HTTP 200, as no etcd does: <html>"),
        (400, b"Client sent an HTTP request to an HTTPS server.\n", Trouble.DENIED, ELSEWHERE,
         "write https:// before it"),
        (500, b"[1]", Trouble.REFUSED, ELSEWHERE, "as no etcd does: [1]"),
        (500, b"x" * 1000, Trouble.REFUSED, ELSEWHERE, "..."),
    ],
)  # fmt: skip
def test_answers_of_others(
    status: int, body: bytes, kind: Trouble, handling: Handling, why: str
) -> None:
    refusal = refusal_of(status, body)
    assert (refusal.problem.kind, refusal.handling) == (kind, handling)
    assert refusal.problem.why.endswith(why)
    assert len(refusal.problem.why) < 300
