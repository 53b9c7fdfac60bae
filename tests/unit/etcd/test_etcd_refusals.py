from __future__ import annotations

import json

import pytest

from holdfast.core.etcd.calls import ProblemKind
from holdfast.etcd.protocol import NO_GATEWAY, Handling, Refusal, refusal_of

FINAL, ELSEWHERE = Handling.FINAL, Handling.ELSEWHERE
UNSURE, RENEW = Handling.UNSURE, Handling.RENEW_TOKEN


def said(status: int, text: str, code: int = 0) -> Refusal:
    return refusal_of(status, json.dumps({"error": text, "code": code, "message": text}).encode())


@pytest.mark.parametrize(
    ("status", "text", "code", "kind", "handling"),
    [
        (404, "etcdserver: requested lease not found", 5, ProblemKind.LEASE_GONE, FINAL),
        (429, "etcdserver: mvcc: database space exceeded", 8, ProblemKind.NO_SPACE, FINAL),
        (
            400,
            "etcdserver: mvcc: required revision has been compacted",
            11,
            ProblemKind.COMPACTED,
            FINAL,
        ),
        (400, "etcdserver: request is too large", 3, ProblemKind.REFUSED, FINAL),
        (429, "trying to send message larger than max (9 vs. 8)", 8, ProblemKind.REFUSED, FINAL),
        (400, "etcdserver: duplicate key given in txn request", 3, ProblemKind.REFUSED, FINAL),
        (503, "etcdserver: no leader", 14, ProblemKind.UNREACHABLE, ELSEWHERE),
        (429, "etcdserver: too many requests", 8, ProblemKind.UNREACHABLE, ELSEWHERE),
        (503, "etcdserver: leader changed", 14, ProblemKind.UNREACHABLE, UNSURE),
        (503, "etcdserver: request timed out", 14, ProblemKind.UNREACHABLE, UNSURE),
        (
            503,
            "etcdserver: request timed out, possibly due to previous leader failure",
            14,
            ProblemKind.UNREACHABLE,
            UNSURE,
        ),
        (503, "transport is closing", 14, ProblemKind.UNREACHABLE, UNSURE),
        (504, "context deadline exceeded", 4, ProblemKind.UNREACHABLE, UNSURE),
        (401, "etcdserver: invalid auth token", 16, ProblemKind.DENIED, RENEW),
        (400, "etcdserver: revision of auth store is old", 3, ProblemKind.DENIED, RENEW),
        (400, "etcdserver: user name is empty", 3, ProblemKind.DENIED, RENEW),
        (403, "etcdserver: permission denied", 7, ProblemKind.DENIED, FINAL),
        (400, "etcdserver: user name not found", 9, ProblemKind.DENIED, FINAL),
        (401, "something new", 16, ProblemKind.DENIED, FINAL),
    ],
)
def test_what_etcd_says_and_what_it_means(
    status: int, text: str, code: int, kind: ProblemKind, handling: Handling
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
        (404, b"404 page not found\n", ProblemKind.REFUSED, ELSEWHERE, NO_GATEWAY),
        (404, b'{"code":5,"message":"Not Found"}', ProblemKind.REFUSED, ELSEWHERE, NO_GATEWAY),
        (502, b"<html>", ProblemKind.UNREACHABLE, UNSURE, "it answered HTTP 502"),
        (200, b"<html>\n", ProblemKind.REFUSED, ELSEWHERE, "HTTP 200, as no etcd does: <html>"),
        (400, b"Client sent an HTTP request to an HTTPS server.\n", ProblemKind.DENIED, ELSEWHERE,
         "write https:// before it"),
        (500, b"[1]", ProblemKind.REFUSED, ELSEWHERE, "as no etcd does: [1]"),
        (500, b"x" * 1000, ProblemKind.REFUSED, ELSEWHERE, "..."),
    ],
)  # fmt: skip
def test_answers_of_others(
    status: int, body: bytes, kind: ProblemKind, handling: Handling, why: str
) -> None:
    refusal = refusal_of(status, body)
    assert (refusal.problem.kind, refusal.handling) == (kind, handling)
    assert refusal.problem.why.endswith(why)
    assert len(refusal.problem.why) < 300
