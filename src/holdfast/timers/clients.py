"""A script's side of watchdog timers: `with expires(after=60): ...`.

Every block has a timer of its own, also where blocks are nested or run in several threads at once
and have the same name or none: a name that is in use gets a number, so that leaving a block
releases just its own. A block without a name is known by its file and line.
"""

from __future__ import annotations

import abc
import sys
import time
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    Function = TypeVar("Function", bound=Callable[..., Any])


class TimerClient(abc.ABC):
    """Sets and releases the timers of this process."""

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set the timer of a scope, or move it, to a time in seconds since 1970."""

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """Release the timer of a scope; one that is not set is no fault."""


_configured: TimerClient | None = None
_scopes_in_use: dict[tuple[int, str], object] = {}


def configure(timer_client: TimerClient) -> None:
    """Have all `expires` blocks of this process use a client, unless they name another."""
    global _configured  # noqa: PLW0603 (one for the process, as in TorchElastic)
    _configured = timer_client


def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> ExpiringBlock:
    """Have this process ended if the block takes longer than `after` seconds.

    Also a decorator: every call of the function then has a timer.
    """
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return ExpiringBlock(after, scope, client)


class ExpiringBlock:
    """One block with a timer. It may be entered again, by any thread, also before it was left."""

    def __init__(self, after: float, scope: str, client: TimerClient | None) -> None:
        self._after = after
        self._scope = scope
        self._client = client
        self._entered: dict[int, list[tuple[TimerClient, str]]] = {}  # By thread.

    def __enter__(self) -> None:
        client = self._client or _configured
        if client is None:
            raise RuntimeError(
                "expires() has no client: call timer.configure(client), or give it one (client=...)"
            )
        scope = _claim(client, self._scope)
        self._entered.setdefault(get_ident(), []).append((client, scope))
        try:
            client.acquire(scope, time.time() + self._after)
        except BaseException:
            self._leave(release=False)
            raise

    def __exit__(self, *_: object) -> None:
        self._leave(release=True)

    def __call__(self, function: Function) -> Function:
        """Give every call of a function a timer."""
        from functools import wraps

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with ExpiringBlock(self._after, self._scope, self._client):
                return function(*args, **kwargs)

        return watched  # type: ignore[return-value]

    def _leave(self, *, release: bool) -> None:
        client, scope = self._pop_entered()
        try:
            if release:
                client.release(scope)
        finally:
            _scopes_in_use.pop((id(client), scope), None)

    def _pop_entered(self) -> tuple[TimerClient, str]:
        """Return what this thread entered last; what another did only if it has entered nothing."""
        thread = get_ident()
        if thread not in self._entered:
            thread = next(iter(self._entered))
        found = self._entered[thread].pop()
        if not self._entered[thread]:
            del self._entered[thread]
        return found


def _claim(client: TimerClient, scope: str) -> str:
    """Return a name that no other block of this process uses now: the scope's, if it can be.

    `setdefault` is one step for all threads, so that no lock is needed, which a fork could find
    locked.
    """
    token = object()
    name, number = scope, 1
    while _scopes_in_use.setdefault((id(client), name), token) is not token:
        number += 1
        name = f"{scope} ({number})"
    return name
