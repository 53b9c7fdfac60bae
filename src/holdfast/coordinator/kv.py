"""The small store that the nodes of a job share through their coordinator: server and client.

Each job has scopes (a round, a generation), and each scope keys of its own. It is meant for ranks,
addresses and the like, not for data: everything has a limit, and a call beyond one is answered with
the reason. It is lost with the coordinator; a call that waits for a key is then sent again by the
client, and waits on.

::

    KeyValueStore ── StoreCalls ══ wire ══ CoordinatorServer ── JobStores ── one KeySpace per scope
    (blocking)       (in the loop)                              (no clock, no socket)
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Hashable
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.core.limits import WHY_CHARS_MAX
from holdfast.printable import one_line
from holdfast.store.key_space import KeySpace, RequestRejected, StoreFull
from holdfast.store.memory_store import as_bytes
from holdfast.wire.errors import WireError
from holdfast.wire.frames import encode_frame
from holdfast.wire.limits import (
    STORE_KEY_CHARS_MAX,
    STORE_KEYS_MAX,
    STORE_TIMEOUT_S_MAX,
    STORE_VALUE_BYTES_MAX,
)
from holdfast.wire.messages import StoreCall, StoreOp, StoreResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from datetime import timedelta

BYTES_MAX = 64 * 1024 * 1024
"""Keys and values of one job together, and the keys that calls wait for."""
TOTAL_BYTES_MAX = 4 * BYTES_MAX
"""The same of all jobs together: what the coordinator's process may grow by."""
WAITED_KEY_BYTES = 256
"""What it costs to wait for a key, besides its name."""
SCOPES_MAX = 10_000
"""Scopes of one job. Of more, the least recently used are dropped."""
WAITING_MAX = 100_000
"""Calls of one job that wait for a key."""
MISSING_SHOWN_MAX = 5

_READS = ("check", "num_keys", "delete")

Caller = Hashable
Answers = list[tuple[Caller, StoreResult]]


# The server's side.


class JobStores:
    """The stores of all jobs of a coordinator.

    The server brings the calls and the time, and sends the answers. A caller is any value that can
    be a key; answers come back with it.
    """

    def __init__(
        self,
        *,
        bytes_max: int = BYTES_MAX,
        total_bytes_max: int = TOTAL_BYTES_MAX,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self._jobs: dict[str, _Job] = {}
        self._waits: dict[int, _Wait] = {}
        self._waits_of: dict[Caller, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []  # A heap; some are answered already.
        self._count = 0
        self._bytes = 0
        self._bytes_max = bytes_max
        self._total_bytes_max = total_bytes_max
        self._waiting_max = waiting_max

    def call(self, now: float, caller: Caller, call: StoreCall) -> Answers:
        """Take a call; return its answer if there is one yet, and those it brings to others."""
        job = self._jobs.setdefault(call.run_id, _Job())
        answers: Answers = []
        scope = job.scopes.get(call.scope)
        if scope is not None:
            job.scopes.move_to_end(call.scope)
        else:
            scope = _Scope()
            if call.op not in _READS:  # To look is no reason to drop another.
                while len(job.scopes) >= SCOPES_MAX:
                    answers += self._drop_oldest(job, f"the job has over {SCOPES_MAX} scopes")
                job.scopes[call.scope] = scope
        held = scope.bytes_held
        scope.bytes_max = held + self._room(job)
        try:
            result = self._perform(now, job, scope, caller, call)
        except StoreFull:
            result = _rejected(call, self._full(job))
        except RequestRejected as problem:
            result = _rejected(call, f"{call.keys[0]}: {problem}")
        self._take(job, scope.bytes_held - held)
        if result is not None:
            answers.append((caller, result))
        woken, scope.woken = scope.woken, []
        for number in woken:
            wait = self._waits[number]
            self._forget(wait)
            answers.append((wait.caller, _found(scope, wait.call)))
        return answers

    def next_deadline(self) -> float | None:
        """Return when `tick` is wanted next, or None while nobody waits."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self._waits:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def tick(self, now: float) -> Answers:
        """Answer those whose time is over."""
        answers: Answers = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            wait = self._waits[self._deadlines[0][1]]
            answers.append((wait.caller, _timed_out(self._cancel(wait), wait.call)))
        return answers

    def forget_caller(self, caller: Caller) -> None:
        """Drop the calls of a caller that is gone."""
        for number in tuple(self._waits_of.get(caller, ())):
            self._cancel(self._waits[number])

    def keep_only(self, run_ids: Container[str]) -> Answers:
        """Forget the stores of all other jobs; return the answers to those who still wait there."""
        answers: Answers = []
        for run_id in [run_id for run_id in self._jobs if run_id not in run_ids]:
            while self._jobs[run_id].scopes:
                answers += self._drop_oldest(self._jobs[run_id], "the job is over")
            del self._jobs[run_id]
        return answers

    def _perform(
        self, now: float, job: _Job, scope: _Scope, caller: Caller, call: StoreCall
    ) -> StoreResult | None:
        keys = [key.encode() for key in call.keys]
        match call.op:
            case "check":
                return StoreResult(id=call.id, ok=True, amount=int(scope.has(keys)))
            case "num_keys":
                return StoreResult(id=call.id, ok=True, amount=len(scope))
            case "wait":
                return self._wait(now, job, scope, caller, call, keys)
        if len(keys) != 1:
            return _rejected(call, f"{call.op} takes one key")
        (key,) = keys
        value, amount = b"", 0
        match call.op:
            case "get":
                return self._wait(now, job, scope, caller, call, keys)
            case "set":
                scope.set(key, call.value)
            case "add":
                amount = scope.add(key, call.amount)
            case "compare_set":
                value = bytes(scope.compare_set(key, call.expected, call.value))
            case "append":
                if len(scope.get(key)) + len(call.value) > STORE_VALUE_BYTES_MAX:
                    raise RequestRejected(f"the value would be over {STORE_VALUE_BYTES_MAX} bytes")
                scope.append(key, call.value)
            case "delete":
                amount = int(scope.delete(key))
        return StoreResult(id=call.id, ok=True, value=value, amount=amount)

    def _wait(
        self,
        now: float,
        job: _Job,
        scope: _Scope,
        caller: Caller,
        call: StoreCall,
        keys: list[bytes],
    ) -> StoreResult | None:
        if scope.has(keys):
            return _found(scope, call)
        if call.timeout_s <= 0:
            return _timed_out(scope, call)
        if job.waiting >= self._waiting_max:
            return _rejected(call, f"{self._waiting_max} calls wait already")
        if _cost_of(call) > self._room(job):
            return _rejected(call, self._full(job))
        self._count += 1
        scope.wait(self._count, keys)
        scope.waits.add(self._count)
        self._waits[self._count] = wait = _Wait(self._count, caller, call)
        self._waits_of.setdefault(caller, set()).add(wait.number)
        heapq.heappush(self._deadlines, (now + call.timeout_s, wait.number))
        job.waiting += 1
        self._take(job, _cost_of(call))
        return None

    def _cancel(self, wait: _Wait) -> _Scope:
        """End a wait that was not answered; return the keys it was about."""
        job = self._jobs[wait.call.run_id]
        scope = job.scopes[wait.call.scope]
        held = scope.bytes_held
        scope.cancel(wait.number)
        self._take(job, scope.bytes_held - held)
        self._forget(wait)
        return scope

    def _forget(self, wait: _Wait) -> None:
        job = self._jobs[wait.call.run_id]
        job.scopes[wait.call.scope].waits.discard(wait.number)
        job.waiting -= 1
        self._take(job, -_cost_of(wait.call))
        del self._waits[wait.number]
        numbers = self._waits_of[wait.caller]
        numbers.discard(wait.number)
        if not numbers:
            del self._waits_of[wait.caller]
        if len(self._deadlines) > 2 * self._waiting_max:
            self._deadlines = [one for one in self._deadlines if one[1] in self._waits]
            heapq.heapify(self._deadlines)

    def _drop_oldest(self, job: _Job, why: str) -> Answers:
        """Drop the least recently used scope; return the answers to those who wait there."""
        name, scope = next(iter(job.scopes.items()))
        answers: Answers = []
        for wait in [self._waits[number] for number in scope.waits]:
            self._cancel(wait)
            answers.append((wait.caller, _rejected(wait.call, why)))
        self._take(job, -scope.bytes_held)
        del job.scopes[name]
        return answers

    def _room(self, job: _Job) -> int:
        return max(0, min(self._bytes_max - job.bytes, self._total_bytes_max - self._bytes))

    def _take(self, job: _Job, more: int) -> None:
        job.bytes += more
        self._bytes += more

    def _full(self, job: _Job) -> str:
        if self._bytes_max - job.bytes <= self._total_bytes_max - self._bytes:
            return f"the job's store is full: {self._bytes_max} bytes"
        return f"the stores of all jobs are full: {self._total_bytes_max} bytes"


class _Scope(KeySpace):
    def __init__(self) -> None:
        super().__init__()
        self.waits: set[int] = set()


class _Job:
    def __init__(self) -> None:
        self.scopes: OrderedDict[str, _Scope] = OrderedDict()  # The last used is the last.
        self.bytes = 0
        self.waiting = 0


class _Wait(msgspec.Struct, frozen=True):
    """A call whose keys do not all have values yet, under the number its key space knows it by."""

    number: int
    caller: Caller
    call: StoreCall


def _cost_of(call: StoreCall) -> int:
    """Return how many bytes a call takes while it waits."""
    return sum(map(len, call.keys)) + WAITED_KEY_BYTES * len(call.keys)


def _found(scope: _Scope, call: StoreCall) -> StoreResult:
    value = bytes(scope.get(call.keys[0].encode())) if call.op == "get" else b""
    return StoreResult(id=call.id, ok=True, value=value)


def _rejected(call: StoreCall, why: str) -> StoreResult:
    return StoreResult(id=call.id, ok=False, why=one_line(why, WHY_CHARS_MAX))


def _timed_out(scope: _Scope, call: StoreCall) -> StoreResult:
    missing = sorted(key for key in set(call.keys) if not scope.has((key.encode(),)))
    named = ", ".join(missing[:MISSING_SHOWN_MAX])
    if len(missing) > MISSING_SHOWN_MAX:
        named += f", and {len(missing) - MISSING_SHOWN_MAX} more"
    why = f"no value within {call.timeout_s:g} s for: {named}"
    return StoreResult(id=call.id, ok=False, timed_out=True, why=one_line(why, WHY_CHARS_MAX))


# The client's side.

PENDING_MAX = 10_000
REPEATABLE = frozenset({"set", "get", "wait", "check", "num_keys"})
DEFAULT_TIMEOUT_S = 300.0
SLACK_S = 1.0  # The coordinator ends a wait itself; this is for its answer to arrive.


class StoreCalls:
    """The calls of one node that wait for their answers; runs in the connection's loop.

    A call whose repetition changes nothing is sent again when the connection is back, so that a
    node which waits for a key does not notice a coordinator that was gone for a moment. The others
    (`add` and the like) may have been done or not when the connection broke, and fail. `send`
    returns whether there is a connection.
    """

    def __init__(self, send: Callable[[StoreCall], bool]) -> None:
        self._send = send
        self._pending: dict[int, _Pending] = {}
        self._count = 0
        self._over = ""

    def begin(self, call: StoreCall, answer: Future[StoreResult]) -> None:
        """Send a call, now or when there is a connection; `answer` gets its result or an error."""
        if self._over:
            _fail(answer, ConnectionError(self._over))
            return
        if len(self._pending) >= PENDING_MAX:
            _fail(answer, RuntimeError(f"{PENDING_MAX} calls to the store wait already"))
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
        """Stop waiting: the caller's time is over."""
        for number, one in self._pending.items():
            if one.answer is answer:
                del self._pending[number]
                return

    def connected(self) -> None:
        """Send what could not be sent, or was not answered."""
        for one in self._pending.values():
            if not one.sent:
                one.sent = self._send(one.call)

    def disconnected(self) -> None:
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


class _Pending(msgspec.Struct, eq=False):
    call: StoreCall
    answer: Future[StoreResult]
    sent: bool = False


def _fail(answer: Future[StoreResult], error: Exception) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_exception(error)


class CallsStore(Protocol):
    """What carries the calls of a `KeyValueStore`: a connection to the coordinator."""

    run_id: str

    @property
    def where(self) -> str: ...

    def begin_call(self, call: StoreCall) -> Future[StoreResult]: ...

    def forget_call(self, answer: Future[StoreResult]) -> None: ...

    def problem(self) -> str: ...


class KeyValueStore:
    """The keys of one scope of a job, for code that blocks; see `holdfast.store.interface`.

    A key that does not get a value in time is a `TimeoutError` that names it; a coordinator that
    cannot be reached in time is a `ConnectionError` that names the endpoint.
    """

    def __init__(
        self, connection: CallsStore, scope: str, timeout_s: float = DEFAULT_TIMEOUT_S
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
            raise TimeoutError(f"no answer within {limit_s:g} s about: {', '.join(keys)}") from None
        except ConnectionError as error:
            raise ConnectionError(f"coordinator at {self._connection.where}: {error}") from None
        if result.ok:
            return result
        if result.timed_out:
            raise TimeoutError(result.why)
        raise RuntimeError(f"store of {self._connection.run_id!r}: {result.why}")


def _check(keys: Sequence[str], value: bytes, expected: bytes) -> None:
    """Raise for what no coordinator takes."""
    if len(keys) > STORE_KEYS_MAX:
        raise ValueError(f"{len(keys)} keys are over {STORE_KEYS_MAX}")
    for key in keys:
        if len(key) > STORE_KEY_CHARS_MAX:
            raise ValueError(f"the key {key[:40]!r}... is over {STORE_KEY_CHARS_MAX} characters")
    if max(len(value), len(expected)) > STORE_VALUE_BYTES_MAX:
        raise ValueError(
            f"{keys[0]}: {max(len(value), len(expected))} bytes are over {STORE_VALUE_BYTES_MAX}"
        )
