"""A node's session at etcd as a link: how it ends, and what that means to the node."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from fake_node import RUN, a_job_of
from holdfast.coordinator.agent_connection import JoinRefused, SessionDriver
from holdfast.coordinator.connect import ConnectFailed
from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.etcd.calls import Problem, ProblemKind, Put, Txn
from holdfast.core.etcd.session import EtcdSession
from holdfast.core.protocol import NodeInfo, NodePhase, NodeRole, View
from holdfast.core.session import Session, SessionTimeouts
from holdfast.etcd.settings import EtcdSettings
from holdfast.rendezvous.etcd import EtcdDialer
from holdfast.testing.sim.etcd import SimEtcd

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.etcd.calls import Answer, Change, Request

LIMIT_S = 20.0
LEASE_S = 5.0
TIMES = SessionTimeouts(beat_s=0.05, silence_s=0.25, away_s=0.5)


class EtcdHere:
    """The simulation's etcd in place of a connection to a real one."""

    def __init__(self) -> None:
        self.etcd = SimEtcd()
        self.settings = EtcdSettings(endpoints=(("127.0.0.1", 2379),))
        self.local_address = "127.0.0.1"
        self.tried: dict[str, str] = {}
        self.calls = 0
        self.too_large = b""
        """What is put here is refused."""
        self.watches_end = False

    async def call(self, request: Request, *, limit_s: float | None = None) -> Answer:
        del limit_s
        self.calls += 1
        if isinstance(request, Txn) and self.too_large in {
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
    ) -> Watching:
        loop = asyncio.get_running_loop()
        if self.watches_end:
            loop.call_soon(on_ended, Problem(ProblemKind.UNREACHABLE, "the watch ended"))

        def saw(revision: int, changes: tuple[Change, ...]) -> None:
            loop.call_soon(on_changes, revision, changes)

        number = self.etcd.subscribe(key, end, start_revision, saw)
        assert isinstance(number, int)
        return Watching(self.etcd, number)


class Watching:
    """A watch that can be ended."""

    def __init__(self, etcd: SimEtcd, number: int) -> None:
        self._etcd = etcd
        self._number = number

    def cancel(self) -> None:
        self._etcd.unsubscribe(self._number)


class Node:
    """A node on that etcd, and all that it was told."""

    def __init__(self, etcd: EtcdHere) -> None:
        info = NodeInfo(node="a", incarnation=1)
        self.session = EtcdSession(run_id=RUN, info=info, prefix="/jobs", lease_s=LEASE_S)
        self.dialer = EtcdDialer(etcd, self.session, LEASE_S)  # type: ignore[arg-type]
        self.told: asyncio.Queue[Any] = asyncio.Queue()
        self.client = SessionDriver(
            Session(
                asyncio.get_running_loop().time(),
                run_id=RUN,
                info=info,
                settings=a_job_of(1, 1, max_restarts=3),
                times=TIMES,
                draw=lambda: 0.5,
            ),
            self.dialer,
            self.told.put_nowait,
        )

    async def next(self, kind: type[View | CoordinatorLost | JoinRefused]) -> Any:
        async with asyncio.timeout(LIMIT_S):
            while not isinstance(told := await self.told.get(), kind):
                pass
        return told

    async def end(self) -> None:
        await self.client.close()
        await self.dialer.close()


def test_who_is_refused_for_good_before_it_was_told_anything_is_turned_away() -> None:
    async def work() -> None:
        etcd = EtcdHere()
        node = Node(etcd)
        etcd.etcd.perform(0.0, Txn((), (Put(node.session.keys.job, b"another program's"),)))
        node.client.start()
        refused = await node.next(JoinRefused)
        assert "/jobs/run/job" in refused.why
        assert node.client.refused == refused.why
        await node.end()

    asyncio.run(work())


def test_a_leader_that_is_refused_again_and_again_gives_up_in_words() -> None:
    async def work() -> None:
        etcd = EtcdHere()
        node = Node(etcd)
        node.client.start()
        while (await node.next(View)).role is not NodeRole.MEMBER:
            pass
        etcd.too_large = node.session.keys.job
        before = etcd.calls
        node.client.report(NodePhase.FAILED, 0)
        gave_up = await node.next(CoordinatorLost)
        assert gave_up.why == "the request is too large"
        assert etcd.calls - before < 200, "it would be thousands without a pause"
        await node.end()

    asyncio.run(work())


def test_a_session_that_ends_before_anybody_could_look_at_it_is_a_problem() -> None:
    async def work() -> None:
        etcd = EtcdHere()
        etcd.watches_end = True
        node = Node(etcd)
        with pytest.raises(ConnectFailed, match="the watch ended"):
            await node.dialer.connect()
        etcd.watches_end = False
        link = await node.dialer.connect()
        assert link.problem is None
        link.abort()
        await node.end()

    asyncio.run(work())
