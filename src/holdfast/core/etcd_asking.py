"""Requests to etcd that are under way, each with what is to be done about its answer.

The machines on etcd ask and go on; an answer brings them back to where they asked. `forget` drops
what nobody waits for any more: its answers, should they come, mean nothing.
"""

from __future__ import annotations

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.core.etcd_calls import Answer, Change, Request


# What a machine on etcd wants done.


class Ask(msgspec.Struct, frozen=True):
    """Send a request; its answer, or why there is none, comes back under the same number."""

    number: int
    request: Request


class Watch(msgspec.Struct, frozen=True):
    """Tell of every change in a range from a revision on, under this number."""

    number: int
    key: bytes
    end: bytes
    start_revision: int


class Unwatch(msgspec.Struct, frozen=True):
    """Tell of no more."""

    number: int


Doing = Ask | Watch | Unwatch


class Asking:
    """Numbers for requests and watches, and who is to be told of what comes of each."""

    def __init__(self) -> None:
        self._count = 0
        self._answers: dict[int, Callable[[float, Answer], list[Any]]] = {}
        self._watches: dict[int, Callable[[float, tuple[Change, ...]], list[Any]]] = {}

    def ask(self, request: Request, then: Callable[[float, Answer], list[Any]]) -> Ask:
        """Return the effect that sends a request; `then` gets the time and the answer."""
        self._count += 1
        self._answers[self._count] = then
        return Ask(self._count, request)

    def watch(
        self,
        key: bytes,
        end: bytes,
        start_revision: int,
        then: Callable[[float, tuple[Change, ...]], list[Any]],
    ) -> Watch:
        """Return the effect that begins a watch; `then` gets the time and the changes."""
        self._count += 1
        self._watches[self._count] = then
        return Watch(self._count, key, end, start_revision)

    def answered(self, now: float, number: int, answer: Answer) -> list[Any]:
        """Bring an answer to who asked, if anybody still waits for it."""
        then = self._answers.pop(number, None)
        return then(now, answer) if then is not None else []

    def changed(self, now: float, number: int, changes: tuple[Change, ...]) -> list[Any]:
        """Bring changes to who watches, if anybody still does."""
        then = self._watches.get(number)
        return then(now, changes) if then is not None else []

    def unwatch(self, number: int) -> list[Unwatch]:
        """Return the effect that ends a watch, if it is on."""
        return [Unwatch(number)] if self._watches.pop(number, None) is not None else []

    def is_watching(self, number: int) -> bool:
        """Return whether a watch is on."""
        return number in self._watches

    def forget(self) -> list[Unwatch]:
        """Drop all that is under way; return the effects that end the watches."""
        self._answers.clear()
        ended = [Unwatch(number) for number in self._watches]
        self._watches.clear()
        return ended
