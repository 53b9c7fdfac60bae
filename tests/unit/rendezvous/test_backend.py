"""The handler and its membership on a backend, with real threads in one process.

The decisions are tested in `tests/unit/core/test_shared_state.py` and by the simulator.
"""

from __future__ import annotations

import gc
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.phases import JobOutcome, NodePhase, NodeRole
from holdfast.core.protocol import Failure, View
from holdfast.core.rounds import Job, JobPhase
from holdfast.core.shared_state import decode
from holdfast.core.supervision import CoordinatorLost
from holdfast.elastic._impl.c10d_backend import C10dRendezvousBackend
from holdfast.errors import UsageError
from holdfast.membership.backend import BackendMembership
from holdfast.membership.interface import JoinRefused
from holdfast.rendezvous.backend_handler import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    create_handler,
)
from holdfast.rendezvous.membership_handler import ALL_ARRIVED
from holdfast.rendezvous.rdzv_conf import RendezvousParameters, RendezvousTimeout
from holdfast.rendezvous.rendezvous_errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from holdfast.store.memory_store import MemoryStore
from real_coordinators import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.rendezvous.handler import RendezvousInfo

LONG_S = 30.0


class Fickle(C10dRendezvousBackend):
    """A backend that fails or hangs while the test says so."""

    error: Exception | None = None
    answer: Any = None
    races_lost = 0

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store, "job")
        self.goes_on = threading.Event()
        self.goes_on.set()

    def get_state(self) -> Any:
        self.goes_on.wait(LONG_S)
        if self.error is not None:
            raise self.error
        return self.answer or super().get_state()

    def set_state(self, state: bytes, token: Any = None) -> Any:
        if self.races_lost:
            self.races_lost -= 1
            return None
        return super().set_state(state, token)


class Cluster:
    """Nodes of one job, each with its own backend on a common store."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.handlers: list[DynamicRendezvousHandler] = []
        self.backends: list[Fickle] = []

    def add(self, least: int, most: int, **more: Any) -> DynamicRendezvousHandler:
        times = {"last_call": timedelta(seconds=0.02), **more.pop("times", {})}
        self.backends.append(Fickle(self.store))
        handler = DynamicRendezvousHandler.from_backend(
            "job",
            self.store,
            self.backends[-1],
            least,
            most,
            "127.0.0.1",
            RendezvousTimeout(**times),
            **{"keep_alive_interval": 0.1, "keep_alive_max_attempt": 100, **more},
        )
        handler.access.unreachable_s = more.pop("unreachable_s", LONG_S)
        self.handlers.append(handler)
        return handler

    def job(self) -> Job:
        """Return the stored job."""
        found = C10dRendezvousBackend(self.store, "job").get_state()
        return decode(found[0]) if found else Job(run_id="job")

    def meet(self, *handlers: DynamicRendezvousHandler) -> list[RendezvousInfo]:
        """Have nodes join at the same time; return their rounds by rank."""

        def join(one: DynamicRendezvousHandler) -> RendezvousInfo:
            info = one.next_rendezvous()
            while info.world_size < len(handlers):  # Other nodes joined after the last call.
                eventually(one.num_nodes_waiting)
                info = one.next_rendezvous()
            return info

        with ThreadPoolExecutor(len(handlers)) as pool:
            infos = list(pool.map(join, handlers))
        return sorted(infos, key=lambda info: info.rank)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for backend in cluster.backends:
        backend.goes_on.set()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.shutdown(), cluster.handlers))


def in_role(handler: DynamicRendezvousHandler, role: NodeRole) -> View:
    connection = handler.enter()
    eventually(lambda: connection.view is not None and connection.view.role is role)
    assert connection.view is not None
    return connection.view


# Polling agents; tests/contract/test_polled_contract.py has the tests of all backends.


def test_failing_store_is_retried_when_all_members_have_arrived(cluster: Cluster) -> None:
    class Failing(MemoryStore):
        failures = 1

        def set(self, key: str, value: str | bytes) -> None:
            if key.endswith(ALL_ARRIVED) and self.failures:
                self.failures -= 1
                raise ConnectionError("it was away for a moment")
            super().set(key, value)

    cluster.store = Failing()
    nodes = [cluster.add(2, 2, times={"join": timedelta(seconds=10)}) for _ in range(2)]
    assert [info.rank for info in cluster.meet(*nodes)] == [0, 1]


def test_close_succeeds_after_a_write_conflict(cluster: Cluster) -> None:
    handler = cluster.add(1, 1, times={"heartbeat": timedelta(seconds=1)})
    cluster.backends[0].races_lost = 1
    handler.set_closed()
    assert cluster.job().phase is JobPhase.CLOSED


def test_reading_a_job_does_not_fix_the_role_or_size_of_the_node(cluster: Cluster) -> None:
    handler = cluster.add(1, 1)
    assert not handler.is_closed()
    handler.enter(local_world_size=4, max_restarts=3)
    assert in_role(handler, NodeRole.MEMBER).world_size == 4


def test_job_can_be_closed_with_different_settings(cluster: Cluster) -> None:
    member, other = cluster.add(1, 1), cluster.add(1, 3)
    member.enter(max_restarts=3)
    in_role(member, NodeRole.MEMBER)
    other.set_closed()
    assert in_role(member, NodeRole.CLOSED).outcome is JobOutcome.STOPPED


def test_shutdown_is_final_and_repeatable(cluster: Cluster) -> None:
    handler = cluster.add(1, 1)
    handler.next_rendezvous()
    assert handler.shutdown()
    assert handler.shutdown()
    handler.set_closed()  # It does nothing after `shutdown`.
    for call in (handler.next_rendezvous, handler.is_closed):
        with pytest.raises(RendezvousClosedError):
            call()


def test_dropped_handler_ends_its_threads(cluster: Cluster) -> None:
    handler = cluster.add(1, 1)
    handler.next_rendezvous()
    connection = handler.enter()
    assert isinstance(connection, BackendMembership)
    driver = connection._driver
    assert driver is not None
    assert connection._thread is not None
    threads = connection._thread._thread, driver._thread
    cluster.handlers.clear()
    del handler, connection, driver
    gc.collect()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


# Backends that fail.


@pytest.mark.parametrize("error", [RendezvousConnectionError("gone"), ZeroDivisionError("gone")])
def test_backend_that_never_responded_fails_at_once(cluster: Cluster, error: Exception) -> None:
    handler = cluster.add(1, 1)
    cluster.backends[0].error = error
    for call in (handler.next_rendezvous, handler.is_closed):
        with pytest.raises(RendezvousConnectionError, match="gone"):
            call()
    assert handler.shutdown() is False


@pytest.mark.parametrize("answer", [b"state", ("state", 1), (b"state",), (b"not ours", 1)])
def test_malformed_answer_is_a_state_error(cluster: Cluster, answer: Any) -> None:
    handler = cluster.add(1, 1)
    cluster.backends[0].answer = answer
    with pytest.raises(RendezvousStateError):
        handler.next_rendezvous()


def test_hanging_backend_times_out(cluster: Cluster) -> None:
    soon = timedelta(seconds=0.05)
    handler = cluster.add(1, 1, times={"join": soon, "close": soon, "heartbeat": soon})
    cluster.backends[0].goes_on.clear()
    for call in (handler.next_rendezvous, handler.is_closed, handler.set_closed):
        with pytest.raises(RendezvousTimeoutError):
            call()
    assert handler.shutdown() is False


def test_temporary_backend_failure_costs_no_restart(cluster: Cluster) -> None:
    handler = cluster.add(1, 1)
    handler.next_rendezvous()
    cluster.backends[0].error = RendezvousConnectionError("away")
    eventually(handler.enter().problem)
    assert handler.num_nodes_waiting() == 0
    cluster.backends[0].error = None
    eventually(lambda: not handler.enter().problem())
    assert handler.num_nodes_waiting() == 0


@pytest.mark.parametrize("hangs", [False, True])
def test_unreachable_backend_is_a_loss_after_the_limit(cluster: Cluster, hangs: bool) -> None:
    handler = cluster.add(1, 1)
    handler.access.unreachable_s = 0.3
    handler.next_rendezvous()
    connection = handler.enter()
    connection.take()
    if hangs:
        cluster.backends[0].goes_on.clear()
    else:
        cluster.backends[0].error = RendezvousConnectionError("away")
    readable, _, _ = select.select([connection.fileno()], [], [], LONG_S)
    assert readable
    (lost,) = connection.take()
    assert isinstance(lost, CoordinatorLost)
    assert lost.unreachable_s >= 0.3
    assert "'c10d'" in handler.describe_loss(lost)


def test_workers_may_run_while_the_backend_hangs(cluster: Cluster) -> None:
    handler = cluster.add(1, 1, keep_alive_max_attempt=5)
    handler.access.unreachable_s = 10 * LONG_S
    in_role(handler, NodeRole.MEMBER)
    deadlines: list[float | None] = []
    handler.enter().watch_stop_deadline(lambda at, _extra_s: deadlines.append(at))
    cluster.backends[0].goes_on.clear()
    later = time.monotonic() + 1.0  # Twice the silence after which a node is lost.
    eventually(lambda: (deadlines[-1] or 0.0) > later)


def test_state_of_another_program_refuses_the_join(cluster: Cluster) -> None:
    cluster.add(1, 1)
    cluster.backends[0].answer = (b"not ours", 1)
    connection = cluster.handlers[0].enter()
    select.select([connection.fileno()], [], [], LONG_S)
    (refused,) = connection.take()
    assert isinstance(refused, JoinRefused)


# Agents that follow views.


def test_failure_and_report_reach_other_nodes_truncated(cluster: Cluster) -> None:
    one, other = cluster.add(2, 2), cluster.add(2, 2)
    one.enter(), other.enter()
    view = in_role(one, NodeRole.MEMBER)
    failure = Failure(node=one.node_id, summary="x" * 10_000, retryable=False)
    one.enter().report(NodePhase.FAILED, view.generation, failure, b"all of it")
    eventually(lambda: in_role(other, NodeRole.CLOSED).final)
    closed = in_role(other, NodeRole.CLOSED)
    assert closed.failure is not None
    assert len(closed.failure.summary) < 10_000
    assert closed.report == b"all of it"


def test_fenced_node_rejoins_and_ignores_old_views(cluster: Cluster) -> None:
    handler = cluster.add(1, 1)
    connection = handler.enter()
    before = in_role(handler, NodeRole.MEMBER)
    cluster.backends[0].goes_on.clear()
    incarnation = connection.rejoin()
    assert (connection.view, connection.take()) == (None, [])
    cluster.backends[0].goes_on.set()
    eventually(lambda: connection.view is not None)
    assert connection.view is not None
    assert connection.view.incarnation == incarnation != before.incarnation


# Settings.


@pytest.mark.parametrize(
    ("run_id", "least", "most", "interval"),
    [("", 1, 1, 1), ("job", 0, 1, 1), ("job", 2, 1, 1), ("job", 1, 1, 0)],
)
def test_impossible_settings_are_refused(run_id: str, least: int, most: int, interval: int) -> None:
    with pytest.raises(UsageError):
        DynamicRendezvousHandler.from_backend(
            run_id, None, Fickle(MemoryStore()), least, most, keep_alive_interval=interval
        )


@pytest.mark.parametrize("pause", [-1.0, float("inf"), float("nan")])
def test_pause_after_a_conflict_must_be_a_time(pause: float) -> None:
    with pytest.raises(ValueError, match="cas_backoff_max_seconds"):
        DynamicRendezvousHandler.from_backend(
            "job", None, Fickle(MemoryStore()), 1, 1, cas_backoff_max_seconds=pause
        )


class Kept(RendezvousBackend):
    """A state in this process, the minimum of a custom backend."""

    name = "mine"

    def __init__(self) -> None:
        self.stored: tuple[bytes, int] | None = None

    def get_state(self) -> tuple[bytes, int] | None:
        return self.stored

    def set_state(self, state: bytes, token: int | None = None) -> tuple[bytes, int, bool]:
        now = self.stored[1] if self.stored else None
        if now != token:
            assert self.stored is not None
            return (*self.stored, False)
        self.stored = state, (now or 0) + 1
        return (*self.stored, True)


def test_handler_on_a_custom_backend_uses_the_local_address() -> None:
    params = RendezvousParameters(
        "mine", "", "job", 1, 1, local_addr="127.0.0.2", join_timeout="50", close_timeout="70",
        cas_backoff_max_seconds="0.5",
    )  # fmt: skip
    handler = create_handler(MemoryStore(), Kept(), params)
    info = handler.next_rendezvous()
    assert info.bootstrap_store_info.master_addr == "127.0.0.2"
    assert (info.rank, info.world_size) == (0, 1)
    assert (handler.get_backend(), handler.get_run_id()) == ("mine", "job")
    assert handler.settings.timeout.join == timedelta(seconds=50)
    assert handler.settings.timeout.close == timedelta(seconds=70)
    assert handler.settings.cas_backoff_max_seconds == 0.5
    handler.set_closed()
    handler.shutdown()


class Silent(Kept):
    """Compares tokens correctly, but does not return the result of a write."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def set_state(self, state: bytes, token: int | None = None) -> None:  # type: ignore[override]
        with self.lock:
            super().set_state(state, token)


class Forgetful(Silent):
    """Stores nothing at all."""

    def get_state(self) -> None:
        return None


def handlers_on(backend: RendezvousBackend, nodes: int) -> list[DynamicRendezvousHandler]:
    params = RendezvousParameters("mine", "", "job", nodes, nodes, local_addr="127.0.0.1")
    store = MemoryStore()
    return [create_handler(store, backend, params) for _ in range(nodes)]


def test_backend_may_return_none_after_a_write() -> None:
    handlers = handlers_on(Silent(), 2)
    with ThreadPoolExecutor(2) as pool:
        infos = [*pool.map(lambda one: one.next_rendezvous(), handlers)]
        assert {(info.rank, info.world_size) for info in infos} == {(0, 2), (1, 2)}
        assert all(pool.map(lambda one: one.shutdown(), handlers))


def test_backend_that_stores_nothing_is_a_state_error() -> None:
    """Two nodes on it would each run alone, so even one node is refused."""
    (handler,) = handlers_on(Forgetful(), 1)
    with pytest.raises(RendezvousStateError, match="'mine'"):
        handler.next_rendezvous()
    handler.shutdown()
