"""The stores that a coordinator keeps for its jobs: `JobStores`, without a clock or a socket.

Each job has scopes (a round, a generation), and each scope has its own keys. The stores are for ranks, addresses
and similar values, not for data. Everything has a limit; a call beyond a limit fails, and its result has the reason.
The stores are lost with the coordinator; `membership.coordinator_store` repeats calls that still wait.

::

    CoordinatorStore ── StoreCalls ══ wire ══ CoordinatorServer ── JobStores ── one KeySpace per scope
    (blocking)          (in a loop)                                (no clock, no socket)
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Hashable

import msgspec

from holdfast.core.limits import WHY_CHARS_MAX
from holdfast.printable import one_line
from holdfast.store.key_space import KeySpace, RequestRejected, StoreFull
from holdfast.wire.messages import StoreCall, StoreResult
from holdfast.wire.wire_limits import STORE_VALUE_BYTES_MAX

BYTES_MAX = 64 * 1024 * 1024
"""The limit for the keys and values of one job, and for the keys that its calls wait for."""
TOTAL_BYTES_MAX = 4 * BYTES_MAX
"""The limit for all jobs together: the memory that the coordinator may use for stores."""
WAITED_KEY_BYTES = 256
"""The cost of waiting for a key, besides its name."""
SCOPES_MAX = 10_000
"""Scopes of one job. Beyond that the least recently used are dropped."""
WAITING_MAX = 100_000
"""The limit for calls of one job that wait for a key."""
MISSING_SHOWN_MAX = 5

_READS = ("check", "num_keys", "delete")

Caller = Hashable
Answers = list[tuple[Caller, StoreResult]]


class JobStores:
    """The stores of all jobs of a coordinator.

    The server passes in the calls and the time, and sends the results. Each result is paired with its caller,
    which is any hashable value.
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
        # A heap; it may contain calls that have ended.
        self._deadlines: list[tuple[float, int]] = []
        self._count = 0
        self._bytes = 0
        self._bytes_max = bytes_max
        self._total_bytes_max = total_bytes_max
        self._waiting_max = waiting_max

    def call(self, now: float, caller: Caller, call: StoreCall) -> Answers:
        """Perform a call; return its result, unless the call waits, and the results of the waits that it ends."""
        job = self._jobs.setdefault(call.run_id, _Job())
        answers: Answers = []
        scope = job.scopes.get(call.scope)
        if scope is not None:
            job.scopes.move_to_end(call.scope)
        else:
            scope = _Scope()
            if call.op not in _READS:  # A read drops no other scope.
                while len(job.scopes) >= SCOPES_MAX:
                    answers += self._drop_oldest(job, f"the job has over {SCOPES_MAX} scopes")
                job.scopes[call.scope] = scope
        held = scope.bytes_held
        scope.bytes_max = held + self._bytes_left(job)
        try:
            result = self._perform(now, job, scope, caller, call)
        except StoreFull:
            result = _rejected(call, self._full_text(job))
        except RequestRejected as problem:
            result = _rejected(call, f"{call.keys[0]}: {problem}")
        self._count_bytes(job, scope.bytes_held - held)
        if result is not None:
            answers.append((caller, result))
        woken, scope.woken = scope.woken, []
        for number in woken:
            wait = self._waits[number]
            self._forget(wait)
            answers.append((wait.caller, _found(scope, wait.call)))
        return answers

    def next_deadline(self) -> float | None:
        """Return when `tick` is due, or None while no call waits."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self._waits:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def tick(self, now: float) -> Answers:
        """Return the results of the calls that have timed out."""
        answers: Answers = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            wait = self._waits[self._deadlines[0][1]]
            answers.append((wait.caller, _timed_out(self._cancel(wait), wait.call)))
        return answers

    def forget_caller(self, caller: Caller) -> None:
        """Drop the calls of a caller that disconnected."""
        for number in tuple(self._waits_of.get(caller, ())):
            self._cancel(self._waits[number])

    def drop_others(self, run_ids: Container[str]) -> Answers:
        """Drop the stores of all other jobs; return the results of calls that still wait there."""
        answers: Answers = []
        for run_id in [run_id for run_id in self._jobs if run_id not in run_ids]:
            while self._jobs[run_id].scopes:
                answers += self._drop_oldest(self._jobs[run_id], "the job has ended")
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
                    raise RequestRejected(f"the value would exceed {STORE_VALUE_BYTES_MAX} bytes")
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
            return _rejected(call, f"{self._waiting_max} calls are waiting already")
        if _cost_of(call) > self._bytes_left(job):
            return _rejected(call, self._full_text(job))
        self._count += 1
        scope.wait(self._count, keys)
        scope.waits.add(self._count)
        self._waits[self._count] = wait = _Wait(self._count, caller, call)
        self._waits_of.setdefault(caller, set()).add(wait.number)
        heapq.heappush(self._deadlines, (now + call.timeout_s, wait.number))
        job.waiting += 1
        self._count_bytes(job, _cost_of(call))
        return None

    def _cancel(self, wait: _Wait) -> _Scope:
        """End a wait without a result; return its scope."""
        job = self._jobs[wait.call.run_id]
        scope = job.scopes[wait.call.scope]
        held = scope.bytes_held
        scope.cancel(wait.number)
        self._count_bytes(job, scope.bytes_held - held)
        self._forget(wait)
        return scope

    def _forget(self, wait: _Wait) -> None:
        job = self._jobs[wait.call.run_id]
        job.scopes[wait.call.scope].waits.discard(wait.number)
        job.waiting -= 1
        self._count_bytes(job, -_cost_of(wait.call))
        del self._waits[wait.number]
        numbers = self._waits_of[wait.caller]
        numbers.discard(wait.number)
        if not numbers:
            del self._waits_of[wait.caller]
        if len(self._deadlines) > 2 * self._waiting_max:
            self._deadlines = [one for one in self._deadlines if one[1] in self._waits]
            heapq.heapify(self._deadlines)

    def _drop_oldest(self, job: _Job, why: str) -> Answers:
        """Drop the least recently used scope; return the results of calls that wait there."""
        name, scope = next(iter(job.scopes.items()))
        answers: Answers = []
        for wait in [self._waits[number] for number in scope.waits]:
            self._cancel(wait)
            answers.append((wait.caller, _rejected(wait.call, why)))
        self._count_bytes(job, -scope.bytes_held)
        del job.scopes[name]
        return answers

    def _bytes_left(self, job: _Job) -> int:
        return max(0, min(self._bytes_max - job.bytes, self._total_bytes_max - self._bytes))

    def _count_bytes(self, job: _Job, more: int) -> None:
        job.bytes += more
        self._bytes += more

    def _full_text(self, job: _Job) -> str:
        if self._bytes_max - job.bytes <= self._total_bytes_max - self._bytes:
            return f"the job's store is full: {self._bytes_max} bytes"
        return f"the stores of all jobs are full: {self._total_bytes_max} bytes"


class _Scope(KeySpace):
    def __init__(self) -> None:
        super().__init__()
        self.waits: set[int] = set()


class _Job:
    def __init__(self) -> None:
        self.scopes: OrderedDict[str, _Scope] = OrderedDict()  # The most recently used is the last.
        self.bytes = 0
        self.waiting = 0


class _Wait(msgspec.Struct, frozen=True):
    """A call that waits for keys, with its number in the key space."""

    number: int
    caller: Caller
    call: StoreCall


def _cost_of(call: StoreCall) -> int:
    """Return how many bytes a call uses while it waits."""
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
