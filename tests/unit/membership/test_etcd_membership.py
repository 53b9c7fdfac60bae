"""A node's connection to a job on etcd: its sessions, its stores, and the summary of the job."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from fake_node import RUN, a_job_of
from holdfast.coordinator.connections import ConnectFailed
from holdfast.core.etcd.calls import Delete, Problem, ProblemKind, Put, Txn
from holdfast.core.etcd.etcd_session import EtcdSession
from holdfast.core.etcd.keys import JobKeys, pack
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import NodeInfo, View
from holdfast.core.session import Session, SessionTimeouts, StatusChanged
from holdfast.core.supervision import CoordinatorLost, ViewReceived
from holdfast.errors import HoldfastError
from holdfast.etcd.etcd_settings import EtcdSettings
from holdfast.etcd.generation_stores import GenerationStores
from holdfast.etcd.job_records import DEFAULT_PREFIX, read_job, read_ports, read_run_ids
from holdfast.etcd.sync_client import EtcdClient
from holdfast.membership.etcd import EtcdConnector, EtcdMembership
from holdfast.membership.interface import JoinRefused, MembershipEvent
from holdfast.membership.threaded import SessionDriver
from holdfast.net.agent_port import AgentPort
from holdfast.rendezvous import job_access
from holdfast.rendezvous.etcd_handler import EtcdAccess, etcd_settings_of
from holdfast.rendezvous.membership_handler import MembershipHandler
from holdfast.rendezvous.node_names import NodeName
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.store import DistStoreError
from in_loop import in_loop
from real_coordinators import eventually
from real_etcd import PATIENCE_S, Etcd
from serving import soon
from simulator.etcd_model import SimEtcd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.core.etcd.calls import Answer, Change, KeyValue, Request

LIMIT_S = 20.0
LEASE_S = 5.0


class EtcdHere:
    """The simulator's etcd in place of a client of a real one."""

    def __init__(self) -> None:
        self.etcd = SimEtcd()
        self.local_address = "127.0.0.1"
        self.calls = 0
        self.refused = b""
        """A put of this key is refused."""
        self.watches_end = False

    async def call(self, request: Request, *, limit_s: float | None = None) -> Answer:
        del limit_s
        self.calls += 1
        if isinstance(request, Txn) and self.refused in {
            one.key for one in request.success if isinstance(one, Put)
        }:
            return Problem(ProblemKind.REFUSED, "the request is too large")
        return self.etcd.perform(asyncio.get_running_loop().time(), request)

    def watch(
        self,
        key: bytes,
        end: bytes,
        start_revision: int,
        on_changes: Callable[[int, tuple[Change, ...]], None],
        on_ended: Callable[[Problem], None],
    ) -> Watch:
        loop = asyncio.get_running_loop()
        if self.watches_end:
            loop.call_soon(on_ended, Problem(ProblemKind.UNREACHABLE, "the watch ended"))

        def sink(revision: int, changes: tuple[Change, ...]) -> None:
            loop.call_soon(on_changes, revision, changes)

        number = self.etcd.subscribe(key, end, start_revision, sink)
        assert isinstance(number, int)
        return Watch(self.etcd, number)

    def describe(self, why: str) -> str:
        return why


class Watch:
    def __init__(self, etcd: SimEtcd, number: int) -> None:
        self._etcd, self._number = etcd, number

    def cancel(self) -> None:
        self._etcd.unsubscribe(self._number)


class Node:
    """A node on that etcd, and what it received."""

    def __init__(self, etcd: EtcdHere, *, silence_s: float = 0.25) -> None:
        info = NodeInfo(node="a", incarnation=1)
        self.session = EtcdSession(run_id=RUN, info=info, prefix="/jobs", lease_s=LEASE_S)
        self.connector = EtcdConnector(etcd, self.session, LEASE_S)  # type: ignore[arg-type]
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self.driver = SessionDriver(
            Session(
                asyncio.get_running_loop().time(),
                run_id=RUN,
                info=info,
                settings=a_job_of(1, 1, max_restarts=3),
                timeouts=SessionTimeouts(
                    heartbeat_s=silence_s / 5, silence_s=silence_s, unreachable_s=2 * silence_s
                ),
                draw=lambda: 0.5,
            ),
            self.connector,
            self.received.put_nowait,
        )

    async def next(self, kind: type[MembershipEvent]) -> Any:
        async with asyncio.timeout(LIMIT_S):
            while not isinstance(received := await self.received.get(), kind):
                pass
        return received

    async def end(self) -> None:
        await self.driver.close()
        await self.connector.close()


@in_loop
async def test_refusal_before_the_first_view_is_final() -> None:
    etcd = EtcdHere()
    node = Node(etcd)
    etcd.etcd.perform(0.0, Txn((), (Put(node.session.keys.job, b"another program's"),)))
    node.driver.start()
    refused = await node.next(JoinRefused)
    assert "/jobs/run/job" in refused.why
    assert node.driver.refused == refused.why
    await node.end()


@in_loop
async def test_leader_that_is_refused_repeatedly_gives_up() -> None:
    etcd = EtcdHere()
    node = Node(etcd)
    node.driver.start()
    while (await node.next(ViewReceived)).view.role is not NodeRole.MEMBER:
        pass
    etcd.refused = node.session.keys.job
    before = etcd.calls
    node.driver.handle(StatusChanged(NodePhase.FAILED, 0))
    assert (await node.next(CoordinatorLost)).why == "the request is too large"
    assert etcd.calls - before < 200, "it would be thousands without a pause"
    await node.end()


@in_loop
async def test_member_outlasts_a_leader_of_another_version() -> None:
    """Such a node cannot lead, because it cannot read the job. Once it has left, the job continues."""
    etcd = EtcdHere()
    node = Node(etcd, silence_s=LIMIT_S)
    node.driver.start()
    while (await node.next(ViewReceived)).view.role is not NodeRole.MEMBER:
        pass
    leader, term = node.session.keys.leader, node.session.leadership.election.term
    etcd.etcd.perform(0.0, Txn((), (Delete(leader),)))
    etcd.etcd.perform(0.0, Txn((), (Put(leader, b"hf9 x 3e9"),)))
    await soon(lambda: "another version of Holdfast" in node.driver.last_problem)
    etcd.etcd.perform(0.0, Txn((), (Delete(leader),)))
    await soon(lambda: node.session.leadership.election.term > term)
    assert not node.driver.refused
    await node.end()


@in_loop
async def test_view_found_when_the_session_opens_is_delivered() -> None:
    etcd = EtcdHere()
    node = Node(etcd)
    view = View(run_id=RUN, node="a", incarnation=1, term=1, revision=1, role=NodeRole.WAITING)
    etcd.etcd.perform(0.0, Txn((), (Put(node.session.keys.view("a", 1), pack(view)),)))
    transport = await node.connector.connect()
    delivered: asyncio.Queue[Any] = asyncio.Queue()
    transport.on_message = delivered.put_nowait
    async with asyncio.timeout(LIMIT_S):
        assert await delivered.get() == view
    transport.abort()
    await node.end()


@in_loop
async def test_session_closed_before_it_is_returned_is_a_failure() -> None:
    etcd = EtcdHere()
    etcd.watches_end = True
    node = Node(etcd)
    with pytest.raises(ConnectFailed, match="the watch ended"):
        await node.connector.connect()
    etcd.watches_end = False
    transport = await node.connector.connect()
    assert transport.problem is None
    transport.abort()
    await node.end()


# On a real etcd.


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdClient]:
    with EtcdClient(EtcdSettings(endpoints=(("127.0.0.1", etcd.port),))) as made:
        yield made


@pytest.fixture
def stores(client: EtcdClient, request: pytest.FixtureRequest) -> Iterator[GenerationStores]:
    made = GenerationStores(client, f"/{request.node.name}/".encode())
    yield made
    made.close()


def lease_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "holdfast-etcd-lease"]


def test_only_stores_of_the_newest_generation_are_kept(stores: GenerationStores) -> None:
    part = stores.store("1/0/0", "part")
    assert part is stores.store("1/0/0", "part")
    part.set("key", "of the part")
    assert not stores.store("1/0/0").check(["key"])
    assert not stores.store("1/0/1", "part").check(["key"])
    del part
    for generation in range(2, 4):
        before = lease_threads()
        stores.store(f"1/0/{generation}").set("key", "value")
        for one in before:
            one.join(PATIENCE_S)
        assert len(lease_threads()) == 1


def test_older_store_stays_open_while_in_use(stores: GenerationStores) -> None:
    older, newest = stores.store("1/0/0"), stores.store("1/0/1")
    older.set("key", "value")
    newest.set("key", "value")
    stores.close()
    assert lease_threads() == []
    for one in (older, newest):
        with pytest.raises(DistStoreError):
            one.set("key", "other")


def test_summary_merges_the_leaders_record_and_node_statuses(
    etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_job(client, "no such job") == (None, "")
    # Two machines with one host name: the leader gives one of the nodes another id.
    names = iter([NodeName("host", "machine 1"), NodeName("host", "machine 2")])
    monkeypatch.setattr(job_access, "reserve_name", lambda *_: next(names))
    first, second = (
        MembershipHandler(EtcdAccess(params, etcd_settings_of(params)))
        for params in [RendezvousParameters("etcd", etcd.endpoint, "job/1", 2, 2)] * 2
    )
    joining = threading.Thread(target=second.next_rendezvous)
    joining.start()
    round_ = first.next_rendezvous()
    joining.join()
    summary, leader = read_job(client, "job/1")
    assert summary is not None
    assert (summary.phase, summary.round, summary.generation) == ("active", 0, 0)
    assert leader == "host"  # The leader's key has the id from before.
    ranks = {one.node: one.rank for one in summary.nodes}
    assert sorted(ranks) == ["host", "host-2"]
    assert sorted(ranks.values()) == [0, 1]
    assert ranks[first.node_id] == round_.rank
    assert read_run_ids(client, running=True) == ["job/1"]
    second.shutdown()
    first.set_closed()
    first.shutdown()
    ended, _ = read_job(client, "job/1")
    assert ended is not None
    assert ended.phase == "closed"
    assert (read_run_ids(client), read_run_ids(client, running=True)) == (["job/1"], [])


def test_job_of_another_version_is_refused_with_a_hint(etcd: Etcd, client: EtcdClient) -> None:
    assert read_ports(client, "newer") == []
    etcd.put(JobKeys(DEFAULT_PREFIX, "newer").leader, b"hf9 x 3e9")
    with pytest.raises(HoldfastError, match="install the same Holdfast on all nodes"):
        read_ports(client, "newer")


def test_agent_port_closes_after_the_keys_of_the_node_are_removed(
    etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other nodes see the port close first, and a node that leaves counts as lost."""
    key = JobKeys("/jobs", "leaves").node("a", 1)
    found: list[KeyValue | None] = []
    close = AgentPort.close

    def note_key(port: AgentPort) -> None:
        found.append(client.get(key))
        close(port)

    monkeypatch.setattr(AgentPort, "close", note_key)
    membership = EtcdMembership(
        EtcdSettings(endpoints=(("127.0.0.1", etcd.port),)),
        prefix="/jobs",
        run_id="leaves",
        info=NodeInfo(node="a", incarnation=1, address="127.0.0.1"),
        settings=a_job_of(1, 1),
        timeouts=SessionTimeouts(),
        lease_s=LEASE_S,
    )
    membership.start()
    eventually(lambda: membership.view is not None)
    assert client.get(key) is not None
    membership.close()
    assert found == [None]
