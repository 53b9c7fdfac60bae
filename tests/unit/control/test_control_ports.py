"""Control ports of agents: which clients they admit, and how a client combines their responses."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.control.discovery import AgentDirectory, open_job
from holdfast.control.job_client import (
    ControlProblem,
    JobNotFound,
    open_contact,
    tls_of,
    unpacked,
)
from holdfast.control.job_logs import follow_logs
from holdfast.control.port_server import HALF_OPEN_MAX, PortServer
from holdfast.core.protocol import ControlPort
from holdfast.core.requests import RequestRefusal
from holdfast.net.agent_port import ON, READ_ONLY, AgentPort, ControlCredentials
from holdfast.net.token_certificates import make_certificate
from holdfast.wire import messages
from holdfast.wire.frames import FrameReader
from holdfast.wire.handshake import ClientHandshake, control_key, read_only_token
from holdfast.wire.messages import (
    EventRecord,
    Goodbye,
    JobSummary,
    Query,
    Reply,
)
from holdfast.wire.wire_errors import HandshakeRefused
from holdfast.wire.wire_limits import HANDSHAKE_FRAME_BYTES_MAX
from in_loop import in_loop
from other_users import STRANGER, as_user, hide_owners

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from holdfast.control.job_client import ControlConnection
    from holdfast.control.node_server import Client
    from holdfast.wire.messages import Message

TOKEN = b"a token of the job's own"
RUN_ID = "job"


class Node:
    """Responds like an agent's thread: with the client's identity, and with events by its own clock."""

    def __init__(self) -> None:
        self.clients: set[Client] = set()
        self.ahead_s = 0.0
        self.happened: list[EventRecord] = []
        self.is_blind = False
        """Whether it cannot read the state of the job, as if etcd were unreachable."""

    def happen(self, text: str, ago_s: float) -> None:
        wall = time.time() + self.ahead_s - ago_s
        self.happened.append(EventRecord(wall=wall, text=text))

    def received(self, asker: Client, message: Message) -> None:
        if isinstance(message, Goodbye):
            return
        assert isinstance(message, Query)
        if message.what == messages.STATUS and self.is_blind:
            asker.send(Reply(id=message.id, refusal=RequestRefusal.NO_ANSWER.value, why="no etcd"))
            return
        if message.what == messages.STATUS:
            body = messages.pack(messages.JobSummaries(jobs=[JobSummary(run_id=RUN_ID)]))
            asker.send(Reply(id=message.id, body=body))
            return
        if message.what == messages.EVENTS:
            now = time.time() + self.ahead_s
            body = messages.pack(messages.Events(events=self.happened, now=now))
            asker.send(Reply(id=message.id, body=body, last=False))
            if messages.unpack(messages.EventsQuery, message.body).follow:
                return
            asker.send(Reply(id=message.id))
            return
        if message.what == messages.LOGS:
            body = messages.pack(messages.LogLines(rank=7, text=b"a line\n"))
            asker.send(Reply(id=message.id, body=body))
            return
        how = "reads" if asker.read_only else "may act"
        here = messages.AgentIdentity(run_id=RUN_ID, state=how)
        asker.send(Reply(id=message.id, body=messages.pack(here)))


class Listed(AgentDirectory):
    """A job with the given agents: the node and port of each."""

    where = "nowhere"

    def __init__(self, *ports: tuple[str, ControlPort | None]) -> None:
        super().__init__(RUN_ID)
        self.ports = [(name, "127.0.0.1", port) for name, port in ports]

    def contacts(self) -> messages.Contacts:
        return access_of(None).contacts(self.ports)

    def summary(self, run_id: str) -> None:
        del run_id


class Port:
    """A control port on loopback, and its clients."""

    def __init__(self, access: ControlCredentials, *, read_only: bool = False) -> None:
        self.own = AgentPort("127.0.0.1", access, control=READ_ONLY if read_only else ON)
        self.node = Node()
        self.server = PortServer(self.node, self.own)  # type: ignore[arg-type]
        self.own.serve(self.server.adopt)
        self.own.open()

    async def asker(self, access: ControlCredentials, **changes: Any) -> ControlConnection:
        """Return a connection of a client that has read this port's record."""
        port = changes.get("port", self.own.control)
        found = access.contacts([("a", "127.0.0.1", port)])
        return await open_contact(found.contacts[0], RUN_ID, found, tls_of(found))

    async def asked_by(self, access: ControlCredentials) -> str:
        connection = await self.asker(access)
        try:
            return unpacked(
                messages.AgentIdentity, (await connection.query(messages.HERE)).body
            ).state
        finally:
            connection.close()


@asynccontextmanager
async def served(access: ControlCredentials, *, read_only: bool = False) -> AsyncIterator[Port]:
    port = Port(access, read_only=read_only)
    try:
        yield port
    finally:
        for asker in [*port.server._server.clients]:
            asker.drop("over")
        port.server.close()
        port.own.close()
        async with asyncio.timeout(10):
            while port.server._clients:  # noqa: ASYNC110 (no event tells of it)
                await asyncio.sleep(0.001)


def access_of(token: bytes | None, run_id: str = RUN_ID) -> ControlCredentials:
    return ControlCredentials(run_id=run_id, token=token)


@in_loop
async def test_a_client_must_prove_the_agents_key_and_the_token_of_the_job() -> None:
    async with served(access_of(TOKEN)) as port, served(access_of(None)) as other:
        assert await port.asked_by(access_of(TOKEN)) == "may act"
        assert await other.asked_by(access_of(None)) == "may act"
        for reader in (read_only_token(TOKEN, RUN_ID), read_only_token(TOKEN, "")):
            assert await port.asked_by(access_of(reader)) == "reads"
        for wrong in (
            access_of(None),
            access_of(TOKEN + b"x"),
            access_of(TOKEN, "another job"),
            access_of(read_only_token(TOKEN, "another job")),
        ):
            with pytest.raises(ControlProblem):
                await port.asker(wrong)
        assert other.own.control is not None
        drawn_by_another = other.own.control.key
        forged = ControlPort(port.own.number, drawn_by_another)
        with pytest.raises(ControlProblem):
            await port.asker(access_of(TOKEN), port=forged)


@in_loop
async def test_a_read_only_port_rejects_requests() -> None:
    async with served(access_of(TOKEN), read_only=True) as port:
        assert await port.asked_by(access_of(TOKEN)) == "reads"


def complete_handshake(port: ControlPort) -> str:
    """Connect with the key of a port's record."""
    handshake = ClientHandshake(
        None, run_id=RUN_ID, key_for=lambda _: control_key(port.key, None, RUN_ID)
    )
    reader = FrameReader(HANDSHAKE_FRAME_BYTES_MAX, tag_bytes=None)
    with socket.create_connection(("127.0.0.1", port.port), 20) as connection:
        connection.sendall(handshake.start())
        while not handshake.done:
            for body in reader.feed(connection.recv(65_536)):
                connection.sendall(handshake.receive(body))
                reader.tag_bytes = handshake.tag_bytes
    return "let in"


@in_loop
async def test_without_a_token_other_users_of_the_host_are_refused_even_with_the_key() -> None:
    async with served(access_of(None)) as port:
        own = port.own.control
        assert own is not None
        results = [
            await asyncio.to_thread(as_user, user, lambda: complete_handshake(own))
            for user in (os.geteuid(), STRANGER)
        ]
        assert results[0] == "let in"
        assert results[1].startswith(HandshakeRefused.__name__)


@in_loop
async def test_without_a_token_an_unreported_user_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hide_owners(monkeypatch)
    async with served(access_of(None)) as port:
        own = port.own.control
        assert own is not None
        with pytest.raises(HandshakeRefused, match="HOLDFAST_TOKEN"):
            await asyncio.to_thread(complete_handshake, own)


@in_loop
async def test_with_certificates_a_client_without_one_learns_nothing() -> None:
    guarded = ControlCredentials(run_id=RUN_ID, token=TOKEN, pem=make_certificate(TOKEN))
    others = ControlCredentials(run_id=RUN_ID, token=TOKEN, pem=make_certificate(TOKEN + b"x"))
    async with served(guarded) as port:
        assert await port.asked_by(guarded) == "may act"
        for wrong in (access_of(TOKEN), others):
            with pytest.raises(ControlProblem):
                await port.asker(wrong)


@in_loop
async def test_a_flood_of_strangers_does_not_lock_out_a_client() -> None:
    async with served(access_of(None)) as port:
        with ExitStack() as strangers:
            for data in (b"", b"\0", b"GET / HTTP/1.0\r\n\r\n"):
                for _ in range(2 * HALF_OPEN_MAX):
                    one = strangers.enter_context(socket.socket())
                    one.settimeout(10)
                    one.connect(("127.0.0.1", port.own.number))
                    one.sendall(data)
                    await asyncio.sleep(0)
            assert await port.asked_by(access_of(None)) == "may act"
            assert len(port.server._acceptor) <= HALF_OPEN_MAX


@in_loop
async def test_events_of_all_nodes_are_in_order_even_if_clocks_differ() -> None:
    async with served(access_of(None)) as a, served(access_of(None)) as b:
        b.node.ahead_s = 3_600.0
        for node, text, ago_s in ((a, "1", 4), (b, "2", 3), (a, "3", 2), (b, "4", 1)):
            node.node.happen(text, ago_s)
        async with await open_job(Listed(("a", a.own.control), ("b", b.own.control))) as client:
            following = client.events(follow=True)
            assert [(await anext(following)).text for _ in range(4)] == ["1", "2", "3", "4"]
            b.node.happen("5", 0)
            latest = await anext(following)  # Earlier events are not repeated.
            assert latest.text == "5"
            assert abs(latest.wall - time.time()) < b.node.ahead_s / 2


@in_loop
async def test_if_an_agent_exits_the_client_uses_another() -> None:
    async with served(access_of(None)) as b, AsyncExitStack() as first:
        a = await first.enter_async_context(served(access_of(None)))
        job = Listed(("a", a.own.control), ("b", b.own.control))
        async with await open_job(job) as client:
            assert (client.node, (await client.status()).run_id) == ("a", RUN_ID)
            await first.aclose()
            assert (await client.status()).run_id == RUN_ID
            assert client.node == "b"
            job.ports.clear()
            for asker in [*b.node.clients]:
                asker.drop("over")
            with pytest.raises(JobNotFound):
                await client.status()


@in_loop
async def test_while_etcd_is_unreachable_an_agent_shows_its_own_logs() -> None:
    shown: list[messages.LogLines] = []
    async with served(access_of(None)) as a:
        a.node.is_blind = True
        async with await open_job(Listed(("a", a.own.control))) as client:
            for node in ("", "a"):
                await follow_logs(client, messages.LogsQuery(), node, shown.append, print)
            with pytest.raises(ControlProblem, match="no etcd"):
                await follow_logs(client, messages.LogsQuery(), "b", shown.append, print)
    assert [one.text for one in shown] == [b"a line\n"] * 2


@in_loop
async def test_following_logs_ends_when_the_output_closes() -> None:
    def broken(_: object) -> None:
        raise BrokenPipeError

    async with served(access_of(None)) as a:
        a.node.is_blind = True
        async with await open_job(Listed(("a", a.own.control))) as client:
            with pytest.raises(BrokenPipeError):
                async with asyncio.timeout(10):
                    await follow_logs(client, messages.LogsQuery(follow=True), "", broken, print)


@in_loop
async def test_the_client_uses_the_first_agent_that_responds_and_names_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = ControlPort(closed.getsockname()[1], b"k" * 16)
    async with served(access_of(None)) as port:
        job = Listed(("leader", refusing), ("a", port.own.control), ("old", None))
        lines: list[str] = []
        async with await open_job(job) as client:
            assert client.node == "a"
            client.agents.on_unreached = lines.append
            port.node.happen("something", 1)
            assert [event.text async for event in client.events()] == ["something"]
            assert sorted(line.partition(":")[0] for line in lines) == ["leader", "old"]
            assert str(refusing.port) in "".join(lines)
            for name in ("leader", "old", "nobody"):
                assert (await client.stacks(name)).problem
    for none in (Listed(), Listed(("leader", refusing)), Listed(("old", None))):
        with pytest.raises(ControlProblem):
            await open_job(none)
