"""Leases for written keys: a thread keeps a `KeptLease` alive, and each write renews a `WriteLease`.

Keys under a `KeptLease` exist while the process lives. The lease is not revoked when its last user releases it,
since others may still read the keys; etcd deletes them `ttl_s` seconds later. If etcd was unreachable for so
long that the lease expired, the next write replaces the lease; etcd has deleted the keys of the old one.
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
"""How many times a write is attempted, in case its lease has expired."""
RENEWALS_PER_TTL = 3
"""Several, because a renewal may be lost."""
WRITES_PER_TTL = 10
"""A write does not renew the lease if less than a tenth of its time has passed since the last renewal."""
STOP_S = 0.5
"""How long `join` waits for the thread, which may be in a call."""


class Lease(Protocol):
    """The source of a write's lease."""

    def current(self) -> int:
        """Return the lease to write under. Raises `EtcdError`."""

    def lost(self, lease: int) -> None:
        """Note that a lease has expired."""


def transact(
    client: EtcdClient, txn: Txn, lease: Lease | None, limit_s: float | None = None
) -> TxnDone:
    """Perform a transaction whose keys are on the lease. Raises `EtcdError`."""
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
    """A lease and the thread that keeps it alive; both start with the first write."""

    def __init__(self, client: EtcdClient, ttl_s: int) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._lease = 0
        # A garbage-collected store releases its lease in any thread, even if that thread holds a lock or is
        # in a method of this class. So `release` takes no lock: `_users` and `_is_over` change atomically, and
        # the queue is reentrant.
        self._users: list[None] = [None]
        self._is_over = False
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()

    def current(self) -> int:
        """Return the lease to write under. Raises `EtcdError`."""
        with self._lock:
            if self._is_over:
                raise DistStoreError("the store is closed: nothing would keep its lease alive")
            if not self._lease:
                self._lease = self._client.grant(self._ttl_s).lease
                if self._thread is None:
                    thread = threading.Thread(
                        target=self._keep_renewing, name="holdfast-etcd-lease", daemon=True
                    )
                    thread.start()
                    self._thread = thread
            return self._lease

    def lost(self, lease: int) -> None:
        """Note that a lease has expired."""
        with self._lock:
            if self._lease == lease:
                self._lease = 0

    def share(self) -> KeptLease:
        """Count another user."""
        self._users.append(None)
        return self

    def release(self) -> None:
        """Remove a user; after the last, the lease is no longer renewed. Never blocks."""
        self._users.pop()
        if not self._users:
            self._is_over = True
            self._end.put(None)

    def join(self) -> None:
        """Wait for the thread to end, if the last user has released the lease."""
        if self._is_over and self._thread is not None:
            self._thread.join(STOP_S)

    def _keep_renewing(self) -> None:
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
            return  # The next renewal may succeed.
        if not left_s:
            self.lost(lease)


class WriteLease:
    """A lease that every write extends to its full time."""

    def __init__(self, client: EtcdClient, ttl_s: int) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._lease = 0
        self._renew_at = 0.0

    def current(self) -> int:
        """Return a lease with nearly its full time left. Raises `EtcdError`."""
        with self._lock:
            now = time.monotonic()
            if self._lease and now < self._renew_at:
                return self._lease
            if not self._lease or not self._client.keep_alive(self._lease):
                self._lease = self._client.grant(self._ttl_s).lease
            self._renew_at = now + self._ttl_s / WRITES_PER_TTL
            return self._lease

    def lost(self, lease: int) -> None:
        """Note that a lease has expired."""
        with self._lock:
            if self._lease == lease:
                self._lease = 0
