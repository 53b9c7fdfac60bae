"""The simulator's etcd: time, limits, costs. `test_sim_etcd_real.py` compares the rest with etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.etcd.calls import (
    Change,
    Get,
    Grant,
    Granted,
    KeepAlive,
    KeptAlive,
    KeyValue,
    Op,
    Put,
    Txn,
    TxnDone,
)
from simulator import etcd_model
from simulator.etcd_model import ELECTION_S, SimEtcd

if TYPE_CHECKING:
    import pytest

Seen = list[tuple[int, tuple[Change, ...]]]


def do(etcd: SimEtcd, *ops: Op, now: float = 0.0) -> TxnDone:
    answer = etcd.perform(now, Txn(success=ops))
    assert isinstance(answer, TxnDone), answer
    return answer


def read(etcd: SimEtcd, key: bytes, end: bytes = b"") -> tuple[KeyValue, ...]:
    return do(etcd, Get(key, end)).results[0]


def grant(etcd: SimEtcd, ttl_s: int, now: float = 0.0) -> int:
    answer = etcd.perform(now, Grant(ttl_s))
    assert isinstance(answer, Granted), answer
    return answer.lease


def watched(etcd: SimEtcd, key: bytes, end: bytes = b"", start: int = 0) -> Seen:
    seen: Seen = []
    number = etcd.subscribe(key, end, start, lambda *received: seen.append(received))
    assert isinstance(number, int), number
    return seen


def test_keepalive_extends_a_lease() -> None:
    etcd = SimEtcd()
    lease = grant(etcd, 5)
    assert etcd.perform(3.0, KeepAlive(lease)) == KeptAlive(5)
    assert etcd.next_expiry() == 8.0
    etcd.expire(7.9)
    do(etcd, Put(b"a", b"", lease))
    assert etcd.perform(8.0, KeepAlive(lease)) == KeptAlive(0), "the lease has expired"
    assert read(etcd, b"a") == ()


def test_failover_renews_all_leases() -> None:
    etcd = SimEtcd()
    grant(etcd, 5)
    etcd.failover(4.0)
    assert etcd.next_expiry() == 9.0 + ELECTION_S


def test_history_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_model, "HISTORY_REVISIONS_MAX", 10)
    etcd = SimEtcd()
    for _ in range(25):
        do(etcd, Put(b"a", b""))
    assert etcd.revision == 26
    assert etcd.compacted == 17
    assert len(watched(etcd, b"a", start=17)) == 10
