"""Collectives over a store: ranks exchange data, or wait for each other.

They work on any store, including torch's, and use TorchElastic's keys, so ranks that use torch's functions
and ranks that use these interoperate. A store needs only what TorchElastic's functions use: `check`, and a timeout for
`wait`, are optional.

Improvements over TorchElastic: the error of a timeout names the missing ranks, on every rank and without
further waiting. A rank that times out is no longer counted. The same number of ranks can reuse a barrier.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from holdfast.store.memory_store import as_bytes
from holdfast.store.store_errors import DistNetworkError, StoreTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RANKS_SHOWN_MAX = 32
"""How many missing ranks a message names; it counts the rest."""
TRACE_S_MAX = 10.0
"""The limit for finding out which ranks are missing."""
LAST_WAIT_S_MIN = 0.001
"""The minimum timeout of the last wait, so that it checks at least once. For torch's stores, 0 means no limit."""

_COUNT, _COMPLETE, _MARK, _GATE = "/num_members", "/last_member", "/TRACE", "/TRACING_GATE"
_NOTHING = "<val_ignored>"


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """Set the timeout (seconds) of a store for the block, and restore it afterwards.

    Other threads that use the same store are affected meanwhile.
    """
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def wait_for_keys(store: Any, keys: Sequence[str], timeout_s: float) -> None:
    """Wait until all keys have values; raises what the store raises on timeout."""
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except TypeError:  # Its `wait` accepts only keys.
        with store_timeout(store, timeout_s):
            store.wait(keys)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Return the values that all ranks set under `{prefix}{rank}`, in rank order.

    Rank 0 returns after all others have read the values, so it can close the store. After the store's own
    timeout, raises `StoreTimeoutError` with the missing ranks.
    """
    return _get_all(store, rank, prefix, world_size, store.timeout.total_seconds())


def synchronize(
    store: Any,
    data: bytes,
    rank: int,
    world_size: int,
    key_prefix: str,
    timeout: float = 300,
) -> list[bytes]:
    """Send `data` to all ranks, and return the data of all, in rank order.

    A prefix can be used only once. Rank 0 returns last; see `get_all`.
    """
    store.set(f"{key_prefix}{rank}", data)
    return _get_all(store, rank, key_prefix, world_size, timeout)


def barrier(
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = TRACE_S_MAX,
) -> None:
    """Wait until `world_size` ranks have arrived, including this one.

    On timeout, raises `StoreTimeoutError`; if a `rank` is given, it names the missing ranks, through
    the decoder if there is one. Finding them takes `trace_timeout` seconds at most.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("rank_tracing_decoder: needs a rank as well")
    turn = _Turn(store, world_size, key_prefix, rank)
    turn.arrive()
    try:
        turn.wait(barrier_timeout)
    except (RuntimeError, TimeoutError) as problem:
        if _is_loss(problem):
            raise
        if turn.withdraw():
            return
        until = time.monotonic() + trace_timeout
        reason = _describe_missing(turn, rank_tracing_decoder or str, until)
        raise _timed_out(
            f"the barrier {key_prefix} timed out after {barrier_timeout:g} s: {reason}", problem
        ) from problem


class _Turn:
    """One use of a barrier by one rank."""

    def __init__(self, store: Any, world_size: int, prefix: str, rank: int | None) -> None:
        self.store, self.world_size, self.prefix, self.rank = store, world_size, prefix, rank
        self.arrived = 0
        """How many ranks have arrived in this turn, as far as known."""
        self._before = 0  # How many ranks arrived in earlier turns.
        self._suffix = ""  # The first turn uses torch's key names.

    def arrive(self) -> None:
        """Register at the barrier, without waiting."""
        arrived = self.store.add(self.prefix + _COUNT, 1)
        number = (arrived - 1) // self.world_size
        self._before = number * self.world_size
        self._suffix = f"/{number}" if number else ""
        if self.rank is not None:
            self.store.set(self.mark(self.rank), _NOTHING)
        if arrived == self._before + self.world_size:
            self.store.set(self._complete_key, _NOTHING)

    def wait(self, timeout_s: float) -> None:
        """Wait until all have arrived; raises what the store raises on timeout."""
        wait_for_keys(self.store, [self._complete_key], timeout_s)

    def withdraw(self) -> bool:
        """Unregister; return True if all ranks arrived just before that."""
        self.arrived = self.store.add(self.prefix + _COUNT, -1) + 1 - self._before
        if _have_values(self.store, [self._complete_key]):
            self.store.add(self.prefix + _COUNT, 1)
            return True
        return False

    def missing(self, until: float) -> list[int]:
        """Return the ranks that did not arrive."""
        found = _absent(self.store, [self.mark(rank) for rank in range(self.world_size)], until)
        if self.rank == 0:
            # Ranks that use torch's barrier wait for this key.
            self.store.set(self.prefix + _GATE, _NOTHING)
        return found

    def mark(self, rank: int) -> str:
        """Return the key that a rank sets when it arrives."""
        return f"{self.prefix}{rank}{_MARK}{self._suffix}"

    @property
    def _complete_key(self) -> str:
        return f"{self.prefix}{_COMPLETE}{self._suffix}"


def _get_all(store: Any, rank: int, prefix: str, world_size: int, timeout_s: float) -> list[bytes]:
    deadline = time.monotonic() + timeout_s
    keys = [f"{prefix}{one}" for one in range(world_size)]
    try:
        wait_for_keys(store, keys, timeout_s)
    except (RuntimeError, TimeoutError) as problem:
        missing = [] if _is_loss(problem) else _absent(store, keys, _trace_deadline())
        if not missing:
            raise
        raise _timed_out(
            f"no data under {prefix} within {timeout_s:g} s from {_ranks(missing, str)} of {world_size}",
            problem,
        ) from problem
    values = [as_bytes(value) for value in store.multi_get(keys)]
    end = _Turn(store, world_size, f"{prefix}/finished", rank)
    end.arrive()
    if rank != 0:
        return values
    try:
        end.wait(max(deadline - time.monotonic(), LAST_WAIT_S_MIN))
    except (RuntimeError, TimeoutError) as problem:
        missing = [] if _is_loss(problem) else end.missing(_trace_deadline())
        if not missing:
            raise
        raise _timed_out(
            f"the data under {prefix} was not read within {timeout_s:g} s by "
            f"{_ranks(missing, str)} of {world_size}",
            problem,
        ) from problem
    return values


def _trace_deadline() -> float:
    return time.monotonic() + TRACE_S_MAX


def _describe_missing(turn: _Turn, decode: Callable[[int], str], until: float) -> str:
    """Return which ranks are missing, as far as that can be determined."""
    arrived = f"{turn.arrived} of {turn.world_size} arrived"
    if turn.rank is None:
        return arrived
    try:
        missing = turn.missing(until)
    except (RuntimeError, OSError) as problem:
        return f"{arrived}; cannot determine which: {problem}"
    if not missing:
        return f"{arrived}; the others arrived in another turn"
    nameless = turn.arrived + len(missing) - turn.world_size
    text = f"missing: {_ranks(missing, decode)} of {turn.world_size}"
    return f"{text}, but {nameless} of these arrived without a rank" if nameless > 0 else text


def _ranks(missing: Sequence[int], decode: Callable[[int], str]) -> str:
    text = ", ".join(decode(rank) for rank in missing[:RANKS_SHOWN_MAX])
    more = len(missing) - RANKS_SHOWN_MAX
    plural = "s" if len(missing) > 1 else ""
    return f"rank{plural} {text}" + (f" and {more} more" if more > 0 else "")


def _absent(store: Any, keys: Sequence[str], until: float) -> list[int]:
    """Return the indices of the missing keys, by bisection: usually few are missing.

    Raises `StoreTimeoutError` if it takes too long.
    """
    found: list[int] = []
    parts = [range(len(keys))]
    while parts:
        if time.monotonic() > until:
            raise StoreTimeoutError("checking each key took too long")
        part = parts.pop()
        if _have_values(store, [keys[place] for place in part]):
            continue
        middle = len(part) // 2
        if middle:
            parts += [part[middle:], part[:middle]]
        else:
            found += part
    return found


def _have_values(store: Any, keys: Sequence[str]) -> bool:
    """Return whether all keys have values. Without `check`, wait briefly for them."""
    try:
        return bool(store.check(keys))
    except (AttributeError, NotImplementedError, RuntimeError) as problem:
        if _is_loss(problem):
            raise
    try:
        wait_for_keys(store, keys, LAST_WAIT_S_MIN)
    except (RuntimeError, TimeoutError) as problem:
        if _is_loss(problem):
            raise
        return False
    return True


def _timed_out(text: str, problem: Exception) -> StoreTimeoutError:
    """Return a timeout error that is also of the type that the store raised."""
    theirs = type(problem)
    if issubclass(theirs, StoreTimeoutError) or issubclass(StoreTimeoutError, theirs):
        return StoreTimeoutError(text)
    kind = type(StoreTimeoutError.__name__, (StoreTimeoutError, theirs), {})
    error: StoreTimeoutError = kind(text)
    return error


def _is_loss(problem: Exception) -> bool:
    """Whether the connection to the store, ours or torch's, is lost. Then the missing ranks are unknown."""
    # By name, because the store may be torch's, and the agent must not import torch for its class.
    return isinstance(problem, DistNetworkError) or (
        type(problem).__name__ == DistNetworkError.__name__
    )
