"""Leases for what is written: one that a thread keeps alive, one that writes themselves renew.

What is written under a `KeptLease` stays while the process lives, and is deleted after its death.
Nothing is revoked when the last user closes, since others may still read what was written; it is
deleted `ttl_s` seconds later. A lease that ended all the same, because etcd could not be reached for
so long, is replaced at the next write; what was on it is gone.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from holdfast.core.etcd.calls import ProblemKind, Put, Txn
from holdfast.etcd.sync_client import EtcdError
from holdfast.store.store_errors import DistStoreError

if TYPE_CHECKING:
    from holdfast.core.etcd.calls import TxnDone
    from holdfast.etcd.sync_client import EtcdClient

ATTEMPTS_MAX = 3
"""A write is begun again so many times because the lease it was to be on has ended."""
RENEWALS_PER_TTL = 3
"""For a lease that is kept: some of them may be lost."""
WRITES_PER_TTL = 10
"""A lease that was renewed less than a tenth of its time ago is fresh enough for a write."""
STOP_S = 0.5
"""How long `join` waits for the thread, which may be in the middle of a call."""


class Lease(Protocol):
    """Where the lease of a write comes from."""

    def current(self) -> int:
        """Return the lease to write under. Raises `EtcdError`."""

    def lost(self, lease: int) -> None:
        """Take note that a lease is gone."""


def transact(
    client: EtcdClient, txn: Txn, lease: Lease | None, limit_s: float | None = None
) -> TxnDone:
    """Perform a transaction, with what it puts on the lease. Raises `EtcdError`."""
    if lease is None or not any(isinstance(op, Put) for op in txn.success):
        return client.txn(txn, limit_s)
    for attempt in range(1, ATTEMPTS_MAX + 1):
        number = lease.current()
        puts = (replace(op, lease=number) if isinstance(op, Put) else op for op in txn.success)
        try:
            return client.txn(replace(txn, success=tuple(puts)), limit_s)
        except EtcdError as problem:
            if problem.kind is not ProblemKind.LEASE_GONE or attempt == ATTEMPTS_MAX:
                raise
            lease.lost(number)
    raise AssertionError("not reached")


class KeptLease:
    """A lease and the thread that keeps it alive; both begin with the first write."""

    def __init__(self, client: EtcdClient, ttl_s: int) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._lease = 0
        # A store that is garbage-collected releases its lease in whatever thread collects it, which
        # may hold any lock and be anywhere in here. So these two take single steps, and a queue
        # made for that.
        self._users: list[None] = [None]
        self._is_over = False
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()

    def current(self) -> int:
        """Return the lease to write under. Raises `EtcdError`."""
        with self._lock:
            if self._is_over:
                raise DistStoreError("the store is closed: nothing would keep what it writes")
            if not self._lease:
                self._lease = self._client.grant(self._ttl_s).lease
                if self._thread is None:
                    thread = threading.Thread(
                        target=self._keep, name="holdfast-etcd-lease", daemon=True
                    )
                    thread.start()
                    self._thread = thread
            return self._lease

    def lost(self, lease: int) -> None:
        """Take note that a lease is gone."""
        with self._lock:
            if self._lease == lease:
                self._lease = 0

    def share(self) -> KeptLease:
        """Count another user."""
        self._users.append(None)
        return self

    def release(self) -> None:
        """Count one user less; after the last, the lease is kept no more. Never blocks."""
        self._users.pop()
        if not self._users:
            self._is_over = True
            self._end.put(None)

    def join(self) -> None:
        """Wait for the end of the thread, if the last user has released the lease."""
        if self._is_over and self._thread is not None:
            self._thread.join(STOP_S)

    def _keep(self) -> None:
        while not self._is_over:
            try:
                self._end.get(timeout=self._ttl_s / RENEWALS_PER_TTL)
            except queue.Empty:
                self._renew()

    def _renew(self) -> None:
        lease = self._lease
        if not lease:
            return
        try:
            left_s = self._client.keep_alive(lease)
        except EtcdError:
            return  # The next renewal may arrive.
        if not left_s:
            self.lost(lease)


class WriteLease:
    """A lease that gets its whole time again when something is written under it."""

    def __init__(self, client: EtcdClient, ttl_s: int) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._lease = 0
        self._renew_at = 0.0

    def current(self) -> int:
        """Return a lease that has nearly all of its time left. Raises `EtcdError`."""
        with self._lock:
            now = time.monotonic()
            if self._lease and now < self._renew_at:
                return self._lease
            if not self._lease or not self._client.keep_alive(self._lease):
                self._lease = self._client.grant(self._ttl_s).lease
            self._renew_at = now + self._ttl_s / WRITES_PER_TTL
            return self._lease

    def lost(self, lease: int) -> None:
        """Take note that a lease is gone."""
        with self._lock:
            if self._lease == lease:
                self._lease = 0
