from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.etcd.keys import MARK
from holdfast.elastic._impl.etcd_rendezvous import (
    EtcdRendezvous,
    EtcdRendezvousHandler,
    create_rdzv_handler,
)
from holdfast.elastic.rendezvous.registry import get_rendezvous_handler
from holdfast.etcd.etcd_settings import EtcdSettings
from holdfast.etcd.sync_client import EtcdClient
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.rendezvous.rendezvous_errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from real_etcd import PATIENCE_S, Etcd, running_etcd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from holdfast.rendezvous.handler import RendezvousHandler, RendezvousInfo
    from holdfast.rendezvous.membership_handler import MembershipHandler

LOCAL = "127.0.0.1"
PREFIX = "/jobs"
# So long that none passes in a test: rounds form because all nodes joined, or on request.
LAST_CALL_S = PATIENCE_S * 10


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdClient]:
    with EtcdClient(EtcdSettings(endpoints=((LOCAL, etcd.port),))) as made:
        yield made


def job(client: EtcdClient, run_id: str, nodes: tuple[int, int] = (2, 2)) -> EtcdRendezvous:
    return EtcdRendezvous(client, PREFIX, run_id, *nodes, PATIENCE_S, LAST_CALL_S)


@contextmanager
def nodes_of(
    client: EtcdClient, run_id: str, count: int, nodes: tuple[int, int] = (2, 2)
) -> Iterator[list[EtcdRendezvousHandler]]:
    made = [EtcdRendezvousHandler(job(client, run_id, nodes), LOCAL) for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.shutdown()


def meet(handlers: Sequence[RendezvousHandler]) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(lambda one: one.next_rendezvous(), handlers))


def await_state(impl: EtcdRendezvous, is_so: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the stored state meets a condition."""
    revision, state = impl.get_rdzv_state()
    while not is_so(state):
        before = revision
        revision, state = impl.try_wait_for_state_change(revision + 1, PATIENCE_S)
        assert revision > before, f"no change after {state}"


def leave_third(
    impl: EtcdRendezvous,
    first: EtcdRendezvousHandler,
    second: EtcdRendezvousHandler,
    third: EtcdRendezvousHandler,
) -> None:
    """Form a round of three nodes, then one of two, after the stored state shows that the third left.

    Before that, a node that rejoins may be in one more round with the third node: the leader processes
    its own messages first.
    """
    meet([first, second, third])
    third.shutdown()
    await_state(impl, lambda state: state["participants"] == [0, 1])
    meet([first, second])


def test_rendezvous_implementation_works_without_its_handler(client: EtcdClient) -> None:
    impls = [job(client, "alone") for _ in range(2)]
    try:
        with ThreadPoolExecutor(2) as pool:
            rank_table = list(pool.map(lambda one: one.rendezvous_barrier(), impls))
        versions, ranks, sizes = zip(*rank_table, strict=True)
        assert (sorted(ranks), set(sizes), len(set(versions))) == ([0, 1], {2}, 1)
        version = versions[0]
        state = impls[0].get_rdzv_state()[1]
        assert state == {
            "status": "final",
            "version": version,
            "participants": [0, 1],
            "num_workers_waiting": 0,
        }
        impls[0].setup_kv_store(version).set("key", "value")
        assert impls[1].setup_kv_store(version).get("key") == b"value"
        # The next start is another version, with an empty store.
        with ThreadPoolExecutor(2) as pool:
            again = list(pool.map(lambda one: one.rendezvous_barrier()[0], impls))
        assert again[0] == again[1] != version
        assert not impls[0].setup_kv_store(again[0]).check(["key"])
    finally:
        for one in impls:
            assert one.node is not None
            assert one.node.shutdown()


def test_waiting_node_is_counted_until_it_leaves(client: EtcdClient) -> None:
    with nodes_of(client, "waits", 4, (2, 3)) as (first, second, third, fourth):
        impl = job(client, "waits", (2, 3))
        leave_third(impl, first, second, third)
        assert [one.num_nodes_waiting() for one in (first, second)] == [0, 0]
        fourth.enter()
        await_state(impl, lambda state: state["num_workers_waiting"] == 1)
        assert [one.num_nodes_waiting() for one in (first, second)] == [1, 1]
        fourth.shutdown()
        await_state(impl, lambda state: state["num_workers_waiting"] == 0)
        assert [one.num_nodes_waiting() for one in (first, second)] == [0, 0]


def test_missing_job_can_be_closed(client: EtcdClient) -> None:
    with nodes_of(client, "closed", 2) as (first, second):
        impl = job(client, "closed")
        assert impl.get_rdzv_state() == (0, {"status": "setup"})
        assert not first.is_closed()
        first.set_closed()
        assert impl.get_rdzv_state()[1]["status"] == "closed"
        assert first.is_closed()
        assert second.is_closed()
        assert second.num_nodes_waiting() == 0
        with pytest.raises(RendezvousClosedError, match="'closed' is over"):
            second.next_rendezvous()


def test_extra_data_of_one_node_reaches_the_others(client: EtcdClient) -> None:
    one, other = job(client, "data"), job(client, "data")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(one.load_extra_data, "1.0.0", "late")
        other.store_extra_data("1.0.0", "early", {"a": [1, None]})
        other.store_extra_data("1.0.0", "late", "value")
        assert waits.result(PATIENCE_S) == "value"
    assert one.load_extra_data("1.0.0", "early", timeout=PATIENCE_S) == {"a": [1, None]}
    with pytest.raises(RendezvousTimeoutError, match=r"'early' of version 1\.0\.1"):
        one.load_extra_data("1.0.1", "early", timeout=0.01)
    one.close()
    other.close()


def test_stored_keys_expire(etcd: Etcd, client: EtcdClient) -> None:
    """Every key that a job leaves in etcd has a lease."""
    before = set(etcd.leases())
    impl = job(client, "leaves", (1, 1))
    version, _, _ = impl.rendezvous_barrier()
    impl.store_extra_data(version, "key", "value")
    for key in etcd.keys(impl.get_path("").encode()):
        found = client.get(key)
        assert found is None or found.lease in set(etcd.leases()) - before
    impl.set_closed()
    assert impl.node is not None
    impl.node.shutdown()
    left = etcd.keys(impl.get_path("").encode())
    assert left == [impl.get_path("/job").encode()]
    found = client.get(left[0])
    assert found is not None
    assert found.lease in set(etcd.leases()) - before


@pytest.mark.parametrize(
    ("value", "why"),
    [(MARK + b"?", "does not begin with the mark"), (b"hf9=", "another version of Holdfast")],
)
def test_foreign_value_is_not_a_state(client: EtcdClient, value: bytes, why: str) -> None:
    impl = job(client, "foreign")
    client.put(impl.get_path("job").encode(), value)
    with pytest.raises(RendezvousStateError, match=rf"/jobs/foreign/job.*{why}"):
        impl.get_rdzv_state()


def test_unreachable_etcd_reports_no_waiting_nodes(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd:
        settings = EtcdSettings(endpoints=((LOCAL, etcd.port),), call_s=0.2)
        with EtcdClient(settings) as client, nodes_of(client, "away", 1, (1, 1)) as (node,):
            node.next_rendezvous()
            etcd.kill()
            assert node.num_nodes_waiting() == 0
            assert not node.is_closed()
            with pytest.raises(RendezvousConnectionError, match=etcd.endpoint):
                job(client, "away").get_rdzv_state()


@pytest.mark.parametrize("create", [create_rdzv_handler, get_rendezvous_handler])
def test_handlers_created_from_parameters_form_a_round(
    etcd: Etcd, create: Callable[[RendezvousParameters], MembershipHandler]
) -> None:
    more = {"etcd_prefix": "/mine", "settle": 5, "timeout": 30}
    params = RendezvousParameters("etcd", etcd.endpoint, create.__name__, 2, 2, LOCAL, **more)
    made = [create(params) for _ in range(2)]
    try:
        assert {one.get_backend() for one in made} == {"etcd"}
        assert [one.join_timeout_s for one in made] == [30, 30]
        assert sorted(info.rank for info in meet(made)) == [0, 1]
        assert [one.num_nodes_waiting() for one in made] == [0, 0]
        assert etcd.get(f"/mine/{create.__name__}/job".encode()) is not None
        made[0].set_closed()
    finally:
        for one in made:
            assert one.shutdown()
