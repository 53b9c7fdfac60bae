"""Runs a call that may hang in its own thread, with a time limit, for a loop that must not hang.

Reading or writing a regular file, or a `mkdir`, can block forever without warning: the file system may be frozen,
or its server unreachable. While one call hangs, later calls of the same `SideThread` fail at once, because they
would hang too.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")


class CallTimedOut(OSError):
    """A call did not return within its limit."""


class SideThread:
    """Runs one call at a time, each in its own thread."""

    def __init__(self, name: str, limit_s: float) -> None:
        self._name = name
        self._limit_s = limit_s
        self._hanging: threading.Thread | None = None
        self._turn = threading.Lock()  # Never held for much longer than the limit.
        self._pid = os.getpid()

    @property
    def is_hanging(self) -> bool:
        """Whether a timed-out call is still running."""
        return self._hanging is not None and self._hanging.is_alive()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run a call and return its result, or raise its exception; raise `CallTimedOut` at the limit."""
        # A forked child has the locks of other threads, but not the threads.
        if self._pid != os.getpid():
            self._pid, self._turn, self._hanging = os.getpid(), threading.Lock(), None
        if not self._turn.acquire(timeout=self._limit_s):
            raise self._hung()
        try:
            if self.is_hanging:
                raise self._hung()
            one = _Call(function, args)
            thread = threading.Thread(target=one.make, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return function(*args)  # No thread can be started; call it directly.
            thread.join(self._limit_s)
            if thread.is_alive():
                self._hanging = thread
                raise self._hung()
        finally:
            self._turn.release()
        if one.problem is not None:
            raise one.problem
        return one.value  # type: ignore[no-any-return]

    def _hung(self) -> CallTimedOut:
        return CallTimedOut(f"no response for {self._limit_s:g} s")


class _Call:
    """One call, and its outcome."""

    __slots__ = ("_args", "_function", "problem", "value")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self.value: Any = None
        self.problem: BaseException | None = None

    def make(self) -> None:
        try:
            self.value = self._function(*self._args)
        except BaseException as problem:  # noqa: BLE001 (`call` raises it)
            self.problem = problem
