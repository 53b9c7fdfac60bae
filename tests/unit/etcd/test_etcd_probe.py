"""The probe server of a machine without data, and the result of a probe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import msgspec
import pytest

import holdfast.etcd.probe
from holdfast.core.etcd.cluster import Bootstrap, NoData, Serving
from holdfast.defaults import PROTOCOL_VERSION
from holdfast.etcd.cluster_list import RECORD, ClusterRecord
from holdfast.etcd.probe import (
    PROBE_BYTES_MAX,
    Probe,
    ProbeReply,
    ProbeResult,
    ProbeServer,
    probe_member,
)
from holdfast.net import listening
from holdfast.net.addresses import Address
from in_loop import in_loop
from real_etcd import running_cluster, running_etcd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MACHINES = ("node0:1", "node1:1")
PROBE = Probe("job", MACHINES)
BOOTSTRAP = Bootstrap("f", 1, (("node0:1", 7),))
LOCAL = "127.0.0.1"


@contextlib.asynccontextmanager
async def probe_server(*, accepts: bool = False) -> AsyncIterator[int]:
    def answer(bootstrap: Bootstrap | None) -> ProbeReply:
        return ProbeReply("job", MACHINES, 7, accepts and bootstrap is not None)

    server = ProbeServer(answer, lambda: "it waits for node1")
    listener = listening.listen([Address(socket.AF_INET, (LOCAL, 0))])
    port = listener.getsockname()[1]
    await server.open(listener, None)
    try:
        yield port
    finally:
        await server.close()


def seen(port: int, probe: Probe = PROBE, limit_s: float = 10) -> ProbeResult:
    return asyncio.run(probe_member(LOCAL, port, probe, tls=None, limit_s=limit_s))


def probed(probe: Probe, *, accepts: bool = False) -> ProbeResult:
    async def visit() -> ProbeResult:
        async with probe_server(accepts=accepts) as port:
            return await probe_member(LOCAL, port, probe, tls=None, limit_s=10)

    return asyncio.run(visit())


def test_probe_of_a_machine_without_data_returns_its_incarnation() -> None:
    assert probed(PROBE) == ProbeResult(NoData(7))


@pytest.mark.parametrize("accepts", [True, False])
def test_proposal_gets_a_reply(accepts: bool) -> None:
    probe = Probe("job", MACHINES, BOOTSTRAP)
    assert probed(probe, accepts=accepts).accepted is accepts


@pytest.mark.parametrize(
    "probe", [Probe("other", MACHINES, BOOTSTRAP), Probe("job", MACHINES[:1], BOOTSTRAP)]
)
def test_machine_of_another_job_or_list_is_ignored_and_its_proposal_refused(
    probe: Probe,
) -> None:
    view = probed(probe, accepts=True)
    assert view.state is None
    assert not view.accepted
    assert view.other is not None
    assert view.other.machines == MACHINES


@pytest.mark.parametrize("run_id", ["job", "other", None])
def test_probe_of_a_member_returns_its_cluster_if_it_belongs_to_the_job(
    tmp_path: Path, run_id: str | None
) -> None:
    with running_etcd(tmp_path) as etcd:
        if run_id is not None:
            etcd.put(RECORD, msgspec.json.encode(ClusterRecord(PROTOCOL_VERSION, run_id, "f", 1)))
        cluster = int(etcd.status()["header"]["cluster_id"])
        view = seen(etcd.port)
    if run_id == "job":
        assert view == ProbeResult(Serving(f"{cluster:x}", has_leader=True))
    else:
        assert view.state is None
        assert (view.other is None) == (run_id is None)


def test_probe_finds_a_member_without_a_leader(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        cluster.members[0].put(
            RECORD, msgspec.json.encode(ClusterRecord(PROTOCOL_VERSION, "job", "f", 1))
        )
        last = cluster.members[2]
        while last.get(RECORD) is None:
            pass
        for one in cluster.members[:2]:
            one.kill()
        while isinstance(state := seen(last.port).state, Serving) and state.has_leader:
            pass
        assert isinstance(state, Serving)


def test_probe_of_an_absent_or_silent_machine_finds_nothing() -> None:
    with socket.create_server((LOCAL, 0)) as silent:  # Like an etcd that is not a member yet.
        assert seen(silent.getsockname()[1], limit_s=0.2).state is None
        port = silent.getsockname()[1]
    assert seen(port).state is None


@in_loop
async def test_probe_server_reports_to_etcd_clients_what_it_waits_for() -> None:
    def ask(port: int) -> dict[str, object]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{LOCAL}:{port}/v3/kv/range", b"{}", timeout=10)
        with refused.value as answer:
            return dict(json.loads(answer.read()))

    async with probe_server() as port:
        reply = await asyncio.to_thread(ask, port)
    assert reply["message"] == "it waits for node1"


@pytest.mark.parametrize(
    "sent",
    [
        b"\0" * 100,
        b"POST /holdfast/probe HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n{{{",
        b"POST /holdfast/probe HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n\r\n"
        + b" " * (PROBE_BYTES_MAX + 1),
    ],
)
@in_loop
async def test_server_survives_invalid_requests(sent: bytes) -> None:
    def probe(port: int) -> None:
        with socket.create_connection((LOCAL, port), 10) as visitor:
            visitor.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                while visitor.recv(4096):
                    pass

    async with probe_server() as port:
        await asyncio.to_thread(probe, port)
        view = await probe_member(LOCAL, port, PROBE, tls=None, limit_s=10)
    assert view.state == NoData(7)


@in_loop
async def test_closing_with_a_silent_client_reports_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holdfast.etcd.probe, "TIMEOUT_S", 0.01)
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: errors.append(about))
    async with probe_server() as port:
        reader, writer = await asyncio.open_connection(LOCAL, port)
        writer.write(b"POST ")  # And no more.
        while not await _is_served(port):
            pass
    assert await reader.read() == b""
    writer.close()
    assert errors == []


async def _is_served(port: int) -> bool:
    """Connect after the earlier connection: once this one is served, that one is, too."""
    return (await probe_member(LOCAL, port, PROBE, tls=None, limit_s=10)).state is not None
