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

import msgspec

from holdfast.wire.limits import WHY_CHARS_MAX, clip
from holdfast.wire.messages import StoreCall, StoreResult

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


class Keys:
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
            return [(caller, _refused(call, f"{op} takes one key"))]
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
                return [(caller, _refused(call, f"{key} is not a number"))]
            if not -(2**63) <= total < 2**63:
                return [(caller, _refused(call, f"{key} would not fit into 64 bits"))]
            value = str(total).encode()
        problem = self._put(job, scope, key, value)
        if problem:
            return [(caller, _refused(call, problem))]
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
            answers.append((one.caller, _refused(one.call, why)))
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
            return [(caller, _refused(call, "get takes one key"))]
        missing = {key for key in call.keys if key not in scope.values}
        if not missing:
            return [(caller, _found(scope, call))]
        one = Waiting(caller, call, now + call.timeout_s, missing)
        if call.timeout_s <= 0:
            return [(caller, _timed_out(one))]
        if job.waiting >= self._waiting_max:
            return [(caller, _refused(call, f"{self._waiting_max} calls wait already"))]
        problem = self._take_room(job, _cost_of(call))
        if problem:
            return [(caller, _refused(call, problem))]
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


def _refused(call: StoreCall, why: str) -> StoreResult:
    return StoreResult(id=call.id, ok=False, why=clip(why, WHY_CHARS_MAX))


def _timed_out(one: Waiting) -> StoreResult:
    """Say so by `amount`: 1 marks an answer that came of time alone."""
    keys = sorted(one.missing)
    named = ", ".join(keys[:MISSING_SHOWN_MAX])
    if len(keys) > MISSING_SHOWN_MAX:
        named += f", and {len(keys) - MISSING_SHOWN_MAX} more"
    why = f"no value came within {one.call.timeout_s:g} s for: {named}"
    return StoreResult(id=one.call.id, ok=False, amount=1, why=clip(why, WHY_CHARS_MAX))
