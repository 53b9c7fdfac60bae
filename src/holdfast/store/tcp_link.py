"""The line between one store of this process and its server: made, used by one at a time, remade.

The one thing to know: a call that fails raises, and is never repeated by itself, since nobody knows
whether the server heard it. Only the next call connects anew.
"""

from __future__ import annotations

import os
import threading
import time
import weakref

from holdfast import messages
from holdfast.store.errors import DistError, DistNetworkError, DistStoreError, StoreTimeoutError
from holdfast.store.memory import named
from holdfast.store.tcp_connection import Connection, OutOfTime, WrongAnswer
from holdfast.store.tcp_dialing import dial, written
from holdfast.store.tcp_exchanges import Overdue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from holdfast.store.tcp_hosting import Hosting

    Answer = TypeVar("Answer")


class Link:
    """Connects when it is used first, and again after a loss."""

    def __init__(self, host: str, port: int, hosting: Hosting | None) -> None:
        self.where = written(host, port)
        self.hosting = hosting
        self._address = hosting.address if hosting else host
        self._port = port
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._lost = ""  # Why there is no connection any more, in words.
        self._closed = False
        _links.add(self)

    def call(
        self,
        operation: str,
        keys: Sequence[str],
        talk: Callable[[Connection], Answer],
        timeout_s: float,
    ) -> Answer:
        """Have `talk` ask something on the connection, and return what it returns.

        Raises `DistNetworkError` for a loss, `StoreTimeoutError` when time is over, and
        `DistStoreError` for an answer that is none. Others that use the link wait meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)):
            raise StoreTimeoutError(
                f"{self._about(operation, keys)}: another thread used it all of {timeout_s:g} s"
            )
        try:
            connection = self._connection
            if connection is None or self._closed:
                connection = self._connect(deadline, timeout_s, self._about(operation, keys))
            connection.deadline = deadline
            answer = talk(connection)
            connection.finish()
        except Overdue as overdue:
            raise StoreTimeoutError(
                f"{self._about(operation)}: within {timeout_s:g} s {overdue}"
            ) from None
        except BaseException as problem:
            # Whatever it was, an interrupt of the user's too: an answer may still be on its way.
            self._give_up()
            failure = self._failure(problem, self._about(operation, keys), timeout_s)
            if failure is None:
                raise
            raise failure from None
        finally:
            self._lock.release()
            if self._closed:
                self._drop_if_unused()
        return answer

    def close(self) -> None:
        """Close the connection for good, also under a call; a server is left to who else has it."""
        self._closed = True
        connection = self._connection
        if not self._drop_if_unused() and connection is not None:
            connection.abort()  # The call that is going on fails, and drops it.
        hosting, self.hosting = self.hosting, None
        if hosting is not None:
            hosting.release()

    def forget_after_fork(self) -> None:
        """In a forked child: the connection, the server and whoever held the lock are the parent's.

        The descriptor is closed here and nowhere else, so that the parent notices nothing.
        """
        self._lock = threading.Lock()
        self._drop()
        self._lost = ""
        self.hosting = None

    def _connect(self, deadline: float, timeout_s: float, about: str) -> Connection:
        if not self._closed:
            if self._lost:
                messages.info(f"connecting to the store at {self.where} again: {self._lost}")
            self._connection = dial(self._address, self._port, deadline, timeout_s, about)
            self._lost = ""
        if self._connection is None or self._closed:
            raise self._is_closed()
        return self._connection

    def _drop_if_unused(self) -> bool:
        """Close the connection unless a call is using it, which then does so when it ends."""
        if not self._lock.acquire(blocking=False):
            return False
        self._drop()
        self._lock.release()
        return True

    def _give_up(self) -> None:
        if self._connection is not None:
            self._lost = "the last connection was given up"
            self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _failure(self, problem: BaseException, about: str, timeout_s: float) -> DistError | None:
        """Return the error that a caller is told of; None for one that is told of as it is."""
        if self._closed and isinstance(problem, Exception):
            return self._is_closed()
        match problem:
            case DistError():
                return None
            case OutOfTime():
                self._lost = f"it did not answer within {timeout_s:g} s"
                return StoreTimeoutError(f"{about}: no answer within {timeout_s:g} s")
            case OSError():
                self._lost = problem.strerror or str(problem)
                return DistNetworkError(f"{about}: {self._lost}")
            case WrongAnswer():
                self._lost = "its answer was none"
                return DistStoreError(f"{about}: the answer was none: {problem}")
        return None

    def _is_closed(self) -> DistStoreError:
        return DistStoreError(f"the store at {self.where} is closed here")

    def _about(self, operation: str, keys: Sequence[str] = ()) -> str:
        of = f" of {named(keys)}" if keys else ""
        return f"the store at {self.where}{operation and f': {operation}'}{of}"


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for link in list(_links):
        link.forget_after_fork()


os.register_at_fork(after_in_child=_forget_after_fork)
