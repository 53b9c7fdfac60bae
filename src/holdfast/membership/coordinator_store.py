"""The store that the nodes of a job share through their coordinator: the client's side.

`CoordinatorStore` is for blocking code; `StoreCalls` sends its calls from the membership's loop. The server's
side is `coordinator.job_stores`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.store.memory_store import as_bytes
from holdfast.wire.frames import encode_frame
from holdfast.wire.messages import StoreCall, StoreOp, StoreResult
from holdfast.wire.wire_errors import WireError
from holdfast.wire.wire_limits import (
    STORE_KEY_CHARS_MAX,
    STORE_KEYS_MAX,
    STORE_TIMEOUT_S_MAX,
    STORE_VALUE_BYTES_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from datetime import timedelta

PENDING_MAX = 10_000
REPEATABLE = frozenset({"set", "get", "wait", "check", "num_keys"})
DEFAULT_TIMEOUT_S = 300.0
SLACK_S = 1.0  # The coordinator ends a wait itself; its reply needs some time to arrive.


class StoreCalls:
    """The calls of one node that wait for results; belongs to the membership's loop.

    After a reconnect it repeats the calls that are safe to repeat, so a node that waits for a key
    survives a short outage of the coordinator. Other calls, such as `add`, fail, because the coordinator may
    have performed them before the connection broke. `send` returns whether there is a connection.
    """

    def __init__(self, send: Callable[[StoreCall], bool]) -> None:
        self._send = send
        self._pending: dict[int, _Pending] = {}
        self._count = 0
        self._over = ""

    def begin(self, call: StoreCall, answer: Future[StoreResult]) -> None:
        """Send a call, now or once there is a connection; `answer` receives its result or an error."""
        if self._over:
            _fail(answer, ConnectionError(self._over))
            return
        if len(self._pending) >= PENDING_MAX:
            _fail(answer, RuntimeError(f"{PENDING_MAX} calls to the store are already pending"))
            return
        self._count += 1
        one = _Pending(msgspec.structs.replace(call, id=self._count), answer)
        try:
            encode_frame(one.call)
        except WireError as error:
            _fail(answer, ValueError(str(error)))
            return
        self._pending[self._count] = one
        one.sent = self._send(one.call)

    def answered(self, result: StoreResult) -> None:
        one = self._pending.pop(result.id, None)
        if one is not None and one.answer.set_running_or_notify_cancel():
            one.answer.set_result(result)

    def forget(self, answer: Future[StoreResult]) -> None:
        """Drop a call whose caller has timed out."""
        for number, one in self._pending.items():
            if one.answer is answer:
                del self._pending[number]
                return

    def connected(self) -> None:
        """Send the calls that are unsent, or whose connection broke before the result arrived."""
        for one in self._pending.values():
            if not one.sent:
                one.sent = self._send(one.call)

    def disconnected(self) -> None:
        """Fail the calls that must not be repeated."""
        for number, one in tuple(self._pending.items()):
            if one.sent and one.call.op not in REPEATABLE:
                del self._pending[number]
                why = "the connection broke before the result arrived"
                _fail(one.answer, ConnectionError(why))
            one.sent = False

    def fail(self, why: str) -> None:
        """Fail all pending and all later calls."""
        self._over = why
        pending, self._pending = self._pending, {}
        for one in pending.values():
            _fail(one.answer, ConnectionError(why))


class _Pending(msgspec.Struct, eq=False):
    call: StoreCall
    answer: Future[StoreResult]
    sent: bool = False


def _fail(answer: Future[StoreResult], error: Exception) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_exception(error)


class StoreCallSender(Protocol):
    """Sends the calls of a `CoordinatorStore`; a `CoordinatorMembership` implements it."""

    run_id: str

    @property
    def where(self) -> str: ...

    def begin_call(self, call: StoreCall) -> Future[StoreResult]: ...

    def forget_call(self, answer: Future[StoreResult]) -> None: ...

    def problem(self) -> str: ...


class CoordinatorStore:
    """The keys of one scope of a job, for blocking code; see `holdfast.store.store_interface`.

    If a key gets no value in time, a call raises `TimeoutError` with the key. If the coordinator
    cannot be reached in time, the call raises `ConnectionError` with the endpoint.
    """

    def __init__(
        self, connection: StoreCallSender, scope: str, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self._connection = connection
        self._scope = scope
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", [key], as_bytes(value))

    def get(self, key: str) -> bytes:
        return self._call("get", [key]).value

    def add(self, key: str, amount: int) -> int:
        return self._call("add", [key], amount=amount).amount

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._call("wait", keys, timeout_s=limit_s)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", keys).amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._call("compare_set", [key], as_bytes(desired), as_bytes(expected)).value

    def append(self, key: str, value: str | bytes) -> None:
        self._call("append", [key], as_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        answers = [self._begin("get", [key], timeout_s=self._timeout_s) for key in keys]
        return [self._outcome(one, [key]).value for one, key in zip(answers, keys, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        answers = [
            self._begin("set", [key], as_bytes(value))
            for key, value in zip(keys, values, strict=True)
        ]
        for one, key in zip(answers, keys, strict=True):
            self._outcome(one, [key])

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete", [key]).amount)

    def num_keys(self) -> int:
        return self._call("num_keys", []).amount

    def _call(
        self,
        op: StoreOp,
        keys: Sequence[str],
        value: bytes = b"",
        expected: bytes = b"",
        *,
        amount: int = 0,
        timeout_s: float | None = None,
    ) -> StoreResult:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        answer = self._begin(op, keys, value, expected, amount=amount, timeout_s=limit_s)
        return self._outcome(answer, keys, limit_s)

    def _begin(
        self,
        op: StoreOp,
        keys: Sequence[str],
        value: bytes = b"",
        expected: bytes = b"",
        *,
        amount: int = 0,
        timeout_s: float = 0.0,
    ) -> Future[StoreResult]:
        _check(keys, value, expected)
        call = StoreCall(
            id=0,
            run_id=self._connection.run_id,
            scope=self._scope,
            op=op,
            keys=tuple(keys),
            value=value,
            expected=expected,
            amount=amount,
            timeout_s=min(max(0.0, timeout_s), STORE_TIMEOUT_S_MAX),
        )
        return self._connection.begin_call(call)

    def _outcome(
        self, answer: Future[StoreResult], keys: Sequence[str], limit_s: float | None = None
    ) -> StoreResult:
        limit_s = self._timeout_s if limit_s is None else limit_s
        try:
            result = answer.result(limit_s + SLACK_S)
        except TimeoutError:
            self._connection.forget_call(answer)
            problem = self._connection.problem()
            if problem:
                raise ConnectionError(problem) from None
            raise TimeoutError(f"no response within {limit_s:g} s for {', '.join(keys)}") from None
        except ConnectionError as error:
            raise ConnectionError(f"coordinator at {self._connection.where}: {error}") from None
        if result.ok:
            return result
        if result.timed_out:
            raise TimeoutError(result.why)
        raise RuntimeError(f"store of {self._connection.run_id!r}: {result.why}")


def _check(keys: Sequence[str], value: bytes, expected: bytes) -> None:
    """Raise `ValueError` if the call exceeds a limit of the coordinator."""
    if len(keys) > STORE_KEYS_MAX:
        raise ValueError(f"{len(keys)} keys exceed the limit of {STORE_KEYS_MAX}")
    for key in keys:
        if len(key) > STORE_KEY_CHARS_MAX:
            raise ValueError(
                f"the key {key[:40]!r}... is longer than {STORE_KEY_CHARS_MAX} characters"
            )
    if max(len(value), len(expected)) > STORE_VALUE_BYTES_MAX:
        raise ValueError(
            f"{keys[0]}: a value of {max(len(value), len(expected))} bytes exceeds the limit of "
            f"{STORE_VALUE_BYTES_MAX}"
        )
