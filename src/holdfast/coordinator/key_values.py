"""The store of a job as code that blocks uses it: `KeyValueStore`, over the node's connection.

It means by each call what `holdfast.store.interface` says. A key that does not get a value in time
is a `TimeoutError` that names it; a coordinator that cannot be reached in time is a
`ConnectionError` that names the endpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from holdfast.store.memory import as_bytes
from holdfast.wire.limits import (
    STORE_KEY_CHARS_MAX,
    STORE_KEYS_MAX,
    STORE_TIMEOUT_S_MAX,
    STORE_VALUE_BYTES_MAX,
)
from holdfast.wire.messages import StoreCall, StoreOp, StoreResult

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from datetime import timedelta

DEFAULT_TIMEOUT_S = 300.0
SLACK_S = 1.0  # The coordinator says itself when a wait is over; this is for its words to come.


class Calling(Protocol):
    """What makes the calls: a `NodeConnection`."""

    run_id: str

    def begin_call(self, call: StoreCall) -> Future[StoreResult]:
        """Send a call."""

    def forget_call(self, answer: Future[StoreResult]) -> None:
        """Stop waiting for an answer."""

    def problem(self) -> str:
        """Return why there is no link, or nothing."""

    @property
    def where(self) -> str:
        """The coordinator's endpoint."""


class KeyValueStore:
    """The keys of one scope of a job."""

    def __init__(self, calling: Calling, scope: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._calling = calling
        self._scope = scope
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._ask("set", [key], as_bytes(value))

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it to have one."""
        return self._ask("get", [key]).value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, 0 at first, and return what it is now."""
        return self._ask("add", [key], amount=amount).amount

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values; raise `TimeoutError` naming those that have none."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._ask("wait", keys, timeout_s=limit_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._ask("check", keys).amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; return the value that it has afterwards.

        A missing key is set if nothing is expected; if something is, that is returned.
        """
        return self._ask("compare_set", [key], as_bytes(desired), as_bytes(expected)).value

    def append(self, key: str, value: str | bytes) -> None:
        """Put a value after the one that a key has."""
        more = as_bytes(value)
        held = b""
        while True:
            answer = self._ask("compare_set", [key], held + more, held)
            if answer.amount:
                return
            # What is held, or what was expected if the key has gone in between.
            held = b"" if answer.value == held else answer.value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all keys, waiting for each to have one."""
        answers = [self._begin("get", [key], timeout_s=self._timeout_s) for key in keys]
        return [self._outcome(one, [key]).value for one, key in zip(answers, keys, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Give each key its value."""
        answers = [
            self._begin("set", [key], as_bytes(value))
            for key, value in zip(keys, values, strict=True)
        ]
        for one, key in zip(answers, keys, strict=True):
            self._outcome(one, [key])

    def delete_key(self, key: str) -> bool:
        """Take a key's value away; return whether it had one."""
        return bool(self._ask("delete", [key]).amount)

    def num_keys(self) -> int:
        """Return how many keys of this scope have values."""
        return self._ask("num_keys", []).amount

    def _ask(
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
            run_id=self._calling.run_id,
            scope=self._scope,
            op=op,
            keys=tuple(keys),
            value=value,
            expected=expected,
            amount=amount,
            timeout_s=min(max(0.0, timeout_s), STORE_TIMEOUT_S_MAX),
        )
        return self._calling.begin_call(call)

    def _outcome(
        self, answer: Future[StoreResult], keys: Sequence[str], limit_s: float | None = None
    ) -> StoreResult:
        limit_s = self._timeout_s if limit_s is None else limit_s
        try:
            result = answer.result(limit_s + SLACK_S)
        except TimeoutError:
            self._calling.forget_call(answer)
            problem = self._calling.problem()
            if problem:
                raise ConnectionError(problem) from None
            raise TimeoutError(f"no answer within {limit_s:g} s about: {', '.join(keys)}") from None
        except ConnectionError as error:
            raise ConnectionError(f"coordinator at {self._calling.where}: {error}") from None
        if result.ok:
            return result
        if result.amount:
            raise TimeoutError(result.why)
        raise RuntimeError(f"store of {self._calling.run_id!r}: {result.why}")


def _check(keys: Sequence[str], value: bytes, expected: bytes) -> None:
    if len(keys) > STORE_KEYS_MAX:
        raise ValueError(f"{len(keys)} keys are over {STORE_KEYS_MAX}")
    for key in keys:
        if len(key) > STORE_KEY_CHARS_MAX:
            raise ValueError(f"the key {key[:40]!r}... is over {STORE_KEY_CHARS_MAX} characters")
    if max(len(value), len(expected)) > STORE_VALUE_BYTES_MAX:
        raise ValueError(
            f"{keys[0]}: {max(len(value), len(expected))} bytes are over {STORE_VALUE_BYTES_MAX}"
        )
