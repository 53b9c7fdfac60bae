"""Collectives over our stores and torch's, also together with ranks that use torch's functions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.store import DistNetworkError, FileStore, MemoryStore, StoreTimeoutError
from holdfast.store.collectives import barrier, get_all, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHORT_S = 0.05
LONG_S = 60


def torchs_hash_store(_folder: Path) -> Any:
    from torch.distributed import HashStore

    return HashStore()


@pytest.fixture(
    params=[
        lambda _: MemoryStore(),
        FileStore,
        pytest.param(torchs_hash_store, marks=pytest.mark.torch),
    ],
    ids=["memory", "file", "HashStore"],
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return request.param(tmp_path)


def all_ranks(world_size: int, of_rank: Callable[[int], Any]) -> list[Any]:
    """Run each rank in its own thread; return the result or exception of each."""

    def result(rank: int) -> Any:
        try:
            return of_rank(rank)
        except Exception as problem:
            return problem

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(result, range(world_size)))


class Together:
    """A store in which no timeout starts before this many ranks are waiting."""

    def __init__(self, store: Any, ranks: int) -> None:
        self._store = store
        self._gate = threading.Barrier(ranks)
        self._is_open = False

    def wait(self, *arguments: Any) -> None:
        if not self._is_open:
            self._gate.wait(LONG_S)
            self._is_open = True
        self._store.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


# Data


def test_every_rank_receives_the_data_of_all(store: Any) -> None:
    got = all_ranks(4, lambda rank: synchronize(store, b"of %d" % rank, rank, 4, "data", 60))
    assert got == [[b"of 0", b"of 1", b"of 2", b"of 3"]] * 4


def test_timeout_names_the_ranks_without_data(store: Any) -> None:
    both = Together(store, 2)

    def publish(rank: int) -> Any:
        return synchronize(both, b"", rank, 5, "data", SHORT_S) if rank in (1, 3) else None

    _, first, _, second, _ = all_ranks(5, publish)
    for problem in (first, second):
        assert isinstance(problem, StoreTimeoutError)
        assert "ranks 0, 2, 4 of 5" in str(problem)


def test_rank_0_learns_which_ranks_did_not_read_the_data(store: Any) -> None:
    for rank in range(3):
        store.set(f"data{rank}", "")
    get_all(store, 2, "data", 3)
    store.set_timeout(timedelta(seconds=SHORT_S))
    with pytest.raises(StoreTimeoutError, match="rank 1 of 3"):
        get_all(store, 0, "data", 3)


# Barriers


def test_barrier_can_be_reused() -> None:
    store = MemoryStore()
    came: list[int] = []

    def arrive(rank: int) -> list[int]:
        seen = []
        for _ in range(3):
            came.append(rank)
            barrier(store, 3, "here", 60, rank)
            seen.append(len(came))
        return seen

    for seen in all_ranks(3, arrive):
        assert all(count >= 3 * (turn + 1) for turn, count in enumerate(seen))
    with pytest.raises(StoreTimeoutError, match="ranks 0, 2 of 3"):
        barrier(store, 3, "here", SHORT_S, 1)


def test_every_rank_learns_which_ranks_are_missing(store: Any) -> None:
    others = Together(store, 3)

    def arrive(rank: int) -> None:
        if rank not in (1, 3):
            barrier(others, 5, "here", SHORT_S, rank, lambda one: f"{one} (host{one})")

    problems = [one for one in all_ranks(5, arrive) if one is not None]
    assert len(problems) == 3
    for problem in problems:
        assert isinstance(problem, StoreTimeoutError)
        assert "here" in str(problem)
        assert "ranks 1 (host1), 3 (host3) of 5" in str(problem)


def test_caller_without_a_rank_is_counted() -> None:
    store = MemoryStore()
    store.add("here/num_members", 1)
    with pytest.raises(StoreTimeoutError, match=r"ranks 0, 2 of 3, but 1 "):
        barrier(store, 3, "here", SHORT_S, 1)


def test_caller_that_timed_out_is_no_longer_counted(store: Any) -> None:
    for _ in range(3):
        with pytest.raises(StoreTimeoutError, match="1 of 2"):
            barrier(store, 2, "here", SHORT_S)
    assert all_ranks(2, lambda rank: barrier(store, 2, "here", 60, rank)) == [None, None]


def test_barrier_that_completes_at_the_deadline_passes() -> None:
    """The last rank arrives after the first has timed out, but before it has unregistered."""

    class LastMoment(MemoryStore):
        def wait(self, *arguments: Any) -> None:
            try:
                super().wait(*arguments)
            except StoreTimeoutError:
                barrier(self.clone(), 2, "here", 60)
                raise

    store = LastMoment()
    barrier(store, 2, "here", SHORT_S)
    assert store.get("here/num_members") == b"2"


def test_lost_store_is_not_queried_for_missing_ranks() -> None:
    class Gone(MemoryStore):
        def wait(self, *arguments: object) -> None:
            raise DistNetworkError("gone")

        def check(self, keys: object) -> bool:
            raise AssertionError

    store = Gone()
    with pytest.raises(DistNetworkError):
        barrier(store, 2, "here", SHORT_S, 0)
    with pytest.raises(DistNetworkError):
        synchronize(store, b"", 0, 2, "data", SHORT_S)


# Torch's functions among ours


@pytest.mark.torch
def test_ranks_with_torchs_functions_meet_ours() -> None:
    from torch.distributed import HashStore
    from torch.distributed.elastic.utils import store as torchs

    store = HashStore()

    def meet(rank: int) -> list[bytes]:
        there = torchs if rank % 2 else None
        arrive = there.barrier if there else barrier
        exchange = there.synchronize if there else synchronize
        arrive(store, 4, "here", 60, rank)
        found: list[bytes] = exchange(store, b"%d" % rank, rank, 4, "data", 60)
        return found

    assert all_ranks(4, meet) == [[b"0", b"1", b"2", b"3"]] * 4


@pytest.mark.torch
def test_torchs_barrier_counts_our_ranks_as_arrived() -> None:
    from torch.distributed import HashStore
    from torch.distributed.elastic.utils import store as torchs

    store = Together(HashStore(), 2)

    def arrive(rank: int) -> None:
        if rank == 0:
            torchs.barrier(store, 3, "here", SHORT_S, rank, None, 0.1)
        elif rank == 1:
            barrier(store, 3, "here", SHORT_S, rank)

    theirs, ours, _ = all_ranks(3, arrive)
    assert "missing_ranks=[2]" in str(theirs)
    assert isinstance(ours, StoreTimeoutError)


class SmallStore:
    """A store with only the methods that torch's own functions use."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.timeout = timedelta(seconds=1)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def set(self, key: str, value: Any) -> None:
        self.kept[key] = value

    def add(self, key: str, amount: int) -> int:
        self.kept[key] = self.kept.get(key, 0) + amount
        return int(self.kept[key])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.kept[key] for key in keys]

    def wait(self, keys: list[str]) -> None:
        if not all(key in self.kept for key in keys):
            raise LateError


class LateError(RuntimeError):
    """The timeout error of a custom store."""


def test_store_without_check_and_timeouts_is_enough() -> None:
    store = SmallStore()
    assert synchronize(store, b"a", 0, 1, "data", timeout=0.1) == [b"a"]
    with pytest.raises(StoreTimeoutError) as caught:
        barrier(store, 3, "it", barrier_timeout=0.1, rank=1, rank_tracing_decoder="<{}>".format)
    assert isinstance(caught.value, LateError)
    assert "<0>, <2>" in str(caught.value)
    assert "<1>" not in str(caught.value)
    assert store.timeout == timedelta(seconds=1)
