"""The server in this process; tests/integration has the tests that need processes."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

from certificates import make_ca, make_certificate
from holdfast.coordinator import admission, connections, operators, server
from holdfast.coordinator.connections import READ_BYTES, ConnectFailed
from holdfast.core.job_settings import JobSettings
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import Ack, Heartbeat, NodeInfo, Status, View
from holdfast.net import listening
from holdfast.net.addresses import Address
from holdfast.net.tls import TlsFiles
from holdfast.wire import messages
from holdfast.wire.frames import FrameReader, encode_frame
from holdfast.wire.handshake import ClientHandshake, job_token
from holdfast.wire.messages import Goodbye, Query, StoreCall, StoreResult, Welcome, decode
from holdfast.wire.wire_limits import FRAME_BYTES_MAX, HANDSHAKE_FRAME_BYTES_MAX
from in_loop import in_loop
from other_users import hide_owners
from serving import LIMIT_S, Client, Served, flood, jobs_in, serving, soon, status

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.wire.messages import Message

TWO = JobSettings(min_nodes=1, max_nodes=2, settle_s=0.0)


async def two_nodes(served: Served) -> tuple[Client, Client, View]:
    """Return two nodes of one round, and the first's view of it."""
    first, second = await served.client(), await served.client()
    first.send(status("a", settings=TWO))
    await first.next()
    second.send(status("b", settings=TWO))
    return first, second, await first.until(lambda view: view.size == 2)


def beat(node: str, seq: int = 1, **fields: int) -> Heartbeat:
    given = {"term": 0, "revision": 0} | fields
    return Heartbeat(run_id="job", node=node, incarnation=sum(node.encode()), seq=seq, **given)


def succeeded(node: str, seq: int = 2) -> Status:
    return status(node, nodes=2, seq=seq, phase=NodePhase.SUCCEEDED, generation=0)


def write(client: Client, *messages: Message) -> None:
    """Send several messages in one write."""
    transport = client.connection._transport
    assert transport is not None
    transport.write(b"".join(map(encode_frame, messages)))


def sudden_end(client: Client) -> None:
    transport = client.connection._transport
    assert transport is not None
    transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


# Nodes.


@in_loop
async def test_node_receives_its_view_and_acknowledgements() -> None:
    async with serving() as served:
        client = await served.client()
        (peer,) = served.server._peers
        peer.address, peer.is_remote, peer.local_address = "10.0.0.7", True, "10.0.0.1"
        client.send(status("a"))
        view = await client.next()
        assert (view.role, view.master_addr) == (NodeRole.MEMBER, "10.0.0.7")
        # The address at which nodes of other hosts see this one.
        assert served.server.machine.jobs["job"].job.coordinator_address == "10.0.0.1"
        client.send(beat("a", term=1, revision=9))
        assert await client.next() == Ack(run_id="job", node="a", incarnation=97, seq=1)
        assert [run_id for run_id, _ in served.changes] == ["job"]


def failed(view: View) -> Status:
    fields: dict[str, Any] = {
        name: getattr(view, name)
        for name in ("generation", "round", "round_term", "round_key", "term", "rank", "size")
    }
    return status("a", seq=2, settings=TWO, phase=NodePhase.FAILED, **fields)


@in_loop
async def test_failure_shortly_before_a_lost_node_is_blamed_on_that_node() -> None:
    async with serving() as served:
        first, second, view = await two_nodes(served)
        first.send(failed(view))  # The server finds both when it reads again, in this order.
        sudden_end(second)
        view = await first.until(lambda message: isinstance(message, View))
        assert (view.role, view.restarts) == (NodeRole.MEMBER, 0)
        assert "b was lost" in view.why


@pytest.mark.parametrize("end", ["stays", "is gone", "leaves"])
@in_loop
async def test_other_failure_ends_the_job_even_if_its_node_is_lost(end: str) -> None:
    async with serving(grace_s=60.0 if end == "is gone" else 0.0) as served:
        first, second, view = await two_nodes(served)
        first.send(failed(view))
        if end == "is gone":
            sudden_end(first)
        elif end == "leaves":  # As torchrun's agents do; this one may run the coordinator.
            first.send(status("a", seq=3, settings=TWO, phase=NodePhase.LEAVING))
            await first.until(lambda message: getattr(message, "seq", 0) == 3)
            first.connection.close()
            await soon(lambda: served.server.connections == 1)
        call = await second.until(lambda message: getattr(message, "call", 0) > 0)
        assert not await served.server.drain(0.02)
        second.send(
            Heartbeat(
                run_id="job",
                node="b",
                incarnation=call.incarnation,
                seq=1,
                term=view.term,
                revision=view.revision,
                call=call.call,
            )
        )
        await second.until(lambda message: getattr(message, "outcome", None) is not None)


# Jobs.


@in_loop
async def test_store_answers_only_nodes_of_its_job() -> None:
    async with serving() as served:
        client, stranger = await served.client(), await served.client()
        for one in (client, stranger):
            one.send(StoreCall(id=5, run_id="job", op="num_keys"))
            answer = await one.next()
            assert isinstance(answer, StoreResult)
            assert (answer.id, answer.ok) == (5, False)
        client.send(status("a"))
        await client.next()
        stranger.send(status("z", nodes=2))  # It is refused because of other settings.
        assert (await stranger.next()).role is NodeRole.REFUSED
        stranger.send(StoreCall(id=6, run_id="job", op="num_keys"))
        assert not (await stranger.next()).ok
        client.send(StoreCall(id=1, run_id="job", op="get", keys=("k",), timeout_s=0.02))
        assert (await client.next()).timed_out
        client.send(StoreCall(id=2, run_id="job", op="get", keys=("k",), timeout_s=60.0))
        await soon(lambda: served.server._stores.next_deadline() is not None)
        client.connection.abort()
        await soon(lambda: served.server._stores.next_deadline() is None)


@in_loop
async def test_client_can_read_the_state_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        client, other, operator = [await served.client(one) for one in ("job", "other", "")]
        for name, one, run_id in (("a", client, "job"), ("b", other, "other")):
            one.send(status(name, run_id=run_id))
            await one.next()
        operator.send(Query(id=1, what=messages.STATUS))
        job, another = jobs_in(await operator.next())
        assert (job.run_id, another.run_id) == ("job", "other")
        assert (job.nodes[0].node, job.nodes[0].rank, len(job.history)) == ("a", 0, 1)
        operator.send(Query(id=2, what=messages.STATUS, run_id="other"))
        assert [one.run_id for one in jobs_in(await operator.next())] == ["other"]
        client.send(Query(id=3, what=messages.STATUS))
        assert [one.run_id for one in jobs_in(await client.next())] == ["job"]
        monkeypatch.setattr(operators, "STATUS_FRAME_BYTES_MAX", 300)
        client.send(Query(id=3, what=messages.STATUS, run_id="job"))
        (brief,) = jobs_in(await client.next())
        assert (brief.run_id, brief.present, brief.nodes) == ("job", 1, [])
        # Before the reply was read.
        write(client, *[Query(id=4, what=messages.STATUS, run_id="job")] * 2)
        assert isinstance(await client.next(), str)


@in_loop
async def test_unauthenticated_client_sees_only_counts() -> None:
    async with serving() as served:
        client, late, stranger = [await served.client(one) for one in ("job", "job", "")]
        client.send(status("a"))
        await client.next()
        for peer in served.server._peers:
            peer.user = None  # As if from another host.
        client.send(Query(id=1, what=messages.STATUS))  # Allowed, because its node is in the job.
        assert jobs_in(await client.next())[0].nodes
        for one in (late, stranger):
            one.send(Query(id=1, what=messages.STATUS))
            (job,) = jobs_in(await one.next())
            assert (job.run_id, job.present) == ("job", 1)
            assert (job.nodes, job.history) == ([], [])


# Which node a connection belongs to.


@pytest.mark.parametrize(
    "message",
    [
        status("a", run_id="other"),
        status("b"),
        Heartbeat(run_id="job", node="b", incarnation=98, seq=1, term=0, revision=0),
        StoreCall(id=1, run_id="other", op="num_keys"),
        Query(id=1, what=messages.STATUS, run_id="other"),
    ],
)
@in_loop
async def test_connection_belongs_to_one_node_of_one_job(message: Message) -> None:
    async with serving() as served:
        other, client = await served.client("other"), await served.client()
        other.send(status("b", run_id="other"))
        await other.next()
        client.send(status("a"))
        await client.next()
        client.send(message)
        assert isinstance(await client.next(), str)
        assert [*served.server.machine.jobs["other"].job.nodes] == ["b"]
        other.send(Heartbeat(run_id="other", node="b", incarnation=98, seq=1, term=0, revision=0))
        assert isinstance(await other.next(), View | Ack)


@in_loop
async def test_node_may_rejoin_on_its_connection() -> None:
    async with serving() as served:
        client = await served.client()
        for incarnation in (1, 2):
            client.send(status("a", info=NodeInfo(node="a", incarnation=incarnation)))
            view = await client.until(lambda one: one.role is NodeRole.MEMBER)
            assert view.incarnation == incarnation


@in_loop
async def test_job_token_is_valid_for_that_job_only() -> None:
    async with serving(token=b"master") as served:
        own = await served.client(token=job_token(b"master", "job"))
        own.send(status("a"))
        assert isinstance(await own.next(), View)
        for run_id in ("other", ""):  # An operator sends an empty one.
            with pytest.raises(ConnectFailed, match="token"):
                await served.client(run_id, token=job_token(b"master", "job"))
        operator = await served.client("")
        operator.send(Query(id=1, what=messages.STATUS))
        assert jobs_in(await operator.next())[0].nodes


@pytest.mark.parametrize("named", ["job", ""])
@in_loop
async def test_coordinator_with_a_job_token_serves_only_that_job(named: str) -> None:
    async with serving(token=job_token(b"master", "job"), run_id=named) as served:
        for token in (b"master", job_token(b"master", "job")):
            await served.client(token=token)
        for run_id, token in (("other", b"master"), ("", b"master")):
            with pytest.raises(ConnectFailed):
                await served.client(run_id, token=token)
        for run_id in ("other", ""):  # The client has the token, but names another job.
            with pytest.raises(ConnectFailed) as caught:
                await served.client(run_id)
            assert caught.value.permanent


@in_loop
async def test_without_a_token_an_unreported_user_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hide_owners(monkeypatch)
    async with serving(token=None) as served:
        with pytest.raises(ConnectFailed, match="HOLDFAST_TOKEN") as caught:
            await served.client(token=None)
        assert caught.value.permanent


@in_loop
async def test_client_that_connects_to_another_port_is_refused() -> None:
    async with serving(token=b"token") as served:
        connector = served.connector()
        connector.port, real = 1, connector.port
        connect_first = connector._connect_first

        async def forward(found: list[Address]) -> socket.socket:
            return await connect_first([Address(one.family, (one.ip, real)) for one in found])

        connector._connect_first = forward  # type: ignore[method-assign]
        with pytest.raises(ConnectFailed, match="advertised_port=1") as caught:
            await connector.connect()
        assert caught.value.permanent  # The coordinator has authenticated itself.
        served.server._advertised_port = 1
        (await connector.connect()).abort()


@in_loop
async def test_coordinator_address_is_the_one_that_nodes_reached() -> None:
    async with serving() as served:
        first = await served.client()
        first.send(status("a", settings=TWO))
        await first.next()
        job = served.server.machine.jobs["job"].job
        for name, settings, local in (("x", None, "10.0.0.66"), ("b", TWO, "10.0.0.1")):
            before = {*served.server._peers}
            client = await served.client()
            (peer,) = served.server._peers - before
            peer.address, peer.is_remote, peer.local_address = "10.0.0.7", True, local
            client.send(status(name, nodes=9) if settings is None else status(name, settings=TWO))
            view = await client.next()
            if settings is None:  # The node is not accepted.
                assert (view.role, job.coordinator_address) == (NodeRole.REFUSED, "")
        assert job.coordinator_address == "10.0.0.1"
        view = await first.until(lambda view: view.size == 2)
        assert view.master_addr == "10.0.0.1"


@in_loop
async def test_data_of_forgotten_jobs_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.01)
    async with serving() as served:
        served.server.machine._keep_s = 0.0
        client, other = await served.client(), await served.client("other")
        other.send(status("b", run_id="other"))
        client.send(status("a"))
        await soon(lambda: len(served.server._last_change) == 2)
        client.send(status("a", seq=2, phase=NodePhase.LEAVING))
        await soon(lambda: [*served.server._last_change] == ["other"])


# The end.


@in_loop
async def test_drain_waits_only_for_nodes_of_finished_jobs() -> None:
    async with serving() as served:
        ended, running = await served.client(), await served.client("other")
        ended.send(status("a"))
        running.send(status("b", run_id="other"))
        for client in (ended, running):
            await client.next()
        assert await served.server.drain(LIMIT_S)
        ended.send(status("a", seq=2, phase=NodePhase.SUCCEEDED, generation=0))
        assert (await ended.next()).final
        assert not await served.server.drain(0.02)
        draining = asyncio.create_task(served.server.drain(LIMIT_S))
        ended.connection.close()
        assert await draining


@in_loop
async def test_drain_waits_for_a_node_that_does_not_know_the_end() -> None:
    async with serving(grace_s=60.0) as served:
        first, second = await served.client(), await served.client()
        for name, client in (("a", first), ("b", second)):
            client.send(status(name, nodes=2))
        await first.until(lambda view: view.role is NodeRole.MEMBER)
        second.send(succeeded("b"))
        await soon(lambda: second.received.qsize() >= 2)
        second.connection.abort()
        await soon(lambda: served.server.connections == 1)
        first.send(succeeded("a"))
        assert (await first.next()).final
        first.connection.close()
        await soon(lambda: served.server.connections == 0)
        assert not await served.server.drain(0.02)
        again = await served.client()
        again.send(succeeded("b", seq=3), beat("b", seq=3))
        await again.until(lambda message: getattr(message, "final", False))
        assert not await served.server.drain(0.02)  # It knows the outcome, but is still connected.
        again.connection.close()
        assert await served.server.drain(LIMIT_S)


# Limits, and peers that misbehave.


@in_loop
async def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(connections_max=2) as served:
        held = [await served.client() for _ in range(2)]
        with pytest.raises(ConnectFailed, match="2") as caught:
            await served.client()
        assert not caught.value.permanent
        held[0].connection.close()
        await soon(lambda: served.server.connections < 2)
        await served.client()
    monkeypatch.setattr(server, "_descriptors_max", lambda: 4)
    async with serving() as served:
        for _ in range(3):
            await served.client()
        with pytest.raises(ConnectFailed, match="ulimit -n"):
            await served.client()


@in_loop
async def test_one_address_cannot_take_the_last_connections() -> None:
    async with serving(connections_max=8) as served:
        held = [await served.client() for _ in range(6)]
        with pytest.raises(ConnectFailed) as caught:
            await served.client()
        assert not caught.value.permanent
        other = served.connector()

        async def connect(found: list[Address]) -> socket.socket:
            source = ("127.0.0.2", 0)
            return socket.create_connection(found[0].sockaddr, source_address=source)

        other._connect_first = connect  # type: ignore[method-assign]
        held += [Client(await other.connect()) for _ in range(2)]
        for one in held[:3]:
            one.connection.close()
        await soon(lambda: served.server.connections == 5)
        await served.client()


@in_loop
async def test_unread_answers_are_limited_in_total(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, limit = bytes(16_000_000), 40_000_000
    monkeypatch.setattr(server, "UNREAD_REPLIES_BYTES_MAX", limit)
    async with serving() as served:
        slow = [await served.client() for _ in range(8)]
        with monkeypatch.context() as patch:
            patch.setattr(operators, "status_frame", lambda *_, **__: large)
            for one in slow:
                one.stop_reading()
                one.send(Query(id=1, what=messages.STATUS))
            await soon(lambda: served.server.connections < len(slow))
        held = sum(peer.unread_replies_bytes for peer in served.server._peers)
        assert held <= limit + len(large)
        honest = await served.client()
        honest.send(Query(id=1, what=messages.STATUS))
        assert (await honest.next()).id == 1
        for one in slow:
            one.connection.abort()


@in_loop
async def test_many_faults_print_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        for number in range(6):
            if number == 5:
                monkeypatch.setattr(server, "WARNINGS_S", 0.0)
            client = await served.client()
            client.send(Welcome())  # Only a server may send this.
            assert isinstance(await client.next(), str)
        assert len(served.warnings) == 2
        assert "4 more" in served.warnings[1]


@in_loop
async def test_handshakes_and_idle_connections_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.01)
    async with serving(handshake_s=0.2) as served:
        with served.stranger():
            await soon(lambda: bool(served.warnings))
            await soon(lambda: served.server.connections == 0)
        client = await served.client()
        monkeypatch.setattr(server, "IDLE_S", 0.05)
        assert isinstance(await client.next(), str)


@in_loop
async def test_oldest_unfinished_handshake_is_closed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HALF_OPEN_MIN_S", 0.02)
    async with serving(half_open_max=10) as served:
        with ExitStack() as strangers:
            for number in range(30):
                strangers.enter_context(served.stranger(f"127.0.0.{2 + number % 8}"))
            client = await served.client()  # It waits in the queue and is then served.
            client.send(status("a"))
            assert isinstance(await client.next(), View)
            assert served.server.connections <= 11


@pytest.mark.parametrize("addresses", [1, 200])
@in_loop
async def test_flood_from_one_address_or_local_user_does_not_block_others(
    addresses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection keeps its place for up to a second, and there are 8 places. Behind 320 connections an
    honest agent would wait for 40 s, but it times out after 10 s. A local user can use all of 127.0.0.0/8.
    """

    def user_of(connection: socket.socket) -> int:
        return 1000 if connection.getpeername()[0] == "127.0.0.1" else 2002

    monkeypatch.setattr(admission, "user_of", user_of)
    token = b"known to the honest alone"
    async with serving(half_open_max=8, token=token) as served, flood(served, 320, addresses):
        for node in "abc":
            client = await served.client()
            client.send(status(node, nodes=3))
            assert isinstance(await client.next(), View)


@in_loop
async def test_many_agents_behind_one_address_all_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "OVERSIZED_MIN_S", LIMIT_S)
    async with serving(half_open_max=8) as served:
        clients = await asyncio.gather(*(served.client() for _ in range(256)))
        assert all(client.connection.is_open for client in clients)
        assert not served.warnings


@in_loop
async def test_silent_connection_is_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cookies").write_text("1\n")
    monkeypatch.setattr(listening, "COOKIES", tmp_path / "cookies")
    async with serving() as served:
        with socket.create_connection(("127.0.0.1", served.port), LIMIT_S):
            for _ in range(3):
                await served.client()
            assert served.server.connections == 3


@in_loop
async def test_unauthenticated_clients_use_bounded_memory() -> None:
    """They send a hello, which gets a reply, and in the same write the beginning of a long frame."""
    sent = ClientHandshake(None).start() + FRAME_BYTES_MAX.to_bytes(4, "big") + bytes(32 * 1024)
    async with serving(token=b"known to the honest alone") as served:
        with ExitStack() as strangers:
            for _ in range(5):
                stranger = socket.create_connection(("127.0.0.1", served.port), LIMIT_S)
                strangers.enter_context(stranger).sendall(sent)
                stranger.setblocking(False)  # noqa: FBT003 (the name says it)
                with suppress(ConnectionResetError):
                    await asyncio.get_running_loop().sock_recv(stranger, READ_BYTES)
            held = sum(one._framing.reader.buffered_bytes for one in served.server._peers)
            assert held <= 5 * HANDSHAKE_FRAME_BYTES_MAX


@in_loop
async def test_server_recovers_after_running_out_of_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "NO_DESCRIPTOR_S", 0.01)

    class Full:
        """A listening socket without a descriptor for the first two clients."""

        def __init__(self, listener: socket.socket) -> None:
            self.listener = listener
            self.left = 2

        def accept(self) -> Any:
            if self.left:
                self.left -= 1
                raise OSError(24, "Too many open files")
            return self.listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.listener, name)

    async with serving() as served:
        acceptor = served.server._acceptor
        assert acceptor._listener is not None
        monkeypatch.setattr(acceptor, "_listener", Full(acceptor._listener))
        await served.client()
        assert "Too many open files" in served.warnings[0]


@in_loop
async def test_bug_closes_only_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WARNINGS_S", 0.0)
    async with serving() as served:
        with monkeypatch.context() as patch:
            patch.setattr(served.server.machine, "handle", lambda *_: 1 / 0)
            client = await served.client()
            client.send(status("a"))
            assert isinstance(await client.next(), str)
            client.connection.abort()
            await soon(lambda: served.server.connections == 0 or not served.server._by_key)
        assert "ZeroDivisionError" in served.warnings[0]
        other = await served.client()
        other.send(status("a"))
        assert isinstance(await other.next(), View)
        other.send(Goodbye(why="done"))
        assert isinstance(await other.next(), str)
        assert len(served.warnings) == 1  # A goodbye causes no warning.


@in_loop
async def test_one_loop_iteration_sends_one_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as served:
        client = await served.client()
        (peer,) = served.server._peers
        written: list[bytes] = []
        assert peer._transport is not None
        monkeypatch.setattr(peer._transport, "write", written.append)
        write(client, status("a"), StoreCall(id=1, run_id="job", op="num_keys"))
        await soon(lambda: bool(written))
        assert len(written) == 1


@pytest.mark.parametrize("token", [None, b"token"])
@in_loop
async def test_larger_frames_are_allowed_after_the_handshake(token: bytes | None) -> None:
    async with serving(token=token) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        limit = HANDSHAKE_FRAME_BYTES_MAX
        writer.write(limit.to_bytes(4, "big") + b"x" * limit + (limit + 1).to_bytes(4, "big"))
        assert await reader.read() == b""
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        handshake = ClientHandshake(token, run_id="job", port=served.port)
        writer.write(handshake.start())
        (challenge,) = FrameReader().feed(await reader.read(4096))
        proof = handshake.receive(challenge)
        out, back = handshake._seals or (None, None)
        large = encode_frame(status("a", report=b"r" * limit))  # In the same write.
        writer.write(proof + (out.seal(large) if out else large))
        frames = FrameReader(tag_bytes=handshake.tag_bytes or 0)
        bodies: list[bytes] = []
        while len(bodies) < 2:
            bodies += frames.feed(await reader.read(4096))
        bodies = [back.open(body) if back else body for body in bodies]
        assert [type(decode(body)) for body in bodies] == [Welcome, View]
        writer.close()
        await writer.wait_closed()


@in_loop
async def test_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_BYTES_MAX", 1000)
    async with serving() as served:
        client = await served.client()
        (peer,) = served.server._peers
        for number in range(3):  # More than the limit, but the kernel accepts it.
            peer.post(encode_frame(StoreResult(id=number, ok=True, value=b"v" * 600)))
        assert [(await client.next()).id for _ in range(3)] == [0, 1, 2]
        client.stop_reading()
        frames = 0
        while not peer.closed and frames < 100:
            peer.post(b"x" * 1_000_000)
            frames += 1
        assert frames < 100
        assert "127.0.0.1" in served.warnings[0]
        client.connection.abort()


@in_loop
async def test_client_that_does_not_read_the_last_frames_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.01)
    monkeypatch.setattr(connections, "UNREAD_BYTES_MAX", 100_000_000)
    async with serving() as served:
        client = await served.client()
        client.stop_reading()
        (peer,) = served.server._peers
        peer.post(b"x" * 50_000_000)
        peer.close()
        assert not peer.is_open
        monkeypatch.setattr(server, "IDLE_S", 0.05)
        await soon(lambda: served.server.connections == 0)
        client.connection.abort()


@in_loop
async def test_tls_connections_closed_in_the_handshake_are_removed(tmp_path: Path) -> None:
    ca = make_ca(tmp_path)
    head = make_certificate(ca, "head")
    context = TlsFiles(cert=head.cert, key=head.key).for_server()
    async with serving(tls=context) as served:
        gone = served.stranger()
        await soon(lambda: served.server.connections == 1)
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()  # A reset.
        await soon(lambda: served.server.connections == 0)
        assert len(served.warnings) == 1
        trusting = TlsFiles(ca=ca.cert).for_client()
        client = await served.client(tls=trusting, server_name="localhost")
        for number in range(3):
            client.send(Query(id=number, what=messages.STATUS))
            assert (await client.next()).id == number
        with served.stranger():
            await soon(lambda: served.server.connections == 2)
            (silent,) = [one for one in served.server._peers if not one.is_open]
            # From then on asyncio notifies only its own TLS protocol, not the peer.
            await soon(lambda: silent._raw.get_protocol() is not silent)  # type: ignore[union-attr]
            await served.server.stop()
            assert served.server.connections == 0
