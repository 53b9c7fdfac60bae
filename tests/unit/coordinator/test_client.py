from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from holdfast.coordinator.agent_connection import JoinRefused, SessionDriver
from holdfast.coordinator.connect import CoordinatorConnector
from holdfast.coordinator.server import CoordinatorServer
from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.protocol import (
    REPORT_BYTES_MAX,
    SUMMARY_CHARS_MAX,
    Failure,
    JobSettings,
    NodeInfo,
    NodePhase,
    NodeRole,
    View,
)
from holdfast.core.session import ConnectionState, Session, SessionTimeouts
from holdfast.net.listening import try_bind

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

LIMIT_S = 20.0


class Node:
    """A client, and all that it told."""

    def __init__(
        self,
        dialer: CoordinatorConnector,
        name: str = "a",
        nodes: int = 1,
        **times: float,
    ) -> None:
        self.told: list[View | CoordinatorLost | JoinRefused] = []
        self._news = asyncio.Event()
        self.client = SessionDriver(
            Session(
                asyncio.get_running_loop().time(),
                run_id="job",
                info=NodeInfo(node=name, incarnation=random.getrandbits(63)),
                settings=JobSettings(min_nodes=nodes, max_nodes=nodes, max_restarts=3),
                times=SessionTimeouts(**times),
                draw=random.random,
            ),
            dialer,
            self._take,
        )
        self.client.start()

    def _take(self, news: View | CoordinatorLost | JoinRefused) -> None:
        self.told.append(news)
        self._news.set()

    async def until(self, wanted: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(LIMIT_S):
            while not (self.told and wanted(self.told[-1])):
                self._news.clear()
                await self._news.wait()
        return self.told[-1]


def listening(port: int = 0) -> socket.socket:
    listener = try_bind("127.0.0.1", port, is_host=True)
    assert listener is not None
    return listener


def serve(listener: socket.socket, **options: Any) -> CoordinatorServer:
    return CoordinatorServer(
        listener, silence_s=5.0, grace_s=0.2, warn=lambda text: None, **options
    )


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 (nothing tells of what is waited for)
            await asyncio.sleep(0.001)


def member(news: object) -> bool:
    return isinstance(news, View) and news.role is NodeRole.MEMBER


def test_a_hundred_nodes_in_one_loop_and_no_thread() -> None:
    async def work() -> None:
        listener = listening()
        server = serve(listener)
        dialer = CoordinatorConnector("127.0.0.1", listener.getsockname()[1])
        nodes = [Node(dialer, f"node {number}", 100) for number in range(100)]
        ranks = [(await one.until(member)).rank for one in nodes]
        assert sorted(ranks) == list(range(100))
        nodes[7].client.report(NodePhase.FAILED, 0)
        for one in nodes:
            await one.until(lambda view: view.generation == 1)
        await asyncio.gather(*(one.client.close() for one in nodes))
        await server.stop()

    asyncio.run(work())


def test_a_node_comes_back_when_the_coordinator_does() -> None:
    async def work() -> None:
        listener = listening()
        port = listener.getsockname()[1]
        server = serve(listener)
        node = Node(CoordinatorConnector("127.0.0.1", port))
        first = await node.until(member)
        assert node.client.down_since is None
        await server.stop()
        await soon(lambda: node.client.session.last_problem == "connection refused")
        assert node.client.down_since is not None
        server = serve(listening(port))
        again = await node.until(lambda view: view.term > first.term)
        assert (again.round, again.generation) == (first.round, first.generation)
        await node.client.close()
        await server.stop()

    asyncio.run(work())


def test_a_refusal_is_final_for_a_newcomer_only() -> None:
    """A node that was in touch goes on trying: the wrong one may be there for a moment."""

    async def work() -> None:
        listener = listening()
        port = listener.getsockname()[1]
        server = serve(listener)
        dialer = CoordinatorConnector("127.0.0.1", port)
        node = Node(dialer)
        await node.until(member)
        await server.stop()
        other = serve(listening(port), token=b"another job's")
        newcomer = Node(dialer, "b")
        refused = await newcomer.until(lambda news: isinstance(news, JoinRefused))
        assert "wants a token" in refused.why
        assert newcomer.client.refused
        await soon(lambda: "wants a token" in node.client.session.last_problem)
        await other.stop()
        server = serve(listening(port))
        await node.until(lambda news: member(news) and news.term == 2)
        for one in (node, newcomer):
            await one.client.close()
        await server.stop()

    asyncio.run(work())


def test_a_silent_coordinator_is_dropped_and_given_up() -> None:
    async def work() -> None:
        listener = listening()
        server = serve(listener)
        dialer = CoordinatorConnector("127.0.0.1", listener.getsockname()[1])
        node = Node(dialer, beat_s=0.01, silence_s=0.05, away_s=0.1)
        await node.until(member)
        server.said = lambda peer, message: None  # type: ignore[method-assign]
        server._acceptor.close()
        gave_up = await node.until(lambda news: isinstance(news, CoordinatorLost))
        assert gave_up.away_s >= 0.1
        assert "connection refused" in gave_up.why
        assert server.connections == 0
        await node.client.close()
        await server.stop()

    asyncio.run(work())


def test_who_gives_up_in_the_middle_of_an_attempt_says_what_seems_wrong_with_it() -> None:
    async def work() -> None:
        with listening() as silent:
            dialer = CoordinatorConnector("127.0.0.1", silent.getsockname()[1])
            node = Node(dialer, first_contact_s=0.02)
            dialer.suspicion = "it is mute"
            gave_up = await node.until(lambda news: isinstance(news, CoordinatorLost))
            assert gave_up.why == node.client.last_problem == "it is mute"
            await node.client.close()

    asyncio.run(work())


def test_a_failure_of_any_length_can_be_said() -> None:
    async def work() -> None:
        listener = listening()
        server = serve(listener)
        node = Node(CoordinatorConnector("127.0.0.1", listener.getsockname()[1]))
        await node.until(member)
        failure = Failure(node="a", host="h\n" * 1000, summary="s" * 10_000, retryable=False)
        node.client.report(NodePhase.FAILED, 0, failure, b"r" * (REPORT_BYTES_MAX + 1))
        view = await node.until(lambda view: view.role is NodeRole.CLOSED and view.final)
        assert len(view.failure.summary) == SUMMARY_CHARS_MAX
        assert len(view.report) == REPORT_BYTES_MAX
        assert node.client.is_over
        await node.client.close()
        await server.stop()

    asyncio.run(work())


def test_leaving_is_acknowledged() -> None:
    async def work() -> None:
        listener = listening()
        server = serve(listener)
        node = Node(CoordinatorConnector("127.0.0.1", listener.getsockname()[1]))
        await node.until(member)
        assert await node.client.leave(LIMIT_S)
        assert server.hosting.jobs["job"].job.nodes == {}
        await node.client.close()
        await server.stop()

    asyncio.run(work())


def test_closing_while_connecting_leaves_nothing() -> None:
    async def work() -> None:
        with listening() as silent:
            node = Node(CoordinatorConnector("127.0.0.1", silent.getsockname()[1]))
            await soon(lambda: node.client.session.link is ConnectionState.CONNECTING)
            await node.client.close()
            node.client.report(NodePhase.READY, -1)
            assert node.told == []

    asyncio.run(work())
