"""The handler as agents use it that are told of everything; see test_dynamic for the others."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.protocol import JobOutcome, NodeRole, View
from holdfast.elastic._impl.c10d_backend import C10dRendezvousBackend
from holdfast.rendezvous.backend import DynamicRendezvousHandler, decode
from holdfast.rendezvous.config import RendezvousTimeout
from holdfast.rendezvous.errors import RendezvousClosedError, RendezvousError
from holdfast.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.core.rounds import Job
    from holdfast.rendezvous.backend import SharedConnection

LONG_S = 30.0


class Cluster:
    """Nodes of one job, each with a backend of its own on a common store."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.handlers: list[DynamicRendezvousHandler] = []

    def add(self, least: int, most: int) -> DynamicRendezvousHandler:
        handler = DynamicRendezvousHandler.from_backend(
            "job",
            self.store,
            C10dRendezvousBackend(self.store, "job"),
            least,
            most,
            "127.0.0.1",
            RendezvousTimeout(last_call=timedelta(seconds=0.02)),
            keep_alive_interval=0.1,
            keep_alive_max_attempt=100,
        )
        self.handlers.append(handler)
        return handler

    def job(self) -> Job:
        """Return the job as it is stored."""
        found = C10dRendezvousBackend(self.store, "job").get_state()
        assert found is not None
        return decode(found[0])


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for handler in cluster.handlers:
        handler.shutdown()


def until(condition: Callable[[], object]) -> None:
    """Wait for what the threads of handlers bring about."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def await_role(connection: SharedConnection, role: NodeRole) -> View:
    until(lambda: connection.view is not None and connection.view.role is role)
    assert connection.view is not None
    return connection.view


def test_agents_that_enter_are_told_of_rounds_with_a_store(cluster: Cluster) -> None:
    one, other = cluster.add(2, 2), cluster.add(2, 2)
    for each in (one, other):
        each.enter(role="trainer", local_world_size=2, max_restarts=3)
    views = {each: await_role(each.enter(), NodeRole.MEMBER) for each in (one, other)}
    assert {view.world_size for view in views.values()} == {4}
    assert {node.info.role for node in cluster.job().nodes.values()} == {"trainer"}
    settings = cluster.job().settings
    assert settings is not None
    assert settings.max_restarts == 3
    infos = [each.info_of(view) for each, view in views.items()]
    assert {(info.rank, info.world_size) for info in infos} == {(0, 2), (1, 2)}
    infos[0].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"
    assert not other.is_closed()
    one.set_closed()
    assert other.is_closed()
    assert await_role(other.enter(), NodeRole.CLOSED).outcome is JobOutcome.STOPPED


def test_a_handler_that_entered_leaves_when_it_is_shut_down(cluster: Cluster) -> None:
    handler = cluster.add(1, 1)
    connection = handler.enter()
    await_role(connection, NodeRole.MEMBER)
    assert handler.enter() is connection
    assert handler.node_id in cluster.job().nodes
    assert handler.shutdown()
    assert cluster.job().nodes == {}
    assert connection.fileno() == -1
    with pytest.raises(RendezvousClosedError):
        handler.enter()


def test_a_handler_is_used_in_one_way_or_the_other(cluster: Cluster) -> None:
    told, asking = cluster.add(1, 2), cluster.add(1, 2)
    told.enter()
    with pytest.raises(RendezvousError, match="is told of its rounds"):
        told.next_rendezvous()
    told.shutdown()
    asking.next_rendezvous()
    with pytest.raises(RendezvousError, match="by next_rendezvous already"):
        asking.enter()


def test_a_handler_that_entered_and_is_forgotten_ends_its_threads(cluster: Cluster) -> None:
    await_role(cluster.add(1, 1).enter(), NodeRole.MEMBER)
    threads = [one for one in threading.enumerate() if one.name.startswith("holdfast-")]
    assert len(threads) == 2
    cluster.handlers.clear()
    gc.collect()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_what_is_said_of_a_place_names_it(cluster: Cluster) -> None:
    handler = cluster.add(2, 2)
    connection = handler.enter()
    await_role(connection, NodeRole.WAITING)
    where = "the rendezvous backend 'c10d'"
    assert handler.endpoint == where
    assert handler.join_timeout_s == 600
    assert handler.describe_timeout(connection) == (
        f"1 of 2 nodes came to {where} within 600 s (join_timeout)"
    )
    assert handler.describe_loss(CoordinatorLost("a reason", 5.0)).startswith(
        f"{where} could not be reached"
    )
