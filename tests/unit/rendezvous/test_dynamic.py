"""The handler as agents use it: real threads, one process. The rules are in test_participant."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.rounds import Job, JobPhase
from holdfast.elastic._impl.c10d_backend import C10dRendezvousBackend
from holdfast.rendezvous.backend import DynamicRendezvousHandler, create_handler, decode
from holdfast.rendezvous.config import RendezvousParameters, RendezvousTimeout
from holdfast.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from holdfast.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.rendezvous.handler import RendezvousInfo

LONG_S = 30.0


class Cluster:
    """Nodes of one job, each with a backend of its own on a common store."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.handlers: list[DynamicRendezvousHandler] = []

    def add(self, least: int, most: int, **more: Any) -> DynamicRendezvousHandler:
        times = {"last_call": timedelta(seconds=0.02), **more.pop("times", {})}
        handler = DynamicRendezvousHandler.from_backend(
            "job",
            self.store,
            more.pop("backend", None) or C10dRendezvousBackend(self.store, "job"),
            least,
            most,
            "127.0.0.1",
            RendezvousTimeout(**times),
            **{"keep_alive_interval": 0.1, "keep_alive_max_attempt": 100, **more},
        )
        self.handlers.append(handler)
        return handler

    def job(self) -> Job:
        """Return the job as it is stored."""
        found = C10dRendezvousBackend(self.store, "job").get_state()
        return decode(found[0]) if found else Job(run_id="job")

    def meet(self, *handlers: DynamicRendezvousHandler) -> list[RendezvousInfo]:
        """Have nodes join at the same time; return their rounds by rank."""

        def join(one: DynamicRendezvousHandler) -> RendezvousInfo:
            info = one.next_rendezvous()
            while info.world_size < len(handlers):  # Others came after the last call.
                until(one.num_nodes_waiting)
                info = one.next_rendezvous()
            return info

        with ThreadPoolExecutor(len(handlers)) as pool:
            infos = list(pool.map(join, handlers))
        return sorted(infos, key=lambda info: info.rank)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.shutdown(), cluster.handlers))


def until(condition: Callable[[], object]) -> None:
    """Wait for what the threads of handlers bring about."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_a_round_of_several_nodes(cluster: Cluster) -> None:
    infos = cluster.meet(*(cluster.add(3, 3) for _ in range(3)))
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    (meeting_point,) = {
        (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port)
        for info in infos
    }
    assert meeting_point[0] == "127.0.0.1"
    infos[0].store.set("key", "value")
    assert infos[2].store.get("key") == b"value"


def test_what_a_handler_says_of_itself(cluster: Cluster) -> None:
    handler = cluster.add(1, 2)
    assert (handler.get_backend(), handler.get_run_id()) == ("c10d", "job")
    assert handler.use_agent_store is True
    assert handler.polls_membership is False
    settings = handler.settings
    assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("job", 1, 2)
    assert settings.keep_alive_interval == timedelta(seconds=0.1)


def test_a_restart_of_one_takes_all_along_to_a_new_store_and_port(cluster: Cluster) -> None:
    one, other = cluster.add(2, 2), cluster.add(2, 2)
    before = cluster.meet(one, other)
    before[0].store.set("key", "old")
    with ThreadPoolExecutor() as pool:
        restarting = pool.submit(one.next_rendezvous)
        until(other.num_nodes_waiting)
        after = [other.next_rendezvous(), restarting.result()]
    assert {info.rank for info in after} == {0, 1}
    assert not after[0].store.check(["key"])  # type: ignore[attr-defined]
    ports = {info.bootstrap_store_info.master_port for info in [*before, *after]}
    assert len(ports) == 2
    assert one.num_nodes_waiting() == other.num_nodes_waiting() == 0


def test_a_node_that_joins_is_noticed(cluster: Cluster) -> None:
    first = cluster.add(1, 2)
    assert first.next_rendezvous().world_size == 1
    assert first.num_nodes_waiting() == 0
    late = cluster.add(1, 2)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(late.next_rendezvous)
        until(lambda: first.num_nodes_waiting() == 1)
        assert (first.next_rendezvous().rank, joining.result().rank) == (0, 1)


def test_a_node_that_leaves_breaks_the_round_but_not_the_job(cluster: Cluster) -> None:
    one, other = cluster.add(1, 2), cluster.add(1, 2)
    cluster.meet(one, other)
    assert one.shutdown()
    until(other.num_nodes_waiting)
    assert not other.is_closed()
    info = other.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)


def test_a_node_that_died_is_noticed(cluster: Cluster) -> None:
    quick = {"keep_alive_interval": 0.02, "keep_alive_max_attempt": 10}
    one, other = cluster.add(1, 2, **quick), cluster.add(1, 2, **quick)
    cluster.meet(one, other)
    one._attendant.stop(LONG_S)  # As if its process had been killed.
    until(other.num_nodes_waiting)
    assert other.next_rendezvous().world_size == 1


def test_closing_ends_the_job_for_all(cluster: Cluster) -> None:
    one, other = cluster.add(2, 2), cluster.add(2, 2)
    cluster.meet(one, other)
    assert not other.is_closed()
    one.set_closed()
    assert one.is_closed()
    assert other.is_closed()
    assert other.num_nodes_waiting() == 1, "its workers are of no use any more"
    with pytest.raises(RendezvousClosedError, match=r"^the job 'job' is over .*\(start another"):
        other.next_rendezvous()
    with pytest.raises(RendezvousClosedError):
        cluster.add(2, 2).next_rendezvous()


def test_a_job_can_be_closed_before_anybody_joined(cluster: Cluster) -> None:
    handler = cluster.add(1, 1)
    handler.set_closed()
    assert handler.is_closed()
    assert handler.num_nodes_waiting() == 0


def test_a_standby_waits_longer_than_the_join_timeout_and_ends_well(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = cluster.add(1, 1)
    member.next_rendezvous()
    spare = cluster.add(1, 1, times={"join": timedelta(seconds=0.05)})
    waits: list[int] = []
    wait = spare._attendant.wait

    def counted(number: int, *given: Any) -> Any:
        wait(number, lambda standing: standing.was_standby, LONG_S)  # Its time begins to run now.
        waits.append(number)
        return wait(number, *given)

    monkeypatch.setattr(spare._attendant, "wait", counted)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(spare.next_rendezvous)
        until(lambda: len(waits) == 3)  # Its time was over twice.
        assert not waiting.done()
        member.set_closed()
        with pytest.raises(RendezvousGracefulExitError, match="this node was a standby"):
            waiting.result()


def test_too_few_nodes_are_told_of(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    lonely = cluster.add(2, 3, times={"join": timedelta(seconds=0.05)})
    wait = lonely._attendant.wait

    def once_in(number: int, *given: Any) -> Any:
        wait(number, lambda standing: standing.in_job, LONG_S)  # Its time begins to run now.
        return wait(number, *given)

    monkeypatch.setattr(lonely._attendant, "wait", once_in)
    with pytest.raises(RendezvousTimeoutError) as told:
        lonely.next_rendezvous()
    assert str(told.value) == (
        "there was no round of the job 'job' within 0.05 s: 1 of at least 2 nodes are there "
        "(join_timeout in --rdzv-conf sets the time)"
    )
    until(lambda: not lonely._attendant.last_seen().in_job)


def test_a_node_started_otherwise_is_refused(cluster: Cluster) -> None:
    cluster.add(1, 2).next_rendezvous()
    with pytest.raises(RendezvousError, match=r"was started with --nnodes 1:3, but .* 1:2"):
        cluster.add(1, 3).next_rendezvous()


def test_a_store_that_was_emptied_costs_no_restart(cluster: Cluster) -> None:
    one, other = cluster.add(2, 2), cluster.add(2, 2)
    cluster.meet(one, other)
    assert cluster.job().term == 1
    assert cluster.store.delete_key("torch.rendezvous.job")
    until(lambda: cluster.job().phase is JobPhase.ACTIVE and len(cluster.job().members) == 2)
    assert cluster.job().term > 1
    assert cluster.job().generation == 0
    for handler in (one, other):
        assert handler._look().regroup == handler.num_nodes_waiting() == 0


def test_shutting_down_is_final_and_can_be_repeated(cluster: Cluster) -> None:
    handler = cluster.add(1, 1)
    handler.next_rendezvous()
    assert handler.shutdown()
    assert handler.shutdown()
    handler.set_closed()  # Nothing is left to be closed.
    for call in (handler.next_rendezvous, handler.is_closed, handler.num_nodes_waiting):
        with pytest.raises(RendezvousClosedError, match="was shut down"):
            call()


def test_a_handler_that_is_forgotten_ends_its_thread(cluster: Cluster) -> None:
    handler = cluster.add(1, 1)
    handler.next_rendezvous()
    thread = handler._attendant._thread
    assert thread is not None
    cluster.handlers.clear()
    del handler
    gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_store_that_fails_is_told_of(cluster: Cluster) -> None:
    class Broken(C10dRendezvousBackend):
        def get_state(self) -> Any:
            raise RendezvousConnectionError("the store is gone")

    handler = cluster.add(1, 1, backend=Broken(cluster.store, "job"))
    with pytest.raises(RendezvousConnectionError, match="the store is gone"):
        handler.next_rendezvous()
    with pytest.raises(RendezvousConnectionError):
        handler.is_closed()
    assert handler.shutdown() is False


def test_a_store_that_hangs_is_given_up_in_time(cluster: Cluster) -> None:
    go_on = threading.Event()

    class Hanging(C10dRendezvousBackend):
        def get_state(self) -> Any:
            go_on.wait(LONG_S)
            return super().get_state()

    soon = timedelta(seconds=0.02)
    handler = cluster.add(
        1,
        1,
        backend=Hanging(cluster.store, "job"),
        times={"join": soon, "close": soon, "heartbeat": soon},
    )
    try:
        with pytest.raises(RendezvousTimeoutError, match="0 of at least 1 nodes are there"):
            handler.next_rendezvous()
        with pytest.raises(RendezvousTimeoutError, match=r"'c10d' did not answer in 0.02 s"):
            handler.is_closed()
        with pytest.raises(RendezvousTimeoutError, match=r"could not be closed in 0.02 s"):
            handler.set_closed()
        assert handler.shutdown() is False
    finally:
        go_on.set()
        thread = handler._attendant._thread
        assert thread is not None
        thread.join(LONG_S)


def test_many_nodes_at_once(cluster: Cluster) -> None:
    infos = cluster.meet(*(cluster.add(12, 12) for _ in range(12)))
    assert [info.rank for info in infos] == list(range(12))


def created(store: MemoryStore, **config: Any) -> DynamicRendezvousHandler:
    params = RendezvousParameters("c10d", "", "job", 1, 3, "10.0.0.1", **config)
    return create_handler(store, C10dRendezvousBackend(store, "job"), params)


def test_settings_come_from_the_parameters() -> None:
    handler = created(MemoryStore(), join_timeout="7.5", settle=2, keep_alive_interval=3)
    try:
        settings = handler.settings
        assert settings.timeout.join == timedelta(seconds=7.5)
        assert settings.timeout.last_call == timedelta(seconds=2)
        assert settings.timeout.close == timedelta(seconds=30)
        assert settings.keep_alive_interval == timedelta(seconds=3)
        assert settings.keep_alive_max_attempt == 5
    finally:
        handler.shutdown()


def test_a_node_may_have_a_name_and_spares_are_kept_back(cluster: Cluster) -> None:
    cluster.handlers += [
        created(cluster.store, node_id=f"node {number}", settle=0.02, spares=1)
        for number in range(2)
    ]
    one, spare = cluster.handlers
    assert one.next_rendezvous().world_size == 1
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(spare.next_rendezvous)
        until(lambda: spare._attendant.last_seen().was_standby)
        one.shutdown()
        assert waiting.result().world_size == 1
