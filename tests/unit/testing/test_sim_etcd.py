"""The simulator's etcd by itself; `test_sim_etcd_real.py` compares it with a real one."""

from __future__ import annotations

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
    Op,
    Problem,
    ProblemKind,
    Put,
    Revoke,
    Revoked,
    Txn,
    TxnDone,
    end_of_prefix,
)
from holdfast.testing.sim import etcd as sim_etcd
from holdfast.testing.sim.etcd import ELECTION_S, LEASE_S_MIN, OPS_MAX, REQUEST_BYTES_MAX, SimEtcd

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


def trouble(answer: object) -> ProblemKind:
    assert isinstance(answer, Problem), answer
    return answer.kind


def watched(etcd: SimEtcd, key: bytes, end: bytes = b"", start: int = 0) -> Seen:
    seen: Seen = []
    number = etcd.subscribe(key, end, start, lambda *told: seen.append(told))
    assert isinstance(number, int), number
    return seen


# Keys and revisions.


def test_a_transaction_is_one_revision_and_a_read_is_none() -> None:
    etcd = SimEtcd()
    assert do(etcd).revision == 1
    assert do(etcd, Put(b"a", b"1"), Put(b"b", b"2")).revision == 2
    assert read(etcd, b"a", b"c") == (
        KeyValue(key=b"a", value=b"1", create_revision=2, mod_revision=2, version=1),
        KeyValue(key=b"b", value=b"2", create_revision=2, mod_revision=2, version=1),
    )
    assert do(etcd, Put(b"a", b"1")).revision == 3, "the same value again is a change"
    assert do(etcd, Delete(b"nobody")).revision == 3, "nothing was changed"
    assert etcd.revision == 3
    assert etcd.load.writes == 2


def test_a_deletion_resets_what_is_counted() -> None:
    etcd = SimEtcd()
    do(etcd, Put(b"a", b"1"))
    do(etcd, Put(b"a", b"2"))
    assert read(etcd, b"a")[0].version == 2
    assert do(etcd, Delete(b"a")).deleted == (1,)
    assert read(etcd, b"a") == ()
    do(etcd, Put(b"a", b"3"))
    assert read(etcd, b"a") == (
        KeyValue(key=b"a", value=b"3", create_revision=5, mod_revision=5, version=1),
    )


def test_ranges() -> None:
    etcd = SimEtcd()
    do(etcd, *(Put(key, b"v") for key in (b"b", b"a/2", b"a/1", b"a", b"a0")))
    keys = [one.key for one in read(etcd, b"a/", end_of_prefix(b"a/"))]
    assert keys == [b"a/1", b"a/2"]
    assert [one.key for one in read(etcd, b"a0", b"\0")] == [b"a0", b"b"]
    assert read(etcd, b"b", b"a") == ()
    (found,) = do(etcd, Get(b"b", keys_only=True)).results[0]
    assert (found.key, found.value, found.version) == (b"b", b"", 1)
    done = do(etcd, Delete(b"a", b"b"), Get(b"\0", b"\0"))
    assert done.deleted == (4, 0)
    assert [one.key for one in done.results[1]] == [b"b"], "a read sees what came before it"


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (Compare(b"a", Field.CREATE, 2), True),
        (Compare(b"a", Field.CREATE, 3), False),
        (Compare(b"a", Field.MOD, 3), True),
        (Compare(b"a", Field.MOD, 2), False),
        (Compare(b"a", Field.VERSION, 2), True),
        (Compare(b"a", Field.VERSION, 0), False),
        (Compare(b"a", Field.VALUE, b"new"), True),
        (Compare(b"a", Field.VALUE, b"old"), False),
        (Compare(b"none", Field.CREATE, 0), True),
        (Compare(b"none", Field.MOD, 0), True),
        (Compare(b"none", Field.VERSION, 1), False),
        (Compare(b"none", Field.VALUE, b""), False),
    ],
)
def test_comparisons(compare: Compare, *, holds: bool) -> None:
    etcd = SimEtcd()
    do(etcd, Put(b"a", b"old"))
    do(etcd, Put(b"a", b"new"))
    always = Compare(b"a", Field.VERSION, 2)
    answer = etcd.perform(
        0.0, Txn((always, compare), (Put(b"yes", b""),), (Put(b"no", b""), Get(b"a")))
    )
    assert isinstance(answer, TxnDone)
    assert answer.succeeded is holds
    assert len(answer.results) == len(answer.deleted) == (1 if holds else 2)
    assert [one.key for one in read(etcd, b"b", b"\0")] == [b"yes" if holds else b"no"]


@pytest.mark.parametrize(
    "request_",
    [
        Txn(success=(Put(b"a", b"1"), Put(b"a", b"2"))),
        Txn(failure=(Put(b"a", b"1"), Put(b"a", b"2"))),
        Txn(success=(Delete(b"a"), Put(b"a", b"2"))),
        Txn(success=(Put(b"b", b"1"), Delete(b"a", b"c"))),
        Txn(success=(Get(b""),)),
        Txn(compare=(Compare(b"", Field.MOD, 0),)),
        Txn(success=(Get(b"a"),) * (OPS_MAX + 1)),
        Txn(success=(Put(b"a", b"x" * REQUEST_BYTES_MAX),)),
        Grant(10**10),
    ],
)
def test_what_etcd_does_not_do(request_: Txn | Grant) -> None:
    etcd = SimEtcd()
    assert trouble(etcd.perform(0.0, request_)) is ProblemKind.REFUSED
    assert etcd.revision == 1
    assert etcd.next_expiry() is None


# Space.


def test_a_full_etcd_takes_no_writes_but_lets_go() -> None:
    etcd = SimEtcd()
    lease = grant(etcd, 5)
    do(etcd, Put(b"a", b"1"), Put(b"b", b"1", lease))
    etcd.full = True
    assert trouble(etcd.perform(0.0, Txn(success=(Put(b"a", b"2"),)))) is ProblemKind.NO_SPACE
    assert trouble(etcd.perform(0.0, Txn(failure=(Put(b"a", b"2"),)))) is ProblemKind.NO_SPACE
    assert trouble(etcd.perform(0.0, Grant(5))) is ProblemKind.NO_SPACE
    assert read(etcd, b"a")[0].value == b"1"
    assert etcd.perform(1.0, KeepAlive(lease)) == KeptAlive(5)
    assert etcd.perform(1.0, Revoke(lease)) == Revoked()
    assert do(etcd, Delete(b"a")).deleted == (1,)
    etcd.full = False
    assert do(etcd, Put(b"a", b"2")).revision == 5


# Leases.


def test_a_lease_ends_with_all_its_keys_in_one_revision() -> None:
    etcd = SimEtcd()
    lease, other = grant(etcd, 5), grant(etcd, 60)
    do(etcd, Put(b"b", b"", lease))
    do(etcd, Put(b"a", b"", lease), Put(b"c", b"", lease), Put(b"d", b"", lease))
    do(etcd, Put(b"c", b""))  # No longer the lease's,
    do(etcd, Put(b"d", b"", other))  # nor this one.
    assert read(etcd, b"b")[0].lease == lease
    seen = watched(etcd, b"a", b"z")
    assert etcd.next_expiry() == 5.0
    etcd.expire(4.9)
    assert etcd.revision == 5
    etcd.expire(5.0)
    assert seen == [(6, (Change(b"a", None, 6), Change(b"b", None, 6)))]
    assert etcd.next_expiry() == 60.0
    assert (
        trouble(etcd.perform(5.0, Txn(success=(Put(b"a", b"", lease),)))) is ProblemKind.LEASE_GONE
    )
    assert etcd.perform(5.0, KeepAlive(lease)) == KeptAlive(0)
    assert etcd.perform(5.0, Revoke(lease)) == Revoked()
    assert etcd.revision == 6


def test_each_lease_that_ends_is_a_revision_and_one_without_keys_is_none() -> None:
    etcd = SimEtcd()
    late, early, empty = grant(etcd, 5), grant(etcd, 4), grant(etcd, 3)
    do(etcd, Put(b"late", b"", late), Put(b"early", b"", early))
    seen = watched(etcd, b"\0", b"\0")
    etcd.expire(9.0)
    assert seen == [(3, (Change(b"early", None, 3),)), (4, (Change(b"late", None, 4),))]
    assert etcd.perform(9.0, KeepAlive(empty)) == KeptAlive(0)


def test_a_lease_goes_on_while_it_is_kept_alive() -> None:
    etcd = SimEtcd()
    lease = grant(etcd, 5)
    assert etcd.perform(3.0, KeepAlive(lease)) == KeptAlive(5)
    assert etcd.next_expiry() == 8.0
    etcd.expire(7.9)
    do(etcd, Put(b"a", b"", lease))
    assert etcd.perform(8.0, KeepAlive(lease)) == KeptAlive(0), "its time is over"
    assert read(etcd, b"a") == ()


def test_a_lease_over_its_time_holds_until_etcd_looks() -> None:
    etcd = SimEtcd()
    lease = grant(etcd, 5)
    do(etcd, Put(b"a", b"", lease), now=5.4)
    assert len(read(etcd, b"a")) == 1


def test_revoking_ends_a_lease_at_once() -> None:
    etcd = SimEtcd()
    lease = grant(etcd, 5)
    do(etcd, Put(b"a", b"", lease), Put(b"b", b"", lease))
    do(etcd, Delete(b"b"))
    assert etcd.perform(0.0, Revoke(lease)) == Revoked()
    assert etcd.changes_since(b"\0", b"\0", 4) == [(4, (Change(b"a", None, 4),))]
    assert etcd.next_expiry() is None


def test_only_the_branch_taken_needs_its_lease() -> None:
    etcd = SimEtcd()
    gone = Txn(failure=(Put(b"a", b"", 77),))
    assert isinstance(etcd.perform(0.0, gone), TxnDone)


def test_short_leases_are_made_longer() -> None:
    assert SimEtcd().perform(0.0, Grant(1)) == Granted(sim_etcd.FIRST_LEASE, LEASE_S_MIN)


def test_after_a_failover_leases_have_their_whole_time_again() -> None:
    etcd = SimEtcd()
    grant(etcd, 5)
    etcd.failover(4.0)
    assert etcd.next_expiry() == 9.0 + ELECTION_S


# History and watches.


def test_a_watch_sees_what_its_range_had_and_what_comes() -> None:
    etcd = SimEtcd()
    do(etcd, Put(b"a", b"1"), Put(b"x", b"1"))
    do(etcd, Put(b"x", b"2"))
    do(etcd, Delete(b"a"))
    past, future, one = watched(etcd, b"a", b"c", 2), watched(etcd, b"a", b"c"), b"b"
    ahead = watched(etcd, b"\0", b"\0", 6)
    history: Seen = [(2, (Change(b"a", b"1", 2, 2),)), (4, (Change(b"a", None, 4),))]
    assert past == history == etcd.changes_since(b"a", b"c", 0)
    assert etcd.changes_since(b"a", b"c", 3) == history[1:]
    do(etcd, Put(one, b"1"))
    do(etcd, Put(b"c", b"1"))
    assert future == [(5, (Change(b"b", b"1", 5, 5),))]
    assert past == history + future
    assert ahead == [(6, (Change(b"c", b"1", 6, 6),))]


def test_a_watch_that_was_ended_sees_no_more() -> None:
    etcd = SimEtcd()
    seen: Seen = []
    number = etcd.subscribe(b"a", b"", 0, lambda *told: seen.append(told))
    assert isinstance(number, int)
    do(etcd, Put(b"a", b"1"))
    etcd.unsubscribe(number)
    etcd.unsubscribe(number)
    do(etcd, Put(b"a", b"2"))
    assert [revision for revision, _ in seen] == [2]


def test_after_a_compaction_watches_from_before_it_are_refused() -> None:
    etcd = SimEtcd()
    running = watched(etcd, b"a")
    for value in (b"1", b"2", b"3"):
        do(etcd, Put(b"a", value))
    assert etcd.compact(3) is None
    assert trouble(etcd.subscribe(b"a", b"", 2, lambda *_: None)) is ProblemKind.COMPACTED
    assert trouble(etcd.changes_since(b"a", b"", 2)) is ProblemKind.COMPACTED
    assert [revision for revision, _ in watched(etcd, b"a", start=3)] == [3, 4]
    assert trouble(etcd.compact(3)) is ProblemKind.COMPACTED
    assert trouble(etcd.compact(5)) is ProblemKind.REFUSED
    do(etcd, Put(b"a", b"4"))
    assert [revision for revision, _ in running] == [2, 3, 4, 5]
    assert read(etcd, b"a")[0].create_revision == 2, "what is stored stays as it was"


def test_a_compaction_loses_what_its_own_revision_deleted() -> None:
    etcd = SimEtcd()
    do(etcd, Put(b"a", b"1"), Put(b"b", b"1"))
    do(etcd, Delete(b"a"), Put(b"b", b"2"))
    do(etcd, Delete(b"b"))
    etcd.compact(3)
    assert etcd.changes_since(b"\0", b"\0", 3) == [
        (3, (Change(b"b", b"2", 3, 2),)),
        (4, (Change(b"b", None, 4),)),
    ]


def test_history_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_etcd, "HISTORY_REVISIONS_MAX", 10)
    etcd = SimEtcd()
    for _ in range(25):
        do(etcd, Put(b"a", b""))
    assert etcd.revision == 26
    assert etcd.compacted == 17
    assert len(watched(etcd, b"a", start=17)) == 10


# Costs.


def test_what_it_costs_is_counted() -> None:
    etcd = SimEtcd()
    watched(etcd, b"key")
    lease = grant(etcd, 5)
    do(etcd, Put(b"key", b"value", lease))
    read(etcd, b"key")
    etcd.perform(1.0, KeepAlive(lease))
    etcd.perform(1.0, Txn(success=(Put(b"key", b"", 77),)))
    etcd.perform(1.0, Revoke(lease))
    load = etcd.load
    assert load.requests == {
        "grant": 1,
        "write": 1,
        "read": 1,
        "keep_alive": 1,
        "problem": 1,
        "revoke": 1,
    }
    assert load.writes == 2, "of which one by the end of the lease"
    assert load.bytes_in == 3 + 5 + 3 + 3, "what was put, read, and not put"
    assert load.bytes_out == 8 + 8 + 3, "what was watched, read, and watched again"
