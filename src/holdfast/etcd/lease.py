"""A lease that lasts for as long as somebody uses it, and its time longer.

What is written under it stays while the process lives, and goes by itself after it has died. The
one thing to know: nothing is revoked when the last user lets go, since others may still read what
was written; it goes `ttl_s` seconds later. A lease that etcd let go all the same (because it could
not be reached for so long) is replaced by another at the next write; what hung on it is gone.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from holdfast.core.etcd.calls import Grant, Granted, KeepAlive, KeptAlive
from holdfast.etcd.sync_client import EtcdError
from holdfast.store.errors import DistStoreError

if TYPE_CHECKING:
    from holdfast.etcd.sync_client import EtcdClient

SIGNS_PER_TTL = 3
"""So many signs of life are given in the time of a lease: some may be lost."""
STOP_S = 0.5
"""How long the end waits for the thread, which may be in the middle of a call."""


class KeptLease:
    """A lease and the thread that keeps it; both begin with the first write."""

    def __init__(self, client: EtcdClient, ttl_s: int) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._lease = 0
        # A store that is forgotten lets go in whatever thread collects it, which may hold any lock
        # and be anywhere in here. So these two take single steps, and a queue made for that.
        self._users: list[None] = [None]
        self._is_over = False
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()

    def current(self) -> int:
        """Return the number of the lease to write under. Raises `EtcdError`."""
        with self._lock:
            if self._is_over:
                raise DistStoreError("the store is closed: nobody keeps what it would write")
            if not self._lease:
                granted = self._client.call(Grant(self._ttl_s))
                assert isinstance(granted, Granted)
                self._lease = granted.lease
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
        """Count one user less; after the last, the lease is kept no more. Waits for nothing."""
        self._users.pop()
        if not self._users:
            self._is_over = True
            self._end.put(None)

    def join(self) -> None:
        """Wait for the end of the thread, if the last user has let go."""
        if self._is_over and self._thread is not None:
            self._thread.join(STOP_S)

    def _keep(self) -> None:
        while not self._is_over:
            try:
                self._end.get(timeout=self._ttl_s / SIGNS_PER_TTL)
            except queue.Empty:
                self._give_sign()

    def _give_sign(self) -> None:
        lease = self._lease
        if not lease:
            return
        try:
            answer = self._client.call(KeepAlive(lease))
        except EtcdError:
            return  # The next sign of life may arrive.
        if isinstance(answer, KeptAlive) and not answer.ttl_s:
            self.lost(lease)
