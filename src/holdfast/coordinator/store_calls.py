"""Calls of one node to its job's store, on their way: who waits for which answer.

A call whose repetition changes nothing is sent again when the link comes back, so that a node which
waits for a key does not notice a coordinator that was gone for a moment. The others (`add` and the
like) may have been done or not when the link broke, and fail. Runs in the client's loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.wire.errors import WireError
from holdfast.wire.frames import encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from holdfast.wire.messages import StoreCall, StoreResult

PENDING_MAX = 10_000
REPEATABLE = frozenset({"set", "get", "wait", "check", "num_keys"})


class Pending(msgspec.Struct, eq=False):
    """A call without an answer."""

    call: StoreCall
    answer: Future[StoreResult]
    sent: bool = False


class StoreCalls:
    """The calls of one node; `send` returns whether the link is up."""

    def __init__(self, send: Callable[[bytes], bool]) -> None:
        self._send = send
        self._pending: dict[int, Pending] = {}
        self._count = 0
        self._over = ""

    def begin(self, call: StoreCall, answer: Future[StoreResult]) -> None:
        """Send a call, now or when the link is up; `answer` gets its result or an error."""
        if self._over:
            _fail(answer, ConnectionError(self._over))
            return
        if len(self._pending) >= PENDING_MAX:
            _fail(answer, RuntimeError(f"{PENDING_MAX} calls to the store wait already"))
            return
        self._count += 1
        one = Pending(msgspec.structs.replace(call, id=self._count), answer)
        try:
            frame = encode_frame(one.call)
        except WireError as error:
            _fail(answer, ValueError(str(error)))
            return
        self._pending[self._count] = one
        one.sent = self._send(frame)

    def answered(self, result: StoreResult) -> None:
        """Hand an answer to whoever waits for it."""
        one = self._pending.pop(result.id, None)
        if one is not None and one.answer.set_running_or_notify_cancel():
            one.answer.set_result(result)

    def forget(self, answer: Future[StoreResult]) -> None:
        """Stop waiting: the caller's time is over."""
        for number, one in self._pending.items():
            if one.answer is answer:
                del self._pending[number]
                return

    def link_up(self) -> None:
        """Send what could not be sent, or was not answered."""
        for one in self._pending.values():
            if not one.sent:
                one.sent = self._send(encode_frame(one.call))

    def link_down(self) -> None:
        """Fail the calls that must not be made twice."""
        for number, one in tuple(self._pending.items()):
            if one.sent and one.call.op not in REPEATABLE:
                del self._pending[number]
                why = "the connection broke before the answer came"
                _fail(one.answer, ConnectionError(why))
            one.sent = False

    def fail(self, why: str) -> None:
        """Fail all calls, now and from now on."""
        self._over = why
        pending, self._pending = self._pending, {}
        for one in pending.values():
            _fail(one.answer, ConnectionError(why))


def _fail(answer: Future[StoreResult], error: Exception) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_exception(error)
