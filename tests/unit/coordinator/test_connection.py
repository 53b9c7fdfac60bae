"""What tests/integration/test_coordinator.py does not show of `NodeConnection`."""

from __future__ import annotations

import select
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from certificates import make_ca
from holdfast import console
from holdfast.coordinator import agent_connection, connect
from holdfast.coordinator import agent_connection as module
from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.protocol import JobSettings, NodePhase, NodeRole, View
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.etcd.process import hold_port
from holdfast.net.tls import TlsFiles
from real_coordinators import eventually, fault, member, node, started, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def port() -> Iterator[int]:
    """A port to coordinate at, that the kernel gives to nobody else meanwhile."""
    with hold_port() as held:
        yield int(held.getsockname()[1])


def ours() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("holdfast")]


def one_node(**options: Any) -> module.CoordinatorConnection:
    return node(0, "a", nodes=1, is_host=True, **options)


def test_the_descriptor_is_readable_while_there_is_news() -> None:
    with started(one := one_node()):
        until(one, member)
        one.take()
        assert select.select([one], [], [], 0)[0] == []
        one.report(NodePhase.FAILED, 0)
        assert select.select([one], [], [], 20)[0] == [one]
        assert select.select([one], [], [], 0)[0] == [one]
        (view,) = one.take()
        assert view is one.view
        assert one.take() == []
        assert select.select([one], [], [], 0)[0] == []


def test_several_views_are_one_the_newest() -> None:
    with started(one := one_node()):
        until(one, member)
        for generation in range(3):
            one.report(NodePhase.FAILED, generation)
            eventually(lambda g=generation: one.view is not None and one.view.generation == g + 1)  # type: ignore[misc]
        (view,) = one.take()
        assert isinstance(view, View)
        assert view.generation == 3


def test_closing_leaves_no_thread() -> None:
    """Nor a descriptor, as is checked after every test."""
    one = one_node()
    one.start()
    until(one, member)
    assert ours() == ["holdfast-coordinator"]
    one.take()  # It may have known the view before it was told of it.
    one.close()
    one.close()
    assert ours() == []
    assert one.take() == []
    one.report(NodePhase.READY, 0)
    assert not one.leave(1)


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, listener: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(module.CoordinatorConnection, "_serve", broken)
    with pytest.raises(ZeroDivisionError):
        one_node().start()
    assert ours() == []


def test_one_that_never_started_can_be_closed() -> None:
    one = one_node()
    assert "not connected" in one.problem()
    one.close()


def test_a_bug_in_the_thread_is_told() -> None:
    with started(one := one_node()):
        until(one, member)
        assert one._thread is not None
        one._thread.post(lambda: 1 / 0)
        news = fault(one)
        assert isinstance(news, CoordinatorLost)
        assert "ZeroDivisionError" in news.why
        one.report(NodePhase.FAILED, 0)
        until(one, lambda view: view.generation == 1)  # And it goes on.


def test_a_view_for_the_incarnation_before_is_not_shown() -> None:
    with started(one := one_node()):
        old = until(one, member)
        new = one.rejoin()
        one._deliver(old)
        assert one.view is not old
        assert until(one, lambda view: view.incarnation == new).role in (
            NodeRole.MEMBER,
            NodeRole.WAITING,
        )


def test_whoever_can_bind_the_endpoint_coordinates(port: int) -> None:
    first, second = (node(port, name, is_host=None, host="localhost") for name in "ab")
    with started(first, second):
        assert (first.hosting, second.hosting) == (True, False)
        assert first.endpoint == second.endpoint == ("localhost", port)
        until(second, member)


def test_who_may_not_coordinate_does_not_take_over(port: int) -> None:
    with started(one := node(port, "a", is_host=False)):
        eventually(lambda: "connection refused" in one.problem())
        assert not one.hosting


def test_with_tls_only_who_has_a_certificate_coordinates(port: int, tmp_path: Path) -> None:
    files = TlsFiles(ca=make_ca(tmp_path).cert)
    with started(one := node(port, "a", is_host=None, tls=files)):
        eventually(lambda: "connection refused" in one.problem())
        assert not one.hosting
    with pytest.raises(UsageError, match="tls_cert and tls_key"):
        node(0, "a", is_host=True, tls=files).start()


def test_a_certificate_that_cannot_be_read_is_told_in_the_calling_thread() -> None:
    with pytest.raises(EnvironmentProblem, match="tls_ca: /nowhere"):
        node(1, "a", tls=TlsFiles(ca="/nowhere")).start()


def test_a_coordinator_for_everybody_without_a_token_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("holdfast.console.warning", said.append)
    monkeypatch.setattr(module, "_warned", threading.Event())
    with started(node(0, "a", is_host=True)):
        assert said == []
    with started(node(0, "a", is_host=True, host="0.0.0.0", token=b"x")):
        assert said == []
    for _ in range(2):
        with started(one := node(0, "a", is_host=True, host="0.0.0.0")):
            (line,) = said
    assert "has no token" in line
    assert "HOLDFAST_TOKEN" in line
    assert "0.0.0.0:" in line
    assert one.where


def test_something_that_takes_connections_and_is_mute_is_told_of_and_found_once_it_speaks(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped coordinator looks like that, and a server that waits for the end of a line."""
    monkeypatch.setattr(connect, "MUTE_S", 0.0)
    monkeypatch.setattr(connect, "HANDSHAKE_S", 3600.0)
    one = node(port, "a", nodes=1)
    with socket.create_server(("127.0.0.1", port), reuse_port=True) as silent, started(one):
        eventually(lambda: "takes the connection but does not answer" in one.problem())
        silent.close()
        with started(node(port, "b", nodes=1, is_host=True, run_id="other")):
            until(one, member)


def test_why_nobody_is_there_is_said_again_and_again(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(console.NOTICE, "holdfast")
    monkeypatch.setattr(agent_connection, "REMIND_S", 0.01)
    with started(node(port, "a")):
        reason = f"no coordinator at 127.0.0.1:{port} for"
        eventually(lambda: caplog.text.count(f"still waiting: {reason}") > 1)
        assert caplog.messages[-1].endswith("connection refused")


def test_nodes_of_other_jobs_that_lose_the_coordinator_are_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("holdfast.console.notice", said.append)
    with started(host := one_node()):
        until(host, member)  # Before another of its job can take the only seat.
        others = [node(host.endpoint[1], name, run_id="other") for name in "bc"]
        with started(same := node(host.endpoint[1], "d", nodes=1), *others):
            for one in others:
                until(one, member)
            eventually(lambda: same.view is not None)
            host.close(drain_s=0)
            (line,) = [one for one in said if "ends with this agent" in one]
            assert line.startswith(f"the coordinator at {host.where} ends with this agent; 2 nodes")
            assert "run `holdfast coordinator`" in line


def test_a_coordinator_that_ends_with_its_only_job_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("holdfast.console.notice", said.append)
    with started(host := one_node()):
        until(host, member)
    assert said == []


def test_a_node_whose_job_is_over_does_not_take_over(port: int) -> None:
    settings = JobSettings(min_nodes=2, max_nodes=2)
    first, second = (node(port, name, is_host=None, settings=settings) for name in "ab")
    with started(first, second):
        for one in (first, second):
            until(one, member)
            one.report(NodePhase.SUCCEEDED, 0)
        for one in (first, second):
            until(one, lambda view: view.final)
        first.close(drain_s=0)
        eventually(lambda: "connection refused" in second.problem())
        assert not second.hosting
