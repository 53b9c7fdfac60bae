"""Transactions of a store: what is asked of etcd, with the errors that stores raise.

The one thing to know: a change is made from what was read, on the condition that nobody changed it
meanwhile, and again from what is there then. That only one can win at a time costs many who change
one key some attempts; they pause for a random time, longer and longer, so that all get through.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from holdfast.core.etcd_calls import (
    Compare,
    Field,
    Get,
    KeyValue,
    Op,
    Put,
    Trouble,
    Txn,
    TxnDone,
)
from holdfast.etcd.client import CLOSED
from holdfast.etcd.errors import EtcdError
from holdfast.store.errors import DistError, DistNetworkError, DistStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.etcd.blocking import EtcdClient
    from holdfast.etcd.kept_lease import KeptLease
    from holdfast.etcd.store_places import Spot

TXN_OPS_MAX = 128
"""As many operations as etcd takes in one transaction, unless it is told otherwise."""
TXN_BYTES_MAX = 1024 * 1024
"""Values are put together in one transaction up to this; etcd takes 1.5 MiB, unless told."""
ATTEMPTS_MAX = 1000
"""After so many attempts to change a key that others change all the time, an error is raised."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.005, 0.4
"""Of the random times up to which attempts pause: shorter ones cost many writers more attempts."""
LEASES_MAX = 3
"""A write is begun again so many times because the lease it was to hang on has ended."""

T = TypeVar("T")
Found = KeyValue | None


class Look(NamedTuple):
    """What was found at some places, one after the other, at a revision of the whole of etcd."""

    found: tuple[KeyValue, ...]
    revision: int


class Transactions:
    """The transactions of one store. What it writes hangs on a lease, if there is one."""

    def __init__(self, client: EtcdClient, lease: KeptLease | None) -> None:
        self.client = client
        self.lease = lease

    @property
    def where(self) -> str:
        """The place as words for messages."""
        return f" in etcd at {self.client.settings.where}"

    def look(
        self, spots: Sequence[Spot], *, keys_only: bool = False, limit_s: float | None = None
    ) -> list[Look]:
        """Read places: at one moment, if they are not more than a transaction may have."""
        looks: list[Look] = []
        for begin in range(0, len(spots), TXN_OPS_MAX):
            some = spots[begin : begin + TXN_OPS_MAX]
            done = self.transact(success=[Get(*spot, keys_only) for spot in some], limit_s=limit_s)
            looks += [Look(found, done.revision) for found in done.results]
        return looks

    def read(self, spot: Spot) -> Found:
        """Read one place."""
        return _first(self.look([spot])[0].found)

    def write(self, contents: dict[Spot, bytes]) -> None:
        """Write places: all at one moment, if a transaction can have them."""
        for some in _parts(contents):
            self.transact(success=some)

    def change(
        self,
        spots: Sequence[Spot],
        make: Callable[[list[Found]], tuple[Sequence[Op], T]],
        known: Sequence[Found] | None = None,
    ) -> tuple[T, TxnDone | None]:
        """Change places by what `make` makes of what is there, as if nobody else did.

        `make` returns operations and an outcome, and may be called many times; what it returned
        last is true. Where nothing is `known`, it is called first with nothing at all, since many
        changes are the first. Returns the outcome, and what etcd answered if anything was done.
        """
        found: list[Found] = [None] * len(spots) if known is None else list(known)
        for attempt, pause_s in enumerate(_pauses()):
            ops, outcome = make(found)
            if not ops and (known is not None or attempt):
                return outcome, None
            done = self.transact(
                compare=[
                    Compare(spot.key, Field.MOD, 0 if one is None else one.mod_revision)
                    for spot, one in zip(spots, found, strict=True)
                ],
                success=ops,
                failure=[Get(*spot) for spot in spots],
            )
            if done.succeeded:
                return outcome, done
            found = [_first(result) for result in done.results]
            if attempt % 2:  # Every other attempt is made at once, from what is new.
                time.sleep(pause_s)
        raise DistStoreError(
            f"{spots[0].key!r}{self.where} could not be changed in {ATTEMPTS_MAX} attempts: others "
            "changed it each time"
        )

    def transact(
        self,
        *,
        compare: Sequence[Compare] = (),
        success: Sequence[Op] = (),
        failure: Sequence[Op] = (),
        limit_s: float | None = None,
    ) -> TxnDone:
        """Carry out one transaction, in less than `limit_s` if etcd's own limit is longer."""
        if limit_s is not None:
            limit_s = min(limit_s, self.client.settings.call_s)
        writes = any(isinstance(op, Put) for op in success)
        for _ in range(LEASES_MAX):
            lease = 0
            try:
                if writes and self.lease is not None:
                    lease = self.lease.current()
                    success = [
                        replace(op, lease=lease) if isinstance(op, Put) else op for op in success
                    ]
                txn = Txn(tuple(compare), tuple(success), tuple(failure))
                done = self.client.call(txn, limit_s)
            except EtcdError as problem:
                if problem.kind is not Trouble.LEASE_GONE or self.lease is None:
                    raise as_store_error(problem) from None
                self.lease.lost(lease)
            else:
                assert isinstance(done, TxnDone)
                return done
        raise DistStoreError(
            f"the lease of the store{self.where} ended {LEASES_MAX} times in a row"
        )


def as_store_error(problem: EtcdError) -> DistError:
    """Return a problem with etcd as what stores raise."""
    # With a client that was closed, no call will ever succeed again.
    is_away = problem.kind is Trouble.UNREACHABLE and problem.why != CLOSED.why
    return (DistNetworkError if is_away else DistStoreError)(str(problem))


def _first(found: Sequence[KeyValue]) -> Found:
    return found[0] if found else None


def _pauses() -> Iterator[float]:
    """Yield how long to pause after each attempt."""
    longest = PAUSE_S_MIN
    for _ in range(ATTEMPTS_MAX):
        yield random.uniform(0, longest)  # noqa: S311 (it only spreads the attempts)
        longest = min(2 * longest, PAUSE_S_MAX)


def _parts(contents: dict[Spot, bytes]) -> Iterator[list[Put]]:
    some: list[Put] = []
    size = 0
    for spot, value in contents.items():
        more = len(spot.key) + len(value)
        if some and (len(some) == TXN_OPS_MAX or size + more > TXN_BYTES_MAX):
            yield some
            some, size = [], 0
        some.append(Put(spot.key, value))
        size += more
    if some:
        yield some
