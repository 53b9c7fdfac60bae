"""TorchElastic's polled interface behaves in the same way with a coordinator, etcd and a backend."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.net.listening import ReservedPort
from holdfast.rendezvous.handler_registry import get_rendezvous_handler
from holdfast.rendezvous.membership_handler import MembershipHandler
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.rendezvous.rendezvous_errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from holdfast.rendezvous.handler import RendezvousInfo

LONG_S = 30.0
CONF = {"last_call_timeout": 0.1, "keep_alive_interval": 0.2, "coordinator_timeout": LONG_S}


class Nodes:
    """Nodes of one job."""

    def __init__(self, backend: str, endpoint: str) -> None:
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = uuid.uuid4().hex
        self.handlers: list[MembershipHandler] = []

    def add(self, least: int, most: int, **more: Any) -> MembershipHandler:
        asked = RendezvousParameters(
            self.backend, self.endpoint, self.run_id, least, most, "127.0.0.1", **{**CONF, **more}
        )
        handler = get_rendezvous_handler(asked)
        assert isinstance(handler, MembershipHandler)
        self.handlers.append(handler)
        return handler

    def meet(self, *handlers: MembershipHandler) -> list[RendezvousInfo]:
        """Have nodes request rounds concurrently until they are in the same one."""

        def join(one: MembershipHandler) -> RendezvousInfo:
            info = one.next_rendezvous()
            while info.world_size < len(handlers):
                until(one.num_nodes_waiting)
                info = one.next_rendezvous()
            return info

        with ThreadPoolExecutor(len(handlers)) as pool:
            return sorted(pool.map(join, handlers), key=lambda info: info.rank)


@pytest.fixture(params=["c10d", "etcd", "file"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path, etcd_port: int) -> Iterator[Nodes]:
    with ReservedPort() as reserved:
        port = reserved.number
    endpoint = {"c10d": f"127.0.0.1:{port}", "etcd": f"127.0.0.1:{etcd_port}", "file": tmp_path}
    nodes = Nodes(request.param, str(endpoint[request.param]))
    yield nodes
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.shutdown(), nodes.handlers))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_next_round_has_a_new_store_and_port(nodes: Nodes) -> None:
    one, other = nodes.add(2, 2), nodes.add(2, 2)
    before = nodes.meet(one, other)
    assert [(info.rank, info.world_size) for info in before] == [(0, 2), (1, 2)]
    before[0].store.set("key", "value")
    assert before[1].store.get("key") == b"value"
    with ThreadPoolExecutor() as pool:
        restarting = pool.submit(one.next_rendezvous)
        until(other.num_nodes_waiting)
        after = [other.next_rendezvous(), restarting.result()]
    assert {info.rank for info in after} == {0, 1}
    assert not after[0].store.check(["key"])
    assert len({info.bootstrap_store_info.master_port for info in [*before, *after]}) == 2
    assert one.num_nodes_waiting() == other.num_nodes_waiting() == 0


def test_handler_reports_joining_and_leaving_nodes(nodes: Nodes) -> None:
    first, late = nodes.add(1, 2), nodes.add(1, 2)
    assert first.next_rendezvous().world_size == 1
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(late.next_rendezvous)
        until(first.num_nodes_waiting)
        assert (first.next_rendezvous().rank, joining.result().rank) == (0, 1)
    assert late.shutdown()
    until(first.num_nodes_waiting)
    assert not first.is_closed()
    assert first.next_rendezvous().world_size == 1


def test_round_waits_for_all_members_unless_it_ends(nodes: Nodes) -> None:
    one, other = nodes.add(1, 2), nodes.add(1, 2)
    nodes.meet(one, other)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(one.next_rendezvous)  # The other node is in the round and busy.
        until(other.num_nodes_waiting)
        with pytest.raises(TimeoutError):  # A sample: a test cannot show that it never returns.
            waiting.result(0.3)
        other.shutdown()
        assert waiting.result(LONG_S).world_size == 1


def test_close_ends_the_job_for_all_nodes(nodes: Nodes) -> None:
    one, other = nodes.add(2, 2), nodes.add(2, 2)
    nodes.meet(one, other)
    one.set_closed()
    until(other.num_nodes_waiting)  # Its workers must stop.
    assert other.is_closed()
    for node in (other, nodes.add(2, 2)):
        with pytest.raises(RendezvousClosedError):
            node.next_rendezvous()


def test_standby_waits_beyond_the_join_timeout_and_exits_with_success(nodes: Nodes) -> None:
    member, spare = nodes.add(1, 1), nodes.add(1, 1, join_timeout=1)
    member.next_rendezvous()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(spare.next_rendezvous)
        until(lambda: spare._was_standby)
        with pytest.raises(TimeoutError):  # Longer than its join_timeout.
            waiting.result(1.2)
        member.set_closed()
        with pytest.raises(RendezvousGracefulExitError):
            waiting.result(LONG_S)


def test_node_leaves_after_the_join_timeout(nodes: Nodes) -> None:
    lonely = nodes.add(2, 3, join_timeout=2)
    with pytest.raises(RendezvousTimeoutError, match="1 of 2"):
        lonely.next_rendezvous()
    one, other = nodes.add(2, 3), nodes.add(2, 3)
    assert nodes.meet(one, other)[0].world_size == 2


def test_node_with_different_settings_is_refused(nodes: Nodes) -> None:
    nodes.add(1, 2).next_rendezvous()
    with pytest.raises(RendezvousConnectionError, match="--nnodes"):
        nodes.add(1, 3).next_rendezvous()


def test_node_rejoins_after_others_continued_without_it(nodes: Nodes) -> None:
    one, fenced = nodes.add(1, 2), nodes.add(1, 2)
    nodes.meet(one, fenced)
    fenced.enter().rejoin()  # As another incarnation, like a fenced node.
    until(one.num_nodes_waiting)
    assert nodes.meet(one, fenced)[0].world_size == 2
