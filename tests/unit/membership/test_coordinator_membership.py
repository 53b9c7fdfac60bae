"""An agent's connection to its coordinator, beyond tests/integration/test_coordinator.py."""

from __future__ import annotations

import asyncio
import random
import select
import socket
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from certificates import make_ca, make_certificate
from holdfast import console
from holdfast.coordinator import connect, server
from holdfast.coordinator.connect import CoordinatorConnector
from holdfast.core.job_settings import JobSettings
from holdfast.core.limits import REPORT_BYTES_MAX, SUMMARY_CHARS_MAX
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import Failure, NodeInfo, View
from holdfast.core.session import ConnectionState, Session, SessionTimeouts, StatusChanged
from holdfast.core.supervision import CoordinatorLost, ViewReceived
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.membership import threaded
from holdfast.membership.coordinator import CoordinatorMembership
from holdfast.membership.interface import JoinRefused, MembershipEvent
from holdfast.membership.threaded import LOSSES_MAX, Mailbox, SessionDriver, status_change
from holdfast.net.tls import TlsFiles
from holdfast.wire import messages
from holdfast.wire.messages import Query, StoreCall, StoreResult, Watch
from in_loop import in_loop
from real_coordinators import eventually, fault, member, node, started, until
from serving import LIMIT_S, Served, serving, soon

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# The driver of a session, in the test's loop.


class Node:
    """A driver, and everything that it delivered."""

    def __init__(self, connector: CoordinatorConnector, name: str = "a", **timeouts: Any) -> None:
        self.delivered: list[MembershipEvent] = []
        self.driver = SessionDriver(
            Session(
                asyncio.get_running_loop().time(),
                run_id="job",
                info=NodeInfo(node=name, incarnation=random.getrandbits(63)),
                settings=JobSettings(min_nodes=1, max_nodes=1, max_restarts=3),
                timeouts=SessionTimeouts(**timeouts),
                draw=random.random,
            ),
            connector,
            self.delivered.append,
        )
        self.driver.start()

    async def until(self, wanted: Callable[[Any], bool]) -> Any:
        await soon(lambda: bool(self.delivered) and wanted(self.delivered[-1]))
        return self.delivered[-1]


def is_member(event: object) -> bool:
    return isinstance(event, ViewReceived) and event.view.role is NodeRole.MEMBER


def is_over(event: object) -> bool:
    return (
        isinstance(event, ViewReceived) and event.view.role is NodeRole.CLOSED and event.view.final
    )


@in_loop
async def test_refusal_is_final_only_before_first_contact(port: int) -> None:
    """A node that was connected before keeps retrying, because another program may hold the port for a moment."""
    first = Served(port)
    node = Node(first.connector())
    await node.until(is_member)
    await first.server.stop()
    other = Served(port, token=b"another job's")
    newcomer = Node(first.connector(), "b")
    await newcomer.until(lambda event: isinstance(event, JoinRefused))
    assert newcomer.driver.refused
    await soon(lambda: "token" in node.driver.session.last_problem)
    await other.server.stop()
    again = Served(port)
    await node.until(lambda event: is_member(event) and event.view.term == 2)
    for one in (node, newcomer):
        await one.driver.close()
    await again.server.stop()


@in_loop
async def test_silent_coordinator_is_disconnected_and_lost() -> None:
    async with serving() as served:
        node = Node(served.connector(), heartbeat_s=0.01, silence_s=0.05, unreachable_s=0.1)
        await node.until(is_member)
        served.server.received = lambda peer, message: None  # type: ignore[method-assign]
        served.server._acceptor.close()
        lost = await node.until(lambda event: isinstance(event, CoordinatorLost))
        assert lost.unreachable_s >= 0.1
        await soon(lambda: served.server.connections == 0)
        await node.driver.close()


@in_loop
async def test_loss_while_connecting_names_the_suspicion() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connector = CoordinatorConnector("127.0.0.1", silent.getsockname()[1], run_id="job")
        node = Node(connector, first_contact_s=0.02)
        connector.suspicion = "it is mute"
        lost = await node.until(lambda event: isinstance(event, CoordinatorLost))
        assert lost.why == node.driver.last_problem == "it is mute"
        node.delivered.clear()
        assert node.driver.session.connection is ConnectionState.CONNECTING
        await node.driver.close()
        node.driver.handle(StatusChanged(NodePhase.READY, -1))
        assert node.delivered == []


@in_loop
async def test_request_before_the_loop_runs_reaches_the_node() -> None:
    """The server sends the request for a connection once, as soon as a node has joined."""
    async with serving() as served:
        node = Node(served.connector())
        await node.until(is_member)
        operator = await served.client()
        operator.send(Query(id=1, what=messages.LOGS, run_id="job", node="a"))
        answer: Future[StoreResult] = Future()
        await soon(lambda: bool(served.server._operators._awaiting))
        node.driver.store.begin(StoreCall(id=0, run_id="job", op="num_keys"), answer)
        await asyncio.wrap_future(answer)  # It arrives after the request.
        watches: list[Watch] = []
        node.driver.on_watch(watches.append)
        assert [one.attach for one in watches] == [True]
        node.driver.on_watch(watches.append)
        assert len(watches) == 1  # It was delivered.
        operator.connection.abort()
        await node.driver.close()


@in_loop
async def test_long_failures_are_truncated() -> None:
    async with serving() as served:
        node = Node(served.connector())
        await node.until(is_member)
        failure = Failure(node="a", host="h\n" * 1000, summary="s" * 10_000, retryable=False)
        report = b"r" * (REPORT_BYTES_MAX + 1)
        node.driver.handle(status_change(NodePhase.FAILED, 0, failure, report))
        view = (await node.until(is_over)).view
        assert len(view.failure.summary) == SUMMARY_CHARS_MAX
        assert len(view.report) == REPORT_BYTES_MAX
        assert node.driver.is_over
        await node.driver.close()


@in_loop
async def test_leave_waits_for_the_acknowledgement() -> None:
    async with serving() as served:
        node = Node(served.connector(), heartbeat_s=0.01)
        await node.until(is_member)
        session = node.driver.session
        await soon(lambda: session.acked_seq == session.status.seq)
        received, served.server.received = served.server.received, lambda *_: None  # type: ignore[method-assign]
        assert not await node.driver.leave(0.05)
        served.server.received = received  # type: ignore[method-assign]
        assert await node.driver.leave(LIMIT_S)
        assert served.server.machine.jobs["job"].job.nodes == {}
        await node.driver.close()


@in_loop
async def test_leave_returns_at_the_acknowledgement() -> None:
    async with serving() as served:
        node = Node(served.connector(), heartbeat_s=1.0)
        await node.until(is_member)
        assert await node.driver.leave(LIMIT_S)
        # The next heartbeat would be answered by a view that fences the node.
        assert node.driver.view is not None
        assert node.driver.view.role is NodeRole.MEMBER
        await node.driver.close()


# The mailbox.


def test_mailbox_keeps_the_newest_view_and_the_first_losses() -> None:
    box = Mailbox(1)

    def is_readable() -> bool:
        return bool(select.select([box], [], [], 0)[0])

    def view(revision: int) -> ViewReceived:
        role = NodeRole.WAITING
        return ViewReceived(
            View(run_id="job", node="a", incarnation=1, term=1, revision=revision, role=role)
        )

    box.put(view(1))  # Events that arrive before `open` are kept.
    assert (box.fileno(), box.take()) == (-1, [view(1)])
    box.open()
    assert not is_readable()
    for number in range(100):
        box.put(view(number))
        box.put(CoordinatorLost(str(number)))
    assert is_readable()
    losses = [CoordinatorLost(str(number)) for number in range(LOSSES_MAX)]
    assert box.take() == [view(99), *losses]
    assert not is_readable()
    box.put(view(1))
    box.put(JoinRefused("no"))
    box.begin_incarnation(2)
    box.put(view(2))
    assert box.view is None
    box.close()
    box.close()
    assert box.take() == [JoinRefused("no")]


# The connection with a thread.


def our_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("holdfast")]


def one_node(**options: Any) -> CoordinatorMembership:
    return node(0, "a", nodes=1, is_host=True, **options)


def test_close_ends_the_thread_and_later_calls_are_harmless() -> None:
    one = one_node()
    assert one.problem()
    one.start()
    until(one, member)
    assert our_threads() == ["holdfast-membership"]
    one.take()
    one.close()
    one.close()
    assert our_threads() == []
    assert one.take() == []
    one.report(NodePhase.READY, 0)
    assert not one.leave(1)
    one_node().close()  # A membership that was never started.


def test_failed_start_leaks_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CoordinatorMembership, "_serve", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            one_node().start()
    with pytest.raises(EnvironmentProblem, match="/nowhere"):
        node(1, "a", tls=TlsFiles(ca="/nowhere")).start()
    with pytest.raises(UsageError, match="tls_cert"):
        one_node(tls=TlsFiles(ca=make_ca(tmp_path).cert)).start()
    assert our_threads() == []


def test_error_in_the_thread_is_delivered_and_the_thread_continues() -> None:
    with started(one := one_node()):
        until(one, member)
        assert one._thread is not None
        one._thread.post(lambda: 1 / 0)
        event = fault(one)
        assert isinstance(event, CoordinatorLost)
        assert "ZeroDivisionError" in event.why
        one.report(NodePhase.FAILED, 0)
        until(one, lambda view: view.generation == 1)


def test_view_of_the_previous_incarnation_is_dropped() -> None:
    with started(one := one_node()):
        old = until(one, member)
        new = one.rejoin()
        one._mailbox.put(ViewReceived(old))
        assert one.view is not old
        until(one, lambda view: view.incarnation == new)


def test_stuck_agent_that_hosts_the_coordinator_has_a_stop_deadline() -> None:
    with started(one := one_node(timeouts=SessionTimeouts(heartbeat_s=0.05, silence_s=0.2))):
        until(one, member)
        deadlines: list[float | None] = []
        one.watch_stop_deadline(lambda at, _extra_s: deadlines.append(at))
        assert deadlines == [None]
        one.heartbeat.start()  # From now on the loop must respond, and it does not.
        eventually(lambda: deadlines[-1] is not None)


def test_one_node_runs_the_coordinator(port: int, tmp_path: Path) -> None:
    first, second = (node(port, name, is_host=None, host="localhost") for name in "ab")
    with started(first, second):
        assert (first.hosting, second.hosting) == (True, False)
        assert first.endpoint == second.endpoint == ("localhost", port)
        until(second, member)
    without_certificate = TlsFiles(ca=make_ca(tmp_path).cert)
    for options in ({"is_host": False}, {"is_host": None, "tls": without_certificate}):
        with started(one := node(port, "a", **options)):
            eventually(lambda one=one: "refused" in one.problem())  # type: ignore[misc]
            assert not one.hosting


def test_node_of_a_finished_job_does_not_take_over(port: int) -> None:
    first, second = (node(port, name, is_host=None) for name in "ab")
    with started(first, second):
        for one in (first, second):
            until(one, member)
            one.report(NodePhase.SUCCEEDED, 0)
        for one in (first, second):
            until(one, lambda view: view.final)
        first.close(drain_s=0)
        eventually(lambda: "refused" in second.problem())
        assert not second.hosting


def test_open_coordinator_causes_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr("holdfast.console.warning", warnings.append)
    monkeypatch.setattr(server, "_warned", threading.Event())
    ca = make_ca(tmp_path)
    pair = make_certificate(ca, "head")
    certified = TlsFiles(cert=pair.cert, key=pair.key, ca=ca.cert)
    with (
        started(one_node()),
        started(one_node(host="0.0.0.0", token=b"x")),
        started(one_node(host="0.0.0.0", tls=certified)),
    ):
        assert warnings == []
    for _ in range(2):
        with started(one_node(host="0.0.0.0")):
            (line,) = warnings
    assert "0.0.0.0:" in line


def test_silent_program_at_the_port_is_reported_until_a_coordinator_starts(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped coordinator behaves like this, and also a server that waits for the end of a line."""
    caplog.set_level(console.NOTICE, "holdfast")
    monkeypatch.setattr(connect, "MUTE_S", 0.0)
    monkeypatch.setattr(connect, "HANDSHAKE_S", 3600.0)
    monkeypatch.setattr(threaded, "REMIND_S", 0.01)
    silent = socket.create_server(("127.0.0.1", port))
    with started(one := node(port, "a", nodes=1)):
        eventually(lambda: connect.MUTE in one.problem())
        eventually(lambda: caplog.text.count(f"127.0.0.1:{port}") > 1)
        silent.close()
        with started(node(port, "b", nodes=1, is_host=True, run_id="other")):
            until(one, member)


def test_nodes_of_other_jobs_are_reported_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notices: list[str] = []
    monkeypatch.setattr("holdfast.console.notice", notices.append)
    with started(host := one_node()):
        until(host, member)
    assert notices == []
    with started(host := one_node()):
        until(host, member)  # Before another node of its job can take the only rank.
        others = [node(host.endpoint[1], name, run_id="other") for name in "bc"]
        with started(same := node(host.endpoint[1], "d", nodes=1), *others):
            for one in others:
                until(one, member)
            eventually(lambda: same.view is not None)
            host.close(drain_s=0)
            assert any("2 nodes" in line and host.where in line for line in notices)
