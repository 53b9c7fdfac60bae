"""The connection of a told node to a shared state: real threads, and backends that fail and hang.

What a node says and is told is in test_teammate.
"""

from __future__ import annotations

import select
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.coordinator.agent_connection import JoinRefused
from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.protocol import (
    REPORT_BYTES_MAX,
    SUMMARY_CHARS_MAX,
    Failure,
    JobOutcome,
    JobSettings,
    NodeInfo,
    NodePhase,
    NodeRole,
    View,
)
from holdfast.elastic._impl.c10d_backend import C10dRendezvousBackend
from holdfast.rendezvous.backend import RendezvousBackend, SharedConnection, SharedJob, decode
from holdfast.rendezvous.errors import RendezvousConnectionError, RendezvousStateError
from holdfast.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.core.rounds import Job

LONG_S = 30.0
SOON_S = 0.05


class Moody(RendezvousBackend):
    """A backend that answers well, with an error, or not at all."""

    name = "moody"

    def __init__(self, store: MemoryStore) -> None:
        self.inner = C10dRendezvousBackend(store, "job")
        self.error: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self.asked = threading.Semaphore(0)

    def get_state(self) -> Any:
        self.asked.release()
        self.go_on.wait(LONG_S)
        if self.error is not None:
            raise self.error
        return self.inner.get_state()

    def set_state(self, state: bytes, token: Any = None) -> Any:
        return self.inner.set_state(state, token)


class Place:
    """One state, and connections to it; each has a backend of its own."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.backends: dict[str, Moody] = {}
        self.connections: list[SharedConnection] = []

    def backend(self, name: str) -> Moody:
        return self.backends.setdefault(name, Moody(self.store))

    def enter(self, name: str, nodes: int = 1) -> SharedConnection:
        connection = SharedConnection(
            SharedJob(self.backend(name), "job"),
            where="the place",
            run_id="job",
            info=NodeInfo(node=name, incarnation=len(self.connections) + 1, ports=(1, 2)),
            settings=JobSettings(min_nodes=nodes, max_nodes=nodes),
            store=self.store,
            interval_s=SOON_S,
            lost_after_s=LONG_S,
            attempt_s=LONG_S,
            patience_s=LONG_S,
        )
        self.connections.append(connection)
        connection.start()
        connection.report(NodePhase.READY, -1)
        return connection

    def job(self) -> Job:
        found = C10dRendezvousBackend(self.store, "job").get_state()
        assert found is not None
        return decode(found[0])


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    for backend in place.backends.values():
        backend.go_on.set()
    for connection in place.connections:
        connection.close()
        assert connection._attendant.stop(LONG_S)


def news(connection: SharedConnection) -> list[View | CoordinatorLost | JoinRefused]:
    """Wait for the descriptor, as an agent does, and take what there is."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    assert poll.poll(LONG_S * 1000), connection.problem()
    return connection.take()


def told(connection: SharedConnection, enough: Callable[[View], object]) -> View:
    """Wait for a view that is enough."""
    while True:
        for one in news(connection):
            assert isinstance(one, View)
            if enough(one):
                return one


def lose_patience(connection: SharedConnection) -> None:
    """Make it one that gives up soon, which it may not do before the test is ready for it."""
    with connection._changed:
        connection._patience_s, connection._clock.step_s = SOON_S, SOON_S / 10
        connection._changed.notify_all()


def is_member(view: View) -> bool:
    return view.role is NodeRole.MEMBER


def test_nodes_are_told_of_their_round_and_of_its_end(place: Place) -> None:
    one, other = place.enter("a", 2), place.enter("b", 2)
    assert {told(each, is_member).rank for each in (one, other)} == {0, 1}
    for each in (one, other):
        each.report(NodePhase.RUNNING, 0)
        each.report(NodePhase.SUCCEEDED, 0)
    for each in (one, other):
        end = told(each, lambda view: view.final)
        assert end.outcome is JobOutcome.SUCCEEDED
        assert each.view == end


def test_the_descriptor_is_readable_while_there_is_news(place: Place) -> None:
    connection = place.enter("a")
    told(connection, is_member)
    assert connection.take() == []
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    assert poll.poll(0) == []


def test_a_failure_and_its_report_come_to_the_others_within_limits(place: Place) -> None:
    one, other = place.enter("a", 2), place.enter("b", 2)
    for each in (one, other):
        told(each, is_member)
    failure = Failure(node="a", host="\udcff", summary="x" * 2 * SUMMARY_CHARS_MAX)
    one.report(NodePhase.FAILED, 0, failure, b"y" * 2 * REPORT_BYTES_MAX)
    view = told(other, lambda view: view.final)
    assert view.failure is not None
    assert len(view.failure.summary) == SUMMARY_CHARS_MAX
    assert view.report == b"y" * REPORT_BYTES_MAX


def test_a_node_that_leaves_is_heard(place: Place) -> None:
    connection = place.enter("a")
    told(connection, is_member)
    assert connection.leave(LONG_S)
    assert place.job().nodes == {}
    assert connection.leave(LONG_S), "it is out already"


def test_a_node_that_is_fenced_may_come_again(place: Place) -> None:
    connection = place.enter("a")
    first = told(connection, is_member)
    shared = SharedJob(C10dRendezvousBackend(place.store, "job"), "job")

    def lose(job: Job) -> bool:
        from holdfast.core.rounds import NodeLost, Rounds

        Rounds(job).handle(0.0, NodeLost("a", first.incarnation, "nobody saw it"))
        return True

    shared.update(lose, may_go_on=lambda: True, pause=time.sleep)
    assert told(connection, lambda view: view.role is NodeRole.FENCED).why == (
        "a was lost: nobody saw it"
    )
    incarnation = connection.rejoin()
    assert connection.view is None
    again = told(connection, is_member)
    assert (again.incarnation, again.generation) == (incarnation, 1)


def test_what_was_under_way_for_the_incarnation_before_is_not_told(place: Place) -> None:
    connection, backend = place.enter("a"), place.backend("a")
    told(connection, is_member)
    backend.go_on.clear()
    while not connection._attendant.is_looking:
        backend.asked.acquire()
    incarnation = connection.rejoin()
    backend.go_on.set()
    assert told(connection, lambda _: True).incarnation == incarnation


def test_a_backend_that_fails_for_a_while_costs_nothing(place: Place) -> None:
    connection, backend = place.enter("a"), place.backend("a")
    told(connection, is_member)
    assert connection.problem() == ""
    backend.error = RendezvousConnectionError("the cable is out")
    while not connection.problem():
        backend.asked.acquire()
    assert connection.problem().startswith("no contact with the place for ")
    assert connection.problem().endswith(" s: the cable is out")
    backend.error = None
    connection.report(NodePhase.SUCCEEDED, 0)
    assert told(connection, lambda view: view.final).outcome is JobOutcome.SUCCEEDED


def test_a_backend_that_keeps_failing_is_given_up_once(place: Place) -> None:
    connection, backend = place.enter("a"), place.backend("a")
    told(connection, is_member)
    backend.error = RendezvousConnectionError("the cable is out")
    while not connection.problem():
        backend.asked.acquire()
    lose_patience(connection)
    (gave_up,) = news(connection)
    assert isinstance(gave_up, CoordinatorLost)
    assert gave_up.why == "the cable is out"
    assert gave_up.away_s >= SOON_S
    assert not connection.leave(LONG_S)
    assert connection.take() == []


@pytest.mark.parametrize("was_there", [False, True])
def test_a_backend_that_hangs_is_given_up(place: Place, was_there: bool) -> None:
    if not was_there:
        place.backend("a").go_on.clear()
    connection = place.enter("a")
    if was_there:
        told(connection, is_member)
        place.backend("a").go_on.clear()
    lose_patience(connection)
    (gave_up,) = news(connection)
    assert isinstance(gave_up, CoordinatorLost)
    assert gave_up.why == "it does not answer"
    assert not connection.leave(LONG_S)


def test_a_backend_that_hangs_when_a_fenced_node_comes_again_is_given_up(place: Place) -> None:
    connection = place.enter("a")
    told(connection, is_member)
    assert connection.leave(LONG_S)
    place.backend("a").go_on.clear()
    connection.rejoin()
    lose_patience(connection)
    (gave_up,) = news(connection)
    assert isinstance(gave_up, CoordinatorLost)


def test_nobody_is_given_up_who_is_not_asked(place: Place) -> None:
    connection = place.enter("a")
    told(connection, is_member)
    connection.report(NodePhase.SUCCEEDED, 0)
    told(connection, lambda view: view.final)
    assert connection.leave(LONG_S)
    lose_patience(connection)
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    assert poll.poll(2 * SOON_S * 1000) == []


def test_a_state_that_is_none_of_ours_is_a_refusal(place: Place) -> None:
    place.backend("a").inner.set_state(b"something else")
    connection = place.enter("a")
    (refused,) = news(connection)
    assert isinstance(refused, JoinRefused)
    assert "what 'moody' has stored for the job 'job' cannot be read" in refused.why


def test_a_state_that_is_spoilt_later_is_waited_for(place: Place) -> None:
    connection, backend = place.enter("a"), place.backend("a")
    told(connection, is_member)
    backend.error = RendezvousStateError("it is spoilt")
    while not connection.problem():
        backend.asked.acquire()
    assert connection.take() == []
    backend.error = None
    connection.report(NodePhase.SUCCEEDED, 0)
    assert told(connection, lambda view: view.final).outcome is JobOutcome.SUCCEEDED


def test_the_store_of_each_round_is_its_own(place: Place) -> None:
    connection = place.enter("a")
    connection.store("one").set("key", "value")
    assert connection.store("one").get("key") == b"value"
    assert not connection.store("two").check(["key"])


def test_closing_is_final_and_can_be_repeated(place: Place) -> None:
    connection = place.enter("a")
    told(connection, is_member)
    connection.close()
    connection.close()
    assert connection.fileno() == -1
    assert connection.take() == []
    assert not connection.leave(LONG_S)
    assert "a" in place.job().nodes, "it did not leave"
