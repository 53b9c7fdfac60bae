"""The simulator's etcd and a real one return the same answers to the same requests.

Lease ids (which `RealAndSimulated` translates) and the wording of problems differ. Everything else
is compared: each answer, and the changes that a watch reports from any revision on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

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
    KeyValue,
    Op,
    Problem,
    ProblemKind,
    Put,
    Request,
    Revoke,
    Txn,
    TxnDone,
)
from holdfast.etcd.etcd_settings import EtcdSettings
from holdfast.etcd.sync_client import EtcdClient, EtcdError
from real_etcd import RawRefused, running_etcd
from simulator.etcd_model import OPS_MAX, SimEtcd
from simulator.world import seeded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from real_etcd import Etcd

PATIENCE_S = 30.0
NO_LEASE = 77  # Neither etcd has granted it.
KEYS = (b"a", b"a/1", b"a/2", b"a/2/x", b"b", b"b\xff", b"c")
RANGES = (
    *((key, b"") for key in KEYS),
    (b"a/", b"a0"),
    (b"a", b"b"),
    (b"a/2", b"\0"),
    (b"\0", b"\0"),
    (b"", b"b"),
)
EMPTY_RANGES = ((b"nobody", b""), (b"b", b"a"), (b"b", b"b"))


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    # etcd's defaults, on which the shortest lease depends.
    usual = ("--heartbeat-interval=100", "--election-timeout=1000")
    with running_etcd(tmp_path_factory.mktemp("etcd"), *usual) as one:
        yield one


class RealAndSimulated:
    """A real etcd and a simulated one that has as many revisions, both without keys."""

    def __init__(self, etcd: Etcd, client: EtcdClient) -> None:
        self.etcd = etcd
        self.client = client
        self.start = client.txn(Txn(success=(Delete(b"\0", b"\0"),))).revision + 1
        self.sim = SimEtcd(revision=self.start - 1)
        self.leases: dict[int, int] = {}  # Ids of the real leases, by those of the simulated ones.

    def perform_on_both(self, request: Request) -> Answer:
        """Send a request to both; fail unless the answers agree, and return the answer."""
        simulated = self.sim.perform(0.0, request)
        real = self._perform_on_real(request)
        if isinstance(simulated, Granted) and isinstance(real, Granted):
            self.leases[simulated.lease] = real.lease
        assert self._seen(real) == self._seen(simulated), request
        return simulated

    def _perform_on_real(self, request: Request) -> Answer:
        try:
            return self.client.call(self._for_real(request))
        except EtcdError as error:
            return Problem(error.kind, error.why)

    def _for_real(self, request: Request) -> Request:
        if isinstance(request, KeepAlive | Revoke):
            return type(request)(self.leases.get(request.lease, request.lease))
        if isinstance(request, Grant):
            return request
        success, failure = (
            tuple(
                Put(op.key, op.value, self.leases.get(op.lease, op.lease))
                if isinstance(op, Put)
                else op
                for op in ops
            )
            for ops in (request.success, request.failure)
        )
        return Txn(request.compare, success, failure)

    def _seen(self, answer: Answer) -> object:
        """Return the part of an answer that must be the same for both."""
        if isinstance(answer, Problem):
            return answer.kind
        if isinstance(answer, Granted):
            return answer.ttl_s
        if isinstance(answer, TxnDone):
            numbers = {real: simulated for simulated, real in self.leases.items()}
            results = tuple(
                tuple(
                    msgspec.structs.replace(one, lease=numbers.get(one.lease, one.lease))
                    for one in found
                )
                for found in answer.results
            )
            return msgspec.structs.replace(answer, results=results)
        return answer

    def fill(self, *, full: bool) -> None:
        action = "ACTIVATE" if full else "DEACTIVATE"
        self.etcd.raw("/v3/maintenance/alarm", {"action": action, "alarm": "NOSPACE"})
        self.sim.full = full

    def compare_watches(self, key: bytes, end: bytes, start: int) -> None:
        """Watch both from a revision up to the last change, and compare the changes."""
        received = self.sim.changes_since(key, end, start)
        if isinstance(received, Problem):
            with self.client.watch(key, end, start) as watch, pytest.raises(EtcdError) as refused:
                watch.next(PATIENCE_S)
            assert refused.value.kind is received.kind
            return
        simulated = [change for _, changes in received for change in changes]
        real = self.watched(key, end, start, simulated[-1])
        if (
            start == self.sim.compacted
        ):  # Etcd 3.5.16 and later also report the deletions of this revision.
            real = [one for one in real if one.value is not None or one.mod_revision > start]
        assert real == simulated

    def watched(self, key: bytes, end: bytes, start: int, last: Change) -> list[Change]:
        """Return the real etcd's changes up to `last`."""
        real: list[Change] = []
        with self.client.watch(key, end, start) as watch:
            while not real or real[-1].mod_revision < last.mod_revision:
                real += watch.next(PATIENCE_S)
        return real


@pytest.fixture
def both(etcd: Etcd) -> Iterator[RealAndSimulated]:
    settings = EtcdSettings(endpoints=(("127.0.0.1", etcd.port),))
    with EtcdClient(settings) as client:
        yield RealAndSimulated(etcd, client)


class RandomRequests:
    """Draws requests that often concern stored keys and existing leases."""

    def __init__(self, sim: SimEtcd, rng: Random) -> None:
        self._sim = sim
        self._rng = rng
        self.leases = [NO_LEASE]
        """All granted leases, including those that ended."""

    def request(self) -> Request:
        rng = self._rng
        kind = rng.random()
        if kind < 0.06:
            return Grant(rng.choice((60, 100)))
        if kind < 0.1:
            return KeepAlive(rng.choice(self.leases))
        if kind < 0.14:
            return Revoke(rng.choice(self.leases))
        compare = tuple(self._compare() for _ in range(rng.choice((0, 0, 1, 1, 2))))
        success = tuple(self._op() for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))))
        failure = tuple(self._op() for _ in range(rng.choice((0, 0, 1, 2))))
        # The client sends a single unconditional operation as a plain request, without `failure`.
        return Txn(compare, success, failure if compare or len(success) != 1 else ())

    def _op(self) -> Op:
        rng = self._rng
        kind = rng.random()
        if kind < 0.01:
            return Get(b"")  # An invalid key.
        if kind < 0.5:
            lease = rng.choice(self.leases) if rng.random() < 0.3 else 0
            return Put(rng.choice(KEYS), rng.choice((b"", b"1", b"2", b"\xff\0")), lease)
        key, end = rng.choice((*RANGES, *EMPTY_RANGES))
        if kind < 0.75:
            return Get(key, end, keys_only=rng.random() < 0.2)
        return Delete(key, end)

    def _compare(self) -> Compare:
        """Draw a condition that is true about half of the time."""
        rng = self._rng
        key, field = rng.choice(KEYS), rng.choice(list(Field))
        answer = self._sim.perform(0.0, Txn(success=(Get(key),)))
        assert isinstance(answer, TxnDone)
        stored = answer.results[0][0] if answer.results[0] else KeyValue(key=key)
        if field is Field.VALUE:
            return Compare(key, field, stored.value + rng.choice((b"", b"", b"?")))
        now = {
            Field.CREATE: stored.create_revision,
            Field.MOD: stored.mod_revision,
            Field.VERSION: stored.version,
        }[field]
        return Compare(key, field, rng.choice((now, now, 0, now + 1)))


@pytest.mark.parametrize("seed", range(4))
def test_simulated_etcd_responds_like_real_etcd(both: RealAndSimulated, seed: int) -> None:
    rng = seeded(seed)
    random_requests = RandomRequests(both.sim, rng)
    answers: list[Answer] = []
    with both.client.watch(b"\0", b"\0", both.start) as live:
        for _ in range(250):
            if rng.random() < (0.2 if both.sim.full else 0.02):
                both.fill(full=not both.sim.full)
            answers.append(both.perform_on_both(random_requests.request()))
            if isinstance(answers[-1], Granted):
                random_requests.leases.append(answers[-1].lease)
        both.fill(full=False)
        both.perform_on_both(Txn(success=tuple(Put(key, b"the last") for key in KEYS)))
        received = both.sim.changes_since(b"\0", b"\0", both.start)
        assert isinstance(received, list)
        heard: list[Change] = []
        while not heard or heard[-1].mod_revision < both.sim.revision:
            heard += live.next(PATIENCE_S)
    assert heard == [change for _, changes in received for change in changes]
    for key, end in RANGES:
        both.compare_watches(key, end, rng.randrange(both.start, both.sim.revision))
    done = [one for one in answers if isinstance(one, TxnDone)]
    problems = {one.kind for one in answers if isinstance(one, Problem)}
    assert problems == {ProblemKind.REFUSED, ProblemKind.LEASE_GONE, ProblemKind.NO_SPACE}
    assert {one.succeeded for one in done} == {False, True}
    assert both.sim.revision - both.start > 60, "most requests change something"


def test_watches_after_a_compaction_match_real_etcd(both: RealAndSimulated) -> None:
    rng = seeded("compaction")
    random_requests = RandomRequests(both.sim, rng)
    for _ in range(60):
        both.perform_on_both(random_requests.request())
    both.perform_on_both(Txn(success=(Put(b"a", b""), Put(b"b", b""), Put(b"c", b""))))
    both.perform_on_both(Txn(success=(Delete(b"a"), Put(b"b", b"new"))))
    compacted = both.sim.revision
    both.perform_on_both(Txn(success=tuple(Put(key, b"the last") for key in KEYS)))
    assert both.sim.compact(compacted) is None
    both.etcd.compact(compacted)
    for start in range(compacted - 2, compacted + 2):
        for key, end in ((b"a", b""), (b"b", b""), (b"\0", b"\0")):
            both.compare_watches(key, end, start)
    for revision in (compacted, both.sim.revision + 1):
        assert both.sim.compact(revision) is not None
        with pytest.raises(RawRefused):
            both.etcd.compact(revision)


@pytest.mark.parametrize(
    "ops",
    [
        (Delete(b"a", b"\0"), Put(b"b", b"again"), Get(b"\0", b"\0")),
        (Put(b"b", b"again"), Delete(b"a", b"\0"), Get(b"\0", b"\0")),
        (Delete(b"a", b"c"), Delete(b"b", b"d")),
        (Delete(b"a", b"b"), Put(b"b", b"again")),
        (Delete(b"a", b"b\0"), Put(b"b", b"again")),
        (Delete(b"nobody"),) * OPS_MAX,
        (Delete(b"nobody"),) * (OPS_MAX + 1),
    ],
)
def test_edge_cases_of_transactions_match_real_etcd(
    both: RealAndSimulated, ops: tuple[Op, ...]
) -> None:
    both.perform_on_both(Txn(success=(Put(b"a", b"1"), Put(b"b", b"1"), Put(b"c", b"1"))))
    both.perform_on_both(Txn(success=ops))
    both.perform_on_both(Txn(failure=ops))
    both.perform_on_both(Txn(success=(Get(b"\0", b"\0"),)))
    both.compare_watches(b"\0", b"\0", both.start)


def test_lease_limits_match_real_etcd(both: RealAndSimulated) -> None:
    for ttl_s in (-1, 0, 1, 2, 3, 9_000_000_000, 9_000_000_001):
        both.perform_on_both(Grant(ttl_s))
    both.fill(full=True)
    both.perform_on_both(Grant(9_000_000_001))
    both.fill(full=False)


def test_lease_expiry_matches_real_etcd(both: RealAndSimulated) -> None:
    leases = [both.perform_on_both(Grant(2)) for _ in range(2)]
    first, second = (one.lease for one in leases if isinstance(one, Granted))
    both.perform_on_both(
        Txn(success=(Put(b"b", b"", first), Put(b"a/1", b"", first), Put(b"c", b"", first)))
    )
    both.perform_on_both(Txn(success=(Put(b"c", b""), Put(b"a", b"", second))))
    both.perform_on_both(Revoke(second))
    both.sim.expire(2.0)
    received = both.sim.changes_since(b"\0", b"\0", both.start)
    assert isinstance(received, list)
    simulated = [change for _, changes in received for change in changes]
    assert both.watched(b"\0", b"\0", both.start, simulated[-1]) == simulated
    both.perform_on_both(KeepAlive(first))
    both.perform_on_both(Txn(success=(Put(b"a", b"", first),)))
    both.perform_on_both(Txn(success=(Get(b"\0", b"\0"),)))
