"""Several endpoints: which coordinator a node connects to, which one is replaced, and what a search leaves."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING

import pytest

from certificates import make_ca, make_certificate
from holdfast.coordinator import connect, endpoint_list
from holdfast.coordinator.connect import CoordinatorConnector
from holdfast.coordinator.connections import ConnectFailed
from holdfast.coordinator.endpoint_list import EndpointList
from holdfast.core.limits import TERMS_PER_ENDPOINT
from holdfast.etcd.runner import hold_port
from holdfast.net.tls import TlsFiles
from in_loop import in_loop
from real_coordinators import LOCAL, Coordinator, eventually, member, node, started, until
from serving import Served, serving, soon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from holdfast.membership.coordinator import CoordinatorMembership


@in_loop
async def test_later_place_accepts_only_a_coordinator_that_took_over() -> None:
    """The coordinator of another job may run there with the same token; it must not start this job."""
    async with serving() as first, serving() as another, serving(endpoint_index=2) as third:
        for served, endpoint_index in ((another, 1), (first, 2), (third, 0), (third, 1)):
            with pytest.raises(ConnectFailed) as caught:
                await served.connector(endpoint_index=endpoint_index).connect()
            assert caught.value.reached
            assert not caught.value.permanent
        found = [
            one.connector(endpoint_index=endpoint_index)
            for endpoint_index, one in enumerate((first, another, third))
        ]
        from_the_second = EndpointList(found, floor=lambda: 1)
        (await from_the_second.connect()).abort()
        assert from_the_second.endpoint_index == 2
        from_the_first = EndpointList(found, floor=lambda: 0)
        (await from_the_first.connect()).abort()
        assert from_the_first.endpoint_index == 0
        assert await from_the_first.replaced_at(0, 20) == f"{LOCAL}:{third.port}"
        assert await from_the_first.replaced_at(2, 20) == ""
        assert not [*first.warnings, *another.warnings]  # A probe causes no warning.
        assert len(third.warnings) == 1  # Its list differs from that of the agents.


@in_loop
async def test_search_closes_all_other_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_list, "STAGGER_S", 0.0)
    async with serving() as first, serving(endpoint_index=1) as second:
        found = EndpointList(
            [first.connector(), second.connector(endpoint_index=1)], floor=lambda: 0
        )
        connection = await found.connect()
        await soon(lambda: first.server.connections + second.server.connections == 1)
        connection.abort()
        assert await found.other_coordinator(1) == f"{LOCAL}:{first.port}"
        await soon(lambda: first.server.connections + second.server.connections == 0)


@in_loop
async def test_coordinator_that_takes_over_a_job_serves_only_that_job() -> None:
    async with serving(endpoint_index=1, only_job="job") as served:
        with pytest.raises(ConnectFailed):
            await served.connector("another", endpoint_index=1).connect()
        (await served.client(endpoint_index=1)).connection.abort()


@in_loop
async def test_any_listener_at_the_first_endpoint_blocks_a_takeover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be stopped, or have a different token than the operator."""
    monkeypatch.setattr(connect, "HANDSHAKE_S", 0.2)
    with socket.create_server((LOCAL, 0)) as mute:
        async with serving(token=b"another") as other, serving(endpoint_index=1) as own:
            for port in (other.port, mute.getsockname()[1]):
                first = CoordinatorConnector(LOCAL, port, run_id="job")
                found = EndpointList([first, own.connector(endpoint_index=1)], floor=lambda: 0)
                assert f"{LOCAL}:{port}" in await found.other_coordinator(1)


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    with hold_port() as first, hold_port() as second:
        yield first.getsockname()[1], second.getsockname()[1]


def listed(ports: tuple[int, int], name: str, **options: Any) -> CoordinatorMembership:
    """Return a node that may run the coordinator at the first of two endpoints."""
    return node(ports[0], name, is_host=None, later=[(LOCAL, ports[1])], **options)


def taking_over(ports: tuple[int, int], *flags: str, **environment: str) -> Coordinator:
    endpoints = f"--endpoint={LOCAL}:{ports[0]},{LOCAL}:{ports[1]}"
    return Coordinator("--take-over", endpoints, *flags, **environment)


def by_the_second(ports: tuple[int, int], *nodes: CoordinatorMembership) -> None:
    """Wait until the second coordinator decides for all these nodes."""
    for one in nodes:
        view = until(one, lambda view: member(view) and view.term >= TERMS_PER_ENDPOINT)
        assert one.where == f"{LOCAL}:{ports[1]}"
        assert not one.hosting
        assert view.size == len(nodes)


def test_node_does_not_run_the_coordinator_after_a_takeover(
    ports: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node starts on the machine that was replaced; token and certificates are valid at every endpoint."""
    # On a busy machine the handshake of the first check may take longer than a second.
    monkeypatch.setattr("holdfast.membership.coordinator.FIRST_PROBE_S", 30.0)
    ca = make_ca(tmp_path)
    head = make_certificate(ca, "head")
    secret = "given to all of them"
    tls = TlsFiles(cert=head.cert, key=head.key, ca=ca.cert)
    first, *nodes = (listed(ports, one, tls=tls, token=secret.encode()) for one in "abc")
    files = f"--rdzv-conf=tls_cert={head.cert},tls_key={head.key},tls_ca={ca.cert}"
    with started(first):
        refused = taking_over(ports, files, HOLDFAST_TOKEN=secret)
        assert refused.port == 0  # It never served, because the first coordinator responds.
        _, errors = refused.end(signal.SIGKILL)
        assert f"{LOCAL}:{ports[0]}" in errors
        assert first.hosting
    with taking_over(ports, files, HOLDFAST_TOKEN=secret), started(*nodes):
        assert not any(one.hosting for one in nodes)
        by_the_second(ports, *nodes)


def test_replaced_coordinator_stops(
    ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No coordinator returns to its place, even if the other one is unreachable for a moment."""
    monkeypatch.setattr(endpoint_list, "PROBE_S", 0.05)
    with started(*(nodes := [listed(ports, name) for name in "ab"])):
        for one in nodes:
            until(one, member)
        assert [one.hosting for one in nodes] == [True, False]

        # An operator could not take over here, because the first coordinator responds; this simulates a cut.
        @in_loop
        async def take_over() -> None:
            served = Served(ports[1], endpoint_index=1)
            await soon(lambda: all(one.where == f"{LOCAL}:{ports[1]}" for one in nodes))
            await served.server.stop()

        take_over()
        eventually(lambda: all("refused" in one.problem() for one in nodes))
        with taking_over(ports):
            by_the_second(ports, *nodes)


def test_node_takes_over_only_at_the_first_endpoint(ports: tuple[int, int]) -> None:
    """All endpoints belong to this machine, but no node starts a coordinator at the second one by itself."""
    first, second = listed(ports, "a"), listed(ports, "b")
    with started(first, second):
        for one in (first, second):
            until(one, member)
        first.close(drain_s=0)
        eventually(lambda: second.hosting)
        assert second.where == f"{LOCAL}:{ports[0]}"
