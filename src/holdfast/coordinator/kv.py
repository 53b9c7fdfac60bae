"""The small store that the nodes of a job share through their coordinator.

Each job has scopes (a round, a generation), and each scope keys of its own. It is meant for ranks,
addresses and the like, not for data: there is a limit on everything, and a call beyond one is
answered with the reason. What a coordinator that died had in it is gone; a call that waits for a
key is asked again by the client and waits on.

It reads no clock and no socket: the server brings the calls and the time, and sends the answers. A
caller is any value that can be a key; answers come back with it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Hashable
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.store.memory import as_bytes
from holdfast.wire.errors import WireError
from holdfast.wire.frames import encode_frame
from holdfast.wire.limits import (
    STORE_KEY_CHARS_MAX,
    STORE_KEYS_MAX,
    STORE_TIMEOUT_S_MAX,
    STORE_VALUE_BYTES_MAX,
    WHY_CHARS_MAX,
    clip,
)
from holdfast.wire.messages import StoreCall, StoreOp, StoreResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from datetime import timedelta


KEYS_MAX = 100_000
"""Keys of one job. Each costs about 200 bytes besides its name and value."""

BYTES_MAX = 64 * 1024 * 1024
"""Names and values of one job together, and the names that calls wait for."""

TOTAL_BYTES_MAX = 4 * BYTES_MAX
"""The same of all jobs together: what the coordinator's process may grow by."""

WAITED_KEY_BYTES = 256
"""What it costs to wait for a key, besides its name."""

SCOPES_MAX = 10_000
"""Scopes of one job. Of more, those that nobody has used for longest are dropped."""

WAITING_MAX = 100_000
"""Calls of one job that wait for a key."""

MISSING_SHOWN_MAX = 5

_LOOKS = ("check", "num_keys", "delete")

Caller = Hashable
Answers = list[tuple[Caller, StoreResult]]


class Waiting(msgspec.Struct, eq=False):
    """A call whose keys do not all have values yet."""

    caller: Caller
    call: StoreCall
    deadline: float
    missing: set[str]
    done: bool = False


class Scope:
    """The keys of one scope, and who waits for which."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.waiting: dict[str, set[Waiting]] = {}


class JobKeys:
    """All scopes of one job."""

    def __init__(self) -> None:
        self.scopes: OrderedDict[str, Scope] = OrderedDict()  # The last used is the last.
        self.keys = 0
        self.bytes = 0
        self.waiting = 0


class JobStores:
    """The stores of all jobs of a coordinator."""

    def __init__(
        self,
        *,
        keys_max: int = KEYS_MAX,
        bytes_max: int = BYTES_MAX,
        total_bytes_max: int = TOTAL_BYTES_MAX,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self._jobs: dict[str, JobKeys] = {}
        self._waiting_of: dict[Caller, set[Waiting]] = {}
        self._deadlines: list[tuple[float, int, Waiting]] = []  # A heap; some are done already.
        self._count = 0
        self._keys_max = keys_max
        self._bytes = 0
        self._bytes_max = bytes_max
        self._total_bytes_max = total_bytes_max
        self._waiting_max = waiting_max

    def call(self, now: float, caller: Caller, call: StoreCall) -> Answers:
        """Take a call; return its answer if there is one yet, and those it brings to others."""
        job = self._jobs.setdefault(call.run_id, JobKeys())
        dropped: Answers = []
        scope = job.scopes.get(call.scope)
        if scope is not None:
            job.scopes.move_to_end(call.scope)
        else:
            scope = Scope()
            if call.op not in _LOOKS:  # To look is no reason to drop another.
                while len(job.scopes) >= SCOPES_MAX:
                    dropped += self._drop_oldest(job, f"the job has over {SCOPES_MAX} scopes")
                job.scopes[call.scope] = scope
        return dropped + self._do(now, job, scope, caller, call)

    def _do(
        self, now: float, job: JobKeys, scope: Scope, caller: Caller, call: StoreCall
    ) -> Answers:
        op = call.op
        if op in ("get", "wait"):
            return self._await(now, job, scope, caller, call)
        if op == "check":
            return [(caller, _flag(call, all(key in scope.values for key in call.keys)))]
        if op == "num_keys":
            return [(caller, StoreResult(id=call.id, ok=True, amount=len(scope.values)))]
        if len(call.keys) != 1:
            return [(caller, _rejected(call, f"{op} takes one key"))]
        key = call.keys[0]
        if op == "delete":
            return [(caller, _flag(call, self._delete(job, scope, key)))]
        return self._change(job, scope, caller, call, key)

    def _change(
        self, job: JobKeys, scope: Scope, caller: Caller, call: StoreCall, key: str
    ) -> Answers:
        """Do what gives a key a value: set, add, compare_set."""
        current = scope.values.get(key)
        value, total, swapped = call.value, 0, call.op == "compare_set"
        if swapped and current != call.expected and (current or call.expected):
            held = call.expected if current is None else current
            return [(caller, StoreResult(id=call.id, ok=True, value=held, amount=0))]
        if call.op == "add":
            try:
                total = int(current or b"0") + call.amount
            except ValueError:
                return [(caller, _rejected(call, f"{key} is not a number"))]
            if not -(2**63) <= total < 2**63:
                return [(caller, _rejected(call, f"{key} would not fit into 64 bits"))]
            value = str(total).encode()
        problem = self._put(job, scope, key, value)
        if problem:
            return [(caller, _rejected(call, problem))]
        answer = StoreResult(
            id=call.id, ok=True, value=value if swapped else b"", amount=1 if swapped else total
        )
        return [(caller, answer), *self._wake(scope, key)]

    def next_deadline(self) -> float | None:
        """Return when `tick` is wanted next, or None while nobody waits."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].done:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def tick(self, now: float) -> Answers:
        """Answer those whose time is over."""
        answers: Answers = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            one = self._deadlines[0][2]
            self._forget(one)
            answers.append((one.caller, _timed_out(one)))
        return answers

    def forget_caller(self, caller: Caller) -> None:
        """Drop the calls of somebody who is gone."""
        for one in tuple(self._waiting_of.get(caller, ())):
            self._forget(one)

    def keep_only(self, run_ids: Container[str]) -> Answers:
        """Forget the stores of all other jobs, and tell those who still wait there."""
        answers: Answers = []
        for run_id in [run_id for run_id in self._jobs if run_id not in run_ids]:
            job = self._jobs[run_id]
            while job.scopes:
                answers += self._drop_oldest(job, "the job is over")
            del self._jobs[run_id]
        return answers

    def _drop_oldest(self, job: JobKeys, why: str) -> Answers:
        """Drop the scope that was not used for longest; return what those who wait there hear."""
        name, scope = next(iter(job.scopes.items()))
        answers: Answers = []
        for one in {one for ones in scope.waiting.values() for one in ones}:
            self._forget(one)
            answers.append((one.caller, _rejected(one.call, why)))
        for key in tuple(scope.values):
            self._delete(job, scope, key)
        del job.scopes[name]
        return answers

    def _take_room(self, job: JobKeys, more: int) -> str:
        """Count bytes, less or more; return what is against it."""
        if more > 0:
            if job.bytes + more > self._bytes_max:
                return f"the job's store is full: {self._bytes_max} bytes"
            if self._bytes + more > self._total_bytes_max:
                return f"the stores of all jobs are full: {self._total_bytes_max} bytes"
        job.bytes += more
        self._bytes += more
        return ""

    def _await(
        self, now: float, job: JobKeys, scope: Scope, caller: Caller, call: StoreCall
    ) -> Answers:
        if call.op == "get" and len(call.keys) != 1:
            return [(caller, _rejected(call, "get takes one key"))]
        missing = {key for key in call.keys if key not in scope.values}
        if not missing:
            return [(caller, _found(scope, call))]
        one = Waiting(caller, call, now + call.timeout_s, missing)
        if call.timeout_s <= 0:
            return [(caller, _timed_out(one))]
        if job.waiting >= self._waiting_max:
            return [(caller, _rejected(call, f"{self._waiting_max} calls wait already"))]
        problem = self._take_room(job, _cost_of(call))
        if problem:
            return [(caller, _rejected(call, problem))]
        job.waiting += 1
        self._count += 1
        self._waiting_of.setdefault(caller, set()).add(one)
        heapq.heappush(self._deadlines, (one.deadline, self._count, one))
        for key in missing:
            scope.waiting.setdefault(key, set()).add(one)
        return []

    def _put(self, job: JobKeys, scope: Scope, key: str, value: bytes) -> str:
        """Give a key a value; return what is against it."""
        current = scope.values.get(key)
        more = len(value) - len(current) if current is not None else len(value) + len(key)
        if current is None and job.keys >= self._keys_max:
            return f"the job's store is full: {self._keys_max} keys"
        problem = self._take_room(job, more)
        if problem:
            return problem
        job.keys += current is None
        scope.values[key] = value
        return ""

    def _delete(self, job: JobKeys, scope: Scope, key: str) -> bool:
        value = scope.values.pop(key, None)
        if value is None:
            return False
        job.keys -= 1
        self._take_room(job, -len(value) - len(key))
        return True

    def _wake(self, scope: Scope, key: str) -> Answers:
        """Answer those who waited for this key last."""
        answers: Answers = []
        for one in scope.waiting.pop(key, ()):
            one.missing.discard(key)
            # A key that was there when the call came may have been deleted since.
            one.missing.update(other for other in one.call.keys if other not in scope.values)
            if one.missing:
                for other in one.missing:
                    scope.waiting.setdefault(other, set()).add(one)
                continue
            self._forget(one)
            answers.append((one.caller, _found(scope, one.call)))
        return answers

    def _forget(self, one: Waiting) -> None:
        job = self._jobs[one.call.run_id]
        job.waiting -= 1
        self._take_room(job, -_cost_of(one.call))
        one.done = True
        mine = self._waiting_of[one.caller]
        mine.discard(one)
        if not mine:
            del self._waiting_of[one.caller]
        waiting = job.scopes[one.call.scope].waiting
        for key in one.call.keys:
            others = waiting.get(key)
            if others is not None:
                others.discard(one)
                if not others:
                    del waiting[key]
        if len(self._deadlines) > 2 * self._waiting_max:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)


def _cost_of(call: StoreCall) -> int:
    """Return how many bytes a call takes while it waits."""
    return sum(map(len, call.keys)) + WAITED_KEY_BYTES * len(call.keys)


def _found(scope: Scope, call: StoreCall) -> StoreResult:
    value = scope.values[call.keys[0]] if call.op == "get" else b""
    return StoreResult(id=call.id, ok=True, value=value)


def _flag(call: StoreCall, yes: bool) -> StoreResult:
    return StoreResult(id=call.id, ok=True, amount=int(yes))


def _rejected(call: StoreCall, why: str) -> StoreResult:
    return StoreResult(id=call.id, ok=False, why=clip(why, WHY_CHARS_MAX))


def _timed_out(one: Waiting) -> StoreResult:
    """Say so by `amount`: 1 marks an answer that came of time alone."""
    keys = sorted(one.missing)
    named = ", ".join(keys[:MISSING_SHOWN_MAX])
    if len(keys) > MISSING_SHOWN_MAX:
        named += f", and {len(keys) - MISSING_SHOWN_MAX} more"
    why = f"no value came within {one.call.timeout_s:g} s for: {named}"
    return StoreResult(id=one.call.id, ok=False, amount=1, why=clip(why, WHY_CHARS_MAX))


# Calls of one node to its job's store, on their way: who waits for which answer.
#
# A call whose repetition changes nothing is sent again when the link comes back, so that a node
# which
# waits for a key does not notice a coordinator that was gone for a moment. The others (`add` and
# the
# like) may have been done or not when the link broke, and fail. Runs in the client's loop.


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


# The store of a job as code that blocks uses it: `KeyValueStore`, over the node's connection.
#
# It means by each call what `holdfast.store.interface` says. A key that does not get a value in
# time
# is a `TimeoutError` that names it; a coordinator that cannot be reached in time is a
# `ConnectionError` that names the endpoint.


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
