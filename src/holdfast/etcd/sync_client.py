"""etcd for threads that block: `EtcdClient` runs an `AsyncEtcdClient` in a thread of its own.

The thread starts with the first call and ends with `close`. Any number of threads may call. A
`Problem`, which the asynchronous client returns as an answer, is raised here as `EtcdError`.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, TypeVar

from holdfast import console
from holdfast.core.etcd.calls import (
    Change,
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
from holdfast.errors import HoldfastError
from holdfast.etcd.async_client import CLOSE_S, CLOSED, AsyncEtcdClient
from holdfast.etcd.optional_h11 import require_h11
from holdfast.net.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any, Self

    from holdfast.etcd.async_client import WatchHandle
    from holdfast.etcd.etcd_settings import EtcdSettings


SLACK_S = 5.0
"""If a call is unfinished this long after its limit, the client's loop counts as stuck."""
UNREAD_MAX = 100_000
"""The number of changes that a watch keeps until a thread takes them; beyond it, the watch ends."""

T = TypeVar("T")


class EtcdError(HoldfastError):
    """etcd did not perform a request; `kind` determines how the caller can react."""

    exit_code = 78

    def __init__(self, problem: Problem, where: str, details: str = "") -> None:
        self.kind: ProblemKind = problem.kind
        self.why = problem.why
        super().__init__(f"etcd at {where}: {details or problem.why}")


class EtcdClient:
    """Calls and watches for any thread, until `close`. After a fork, the child needs its own."""

    def __init__(self, settings: EtcdSettings) -> None:
        require_h11()
        self.settings = settings
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._client: AsyncEtcdClient | None = None
        self._watches: set[BlockingWatch] = set()
        self._closed = False

    @property
    def endpoint(self) -> str:
        """The endpoint in use; before the first call, the first endpoint."""
        return self.settings.where.split(",")[0] if self._client is None else self._client.endpoint

    @property
    def local_address(self) -> str:
        """The local address of the newest connection; empty before the first one."""
        return "" if self._client is None else self._client.local_address

    # Calls.

    def call(
        self, request: Request, limit_s: float | None = None
    ) -> TxnDone | Granted | KeptAlive | Revoked:
        """Return etcd's answer, or raise `EtcdError`."""
        client = self._started()
        limit = self.settings.call_s if limit_s is None else limit_s
        answer = self._run_in_loop(client.call(request, limit_s=limit), limit + SLACK_S)
        if isinstance(answer, Problem):
            raise self.error(answer)
        return answer

    def txn(self, request: Txn, limit_s: float | None = None) -> TxnDone:
        """Perform a transaction."""
        done = self.call(request, limit_s)
        assert isinstance(done, TxnDone)
        return done

    def get(self, key: bytes) -> KeyValue | None:
        """Return a stored key, or None."""
        found = self.txn(Txn(success=(Get(key),))).results[0]
        return found[0] if found else None

    def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """Store a value and return the revision."""
        return self.txn(Txn(success=(Put(key, value, lease),))).revision

    def grant(self, ttl_s: int) -> Granted:
        """Create a lease."""
        granted = self.call(Grant(ttl_s))
        assert isinstance(granted, Granted)
        return granted

    def keep_alive(self, lease: int, limit_s: float | None = None) -> int:
        """Renew a lease; return how long it lasts now, or 0 if it has ended."""
        kept = self.call(KeepAlive(lease), limit_s)
        assert isinstance(kept, KeptAlive)
        return kept.ttl_s

    def revoke(self, lease: int) -> None:
        """End a lease."""
        self.call(Revoke(lease))

    def error(self, problem: Problem) -> EtcdError:
        """Return a problem as an exception, with the endpoints in it."""
        details = problem.why
        if self._client is not None and problem.kind is ProblemKind.UNREACHABLE:
            details = self._client.describe(problem.why)
        return EtcdError(problem, self.settings.where, details)

    # Watches.

    def watch(self, key: bytes, end: bytes, start_revision: int) -> BlockingWatch:
        """Watch a key, or all keys from `key` up to `end`, starting at a revision."""
        client = self._started()
        watch = BlockingWatch(self)

        async def begin() -> WatchHandle:
            return client.watch(key, end, start_revision, watch.take, watch.ended)

        handle = self._run_in_loop(begin(), SLACK_S)
        with self._lock:
            watch.begin(handle)
            self._watches.add(watch)
            closed = self._closed
        if closed:
            watch.ended(CLOSED)
        return watch

    def forget(self, watch: BlockingWatch, handle: WatchHandle) -> None:
        """End a watch."""
        with self._lock:
            self._watches.discard(watch)
            thread = self._thread
        if thread is not None:
            thread.post(handle.cancel)

    # Start and end.

    def close(self) -> None:
        """End the thread and everything in it; calls that still wait raise `EtcdError`."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            client = self._client
            watches = tuple(self._watches)
            self._watches.clear()
        for watch in watches:
            watch.ended(CLOSED)
        if thread is None or client is None:
            return
        try:
            thread.run(client.close(), CLOSE_S + SLACK_S)
        except (TimeoutError, RuntimeError):
            pass  # The loop is stuck or has ended: nothing can be closed there.
        thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> AsyncEtcdClient:
        with self._lock:
            if self._closed:
                raise EtcdError(CLOSED, self.settings.where)
            if self._client is None:
                thread = LoopThread("holdfast-etcd", _warn)
                thread.start()

                async def begin() -> AsyncEtcdClient:
                    return AsyncEtcdClient(self.settings)

                try:
                    self._client = thread.run(begin(), SLACK_S)
                except BaseException:
                    thread.stop()
                    raise
                self._thread = thread
            return self._client

    def _run_in_loop(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        thread = self._thread
        try:
            if thread is None:
                work.close()
                raise EtcdError(CLOSED, self.settings.where)
            return thread.run(work, limit_s)
        except TimeoutError:
            why = f"the client's thread was stuck for {limit_s:.3g} s"
            raise self.error(Problem(ProblemKind.UNREACHABLE, why)) from None
        except (RuntimeError, CancelledError):
            raise EtcdError(CLOSED, self.settings.where) from None


class BlockingWatch:
    """A watch whose changes threads take with `next`."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._handle: WatchHandle | None = None
        self._news = threading.Condition()
        self._unread: deque[tuple[Change, ...]] = deque()
        self._unread_count = 0
        self._problem: Problem | None = None

    def next(self, timeout_s: float | None = None) -> tuple[Change, ...]:
        """Return the next changes, in order.

        Raises `TimeoutError` if there are none in time, and `EtcdError` when the watch has ended
        and all changes before that were taken.
        """
        with self._news:
            self._news.wait_for(lambda: self._unread or self._problem is not None, timeout_s)
            if self._unread:
                changes = self._unread.popleft()
                self._unread_count -= len(changes)
                return changes
            problem = self._problem
        if problem is not None:
            raise self._client.error(problem)
        raise TimeoutError(f"no change within {timeout_s:g} s")

    def close(self) -> None:
        """End the watch."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._client.forget(self, handle)
        self.ended(Problem(ProblemKind.UNREACHABLE, "the watch is closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For the client's thread.

    def begin(self, handle: WatchHandle) -> None:
        """Take over the watch."""
        self._handle = handle

    def take(self, revision: int, changes: tuple[Change, ...]) -> None:  # noqa: ARG002
        """Keep changes for `next`."""
        with self._news:
            if self._problem is not None:
                if self._handle is not None:
                    self._handle.cancel()
                return
            self._unread.append(changes)
            self._unread_count += len(changes)
            full = self._unread_count > UNREAD_MAX
            self._news.notify()
        if full:
            why = f"more than {UNREAD_MAX} changes are unread"
            self.ended(Problem(ProblemKind.UNREACHABLE, why))

    def ended(self, problem: Problem) -> None:
        """Wake all waiting threads: no more changes follow."""
        with self._news:
            if self._problem is None:
                self._problem = problem
            self._news.notify_all()


def _warn(fault: str) -> None:
    console.warning(f"the connection to etcd: {fault}")
