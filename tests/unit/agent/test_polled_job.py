from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.agent import polled_job
from holdfast.agent.spec import WorkerGroup, WorkerSpec
from holdfast.core.ranks import NodeRanks
from holdfast.processes.signals import SignalException
from holdfast.rendezvous.rendezvous_errors import RendezvousStateError
from holdfast.store.memory_store import MemoryStore
from rendezvous_fakes import ScriptedRendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOON_S = 0.05
LATE_S = 60.0
NODES = [("trainer", 2), ("reader", 1), ("reader", 3), ("trainer", 4)]


def spec(role: str, size: int) -> WorkerSpec:
    return WorkerSpec(role, size, ScriptedRendezvous(), entrypoint="train")


def memory_stores() -> Iterator[Callable[[], Any]]:
    store = MemoryStore(LATE_S)
    yield lambda: store


def tcp_stores() -> Iterator[Callable[[], Any]]:
    """A server, and for each agent a client with its own connection."""
    from torch.distributed import TCPStore

    # With libuv it would keep two descriptors until the process exits.
    how = {"wait_for_workers": False, "use_libuv": False}
    servers = [TCPStore("127.0.0.1", 0, is_master=True, **how)]
    yield lambda: TCPStore("127.0.0.1", servers[0].port, is_master=False, **how)
    servers.clear()


@pytest.fixture(params=[memory_stores, pytest.param(tcp_stores, marks=pytest.mark.torch)])
def make_store(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """A function that returns an agent's client of the store."""
    yield from request.param()


@pytest.fixture(autouse=True)
def _each_node_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_WORKER_IDENTICAL", raising=False)


def ranks_of(make_store: Callable[[], Any], nodes: list[tuple[str, int]]) -> list[NodeRanks]:
    """Exchange the ranks of all nodes concurrently; the first node starts last."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        learning = [
            pool.submit(polled_job.node_ranks, make_store(), rank, len(nodes), spec(*nodes[rank]))
            for rank in reversed(range(len(nodes)))
        ]
        return [one.result() for one in reversed(learning)]


def test_ranks_count_per_role_and_over_all_nodes(make_store: Callable[[], Any]) -> None:
    assert ranks_of(make_store, NODES) == [
        NodeRanks(0, 10, 0, 6), NodeRanks(2, 10, 0, 4), NodeRanks(3, 10, 1, 4),
        NodeRanks(6, 10, 2, 6),
    ]  # fmt: skip


def test_single_or_identical_nodes_need_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    assert polled_job.node_ranks(None, 0, 1, spec("trainer", 3)) == NodeRanks(0, 3, 0, 3)
    polled_job.exit_barrier(node(None, 0, 1), SOON_S)
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    assert polled_job.node_ranks(None, 2, 3, spec("trainer", 4)) == NodeRanks(8, 12, 8, 12)


@pytest.mark.torch
@pytest.mark.parametrize("first_is_torch", [True, False])
def test_rank_exchange_works_with_torch_agents(first_is_torch: bool) -> None:
    """With two nodes of each kind in one round, all ranks must be consistent."""
    from torch.distributed import HashStore
    from torch.distributed.elastic.agent.server import SimpleElasticAgent
    from torch.distributed.elastic.agent.server import WorkerSpec as TorchSpec

    store = HashStore()

    def by_torch(rank: int) -> NodeRanks:
        role, size = NODES[rank]
        handler: Any = ScriptedRendezvous()
        workers = SimpleElasticAgent._assign_worker_ranks(
            None, store, rank, len(NODES), TorchSpec(role, size, handler, entrypoint="train")
        )
        first = workers[0]
        return NodeRanks(
            first.global_rank, first.world_size, first.role_rank, first.role_world_size
        )

    def by_us(rank: int) -> NodeRanks:
        return polled_job.node_ranks(store, rank, len(NODES), spec(*NODES[rank]))

    turns = [by_torch, by_us] if first_is_torch else [by_us, by_torch]
    with ThreadPoolExecutor(len(NODES)) as pool:
        mixed = list(pool.map(lambda rank: turns[rank % 2](rank), range(len(NODES))))
    alone = HashStore()
    assert mixed == ranks_of(lambda: alone, NODES)


class KnowingStore:
    """A store of a scheduler that has assigned the ranks itself, and stores nothing."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def set(self, key: str, value: str) -> None: ...

    def multi_set(self, keys: list[str], values: list[str]) -> None: ...

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return []

    def get(self, key: str) -> bytes:
        return json.dumps(self.ranks).encode()


def knowing_store_of_torch(*ranks: int) -> Any:
    """The same as a subclass of torch's store, from which it inherits a `check` that only raises."""
    from torch.distributed import Store

    class Derived(KnowingStore, Store):  # type: ignore[misc]
        def __init__(self) -> None:
            Store.__init__(self)
            self.ranks = ranks

    return Derived()


@pytest.mark.parametrize(
    "kind", [KnowingStore, pytest.param(knowing_store_of_torch, marks=pytest.mark.torch)]
)
def test_rank_exchange_needs_only_torchs_store_methods(kind: Callable[..., Any]) -> None:
    for rank in (0, 1):
        store = kind(4 * rank, 8, 2 * rank, 4)
        found = polled_job.node_ranks(store, rank, 2, spec("trainer", 4), lambda: False)
        assert found == NodeRanks(4 * rank, 8, 2 * rank, 4)
        polled_job.exit_barrier(node(store, rank, 2), SOON_S)


def test_store_may_assign_ranks_below_zero() -> None:
    """HyperPod's store does, to a node that has the rank -1 until a controller chooses another."""
    store: Any = KnowingStore(-2, 4, -2, 4)
    assert polled_job.node_ranks(store, -1, 2, spec("trainer", 2)) == NodeRanks(-2, 4, -2, 4)


def test_missing_node_ends_the_rank_exchange_with_an_error() -> None:
    answers = [True, False, False]
    with pytest.raises(polled_job.RoundBroken):
        polled_job.node_ranks(MemoryStore(), 0, 2, spec("trainer", 1), answers.pop)
    assert answers == []


def node(store: Any, rank: int, size: int) -> WorkerGroup:
    group = WorkerGroup(spec("trainer", 1))
    group.store, group.group_rank, group.group_world_size = store, rank, size
    return group


def test_barrier_waits_for_the_last_node(make_store: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(3) as pool:
        early = [
            pool.submit(polled_job.exit_barrier, node(make_store(), rank, 3), LATE_S)
            for rank in (2, 0)
        ]
        assert not any(one.done() for one in early)
        polled_job.exit_barrier(node(make_store(), 1, 3), LATE_S)
        for one in early:
            one.result()


class BrokenStore:
    """A foreign store, which fails with its own kind of error."""

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    def add(self, _key: str, _amount: int) -> int:
        raise self._problem


def test_only_a_signal_interrupts_the_barrier(caplog: pytest.LogCaptureFixture) -> None:
    polled_job.exit_barrier(node(MemoryStore(), 0, 2), SOON_S)
    polled_job.exit_barrier(node(BrokenStore(ConnectionResetError("reset")), 0, 2), LATE_S)
    assert len(caplog.messages) == 2
    ended = SignalException("ended", signal.SIGTERM)
    with pytest.raises(SignalException):
        polled_job.exit_barrier(node(BrokenStore(ended), 0, 2), LATE_S)


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff\xfe", b"[" * 100_000, b"[]", b"{}", b'{"role": 1, "local_world_size": 1}',
     b'{"role": "a", "local_world_size": -1}', b"[1, 2]", b'[0, 1, 0, "x"]', b"null"],
)  # fmt: skip
def test_foreign_value_in_the_store_is_a_one_line_error(value: bytes) -> None:
    """Both at the first node, which assigns the ranks, and at another, which receives them."""
    for rank, key in ((0, "role_info/1"), (1, "assigned_ranks/1")):
        store = MemoryStore(SOON_S)
        store.set(f"torchelastic/{key}", value)
        with pytest.raises(RendezvousStateError, match=key) as raised:
            polled_job.node_ranks(store, rank, 2, spec("trainer", 1))
        assert str(raised.value).isprintable()
