"""One connection to a coordinator or an agent, over which questions are asked and answered.

Whatever goes wrong is a `ControlProblem`, with one line for a person; a refusal has its reason
besides. Any number of questions may be under way at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import msgspec

from holdfast.coordinator.connect import ConnectFailed, CoordinatorConnector
from holdfast.core.protocol import RequestRefusal
from holdfast.errors import HoldfastError
from holdfast.net.endpoints import format_endpoint
from holdfast.printable import one_line, quoted
from holdfast.wire import control
from holdfast.wire.errors import WireError
from holdfast.wire.frames import FrameReader, encode_frame
from holdfast.wire.handshake import READ_ONLY_ALL_PREFIX
from holdfast.wire.limits import STATUS_FRAME_BYTES_MAX
from holdfast.wire.messages import (
    Goodbye,
    Query,
    Reply,
    decode,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from holdfast.coordinator.connect import ClientConnection
    from holdfast.wire.messages import Message

T = TypeVar("T", bound=msgspec.Struct)

CONNECT_S = 5.0
ANSWER_S = 30.0
"""How long a question may take; more than any part of it may where it is answered."""
ALIVE_S = 60.0
"""One who only listens says so often that it is there; connections that are silent for long are closed."""
REPLIES_MAX = 4_096
"""Of one question, that wait to be taken; streams are limited by the room they are given."""
AGENT = "the agent"


class ControlProblem(HoldfastError):
    """A job did not do what a client asked. The subclass tells why."""


class JobUnreachable(ControlProblem):
    """No agent or coordinator of the job responded."""

    exit_code = 69


class JobNotFound(ControlProblem):
    """There is no such job, node or worker, or the job is over."""

    exit_code = 1


class RequestRefused(ControlProblem):
    """The job refuses the request; `refusal` is the value of a `RequestRefusal`."""

    exit_code = 1

    def __init__(self, message: str, refusal: str) -> None:
        super().__init__(message)
        self.refusal = refusal


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a coordinator is, and how to connect to it."""

    host: str
    port: int
    run_id: str = ""
    token: bytes | None = None
    tls: ssl.SSLContext | None = None
    server_name: str | None = None

    def __repr__(self) -> str:
        return f"Endpoint({self.host}:{self.port}, run_id={self.run_id!r})"


class Line:
    """A connection, with the questions that have no answer yet; `send` and `close` are its own."""

    def __init__(self, run_id: str, node: str = "") -> None:
        self.run_id = run_id
        self.node = node
        """The node whose agent is at the other end; empty at a coordinator."""
        self.problem = ""
        """Why it has ended, if it has."""
        self.send: Callable[[Query], None]
        self.close: Callable[[], object]
        self._replies: dict[int, asyncio.Queue[Reply]] = {}
        self._ids = 0

    def use(self, connection: ClientConnection) -> None:
        connection.expect_large(STATUS_FRAME_BYTES_MAX)
        connection.on_message = self.received
        connection.on_closed = self.ended
        self.send, self.close = connection.send_whole, connection.abort

    async def ask(self, what: str, *, body: bytes = b"") -> Reply:
        number, replies = self._begin()
        try:
            self.send(Query(id=number, what=what, run_id=self.run_id, body=body))
            async with asyncio.timeout(ANSWER_S):
                return self._checked(await replies.get())
        except TimeoutError:
            self.ended(f"no answer within {ANSWER_S:g} s")  # It is stopped, or cut off.
            self.close()
            raise JobUnreachable(self.problem) from None
        finally:
            del self._replies[number]

    async def many(self, what: str, *, node: str = "", body: bytes = b"") -> AsyncIterator[Reply]:
        number, replies = self._begin()
        is_over = False
        try:
            self.send(Query(id=number, what=what, run_id=self.run_id, node=node, body=body))
            while not is_over:
                try:
                    async with asyncio.timeout(ALIVE_S):
                        reply = await replies.get()
                except TimeoutError:
                    body = control.pack(control.More(size=0))
                    self.send(Query(id=number, what=control.MORE, run_id=self.run_id, body=body))
                    continue
                is_over = reply.last or bool(reply.refusal)
                if self._checked(reply).body:
                    yield reply
        finally:
            del self._replies[number]
            if not is_over and not self.problem:
                self.send(Query(id=number, what=control.CANCEL, run_id=self.run_id))

    def _begin(self) -> tuple[int, asyncio.Queue[Reply]]:
        if self.problem:
            raise JobUnreachable(self.problem)
        self._ids += 1
        queue: asyncio.Queue[Reply] = asyncio.Queue()
        self._replies[self._ids] = queue
        return self._ids, queue

    def _checked(self, reply: Reply) -> Reply:
        if not reply.refusal:
            return reply
        why = one_line(reply.why) or reply.refusal
        if reply.refusal == RequestRefusal.NO_ANSWER.value:
            raise JobUnreachable(why)
        if reply.refusal == RequestRefusal.NO_SUCH_JOB.value:
            raise JobNotFound(why)
        raise RequestRefused(why, reply.refusal)

    def received(self, message: Message) -> None:
        if isinstance(message, Goodbye):
            self.ended(quoted(message.why) or "the connection was closed")
        elif isinstance(message, Reply):
            queue = self._replies.get(message.id)
            if queue is not None and queue.qsize() < REPLIES_MAX:
                queue.put_nowait(message)
            elif queue is not None:
                self.ended("receive buffer overflow; closing the connection")
                self.close()

    def ended(self, why: str) -> None:
        if self.problem:
            return
        self.problem = why
        lost = RequestRefusal.NO_ANSWER.value
        for number, queue in self._replies.items():
            queue.put_nowait(Reply(id=number, refusal=lost, why=why))


class _AtSocket(asyncio.Protocol):
    """A connection to an agent's socket."""

    def __init__(self, receive: Callable[[Message], None], closed: Callable[[str], None]) -> None:
        self._reader = FrameReader(STATUS_FRAME_BYTES_MAX)
        self._receive, self._closed = receive, closed
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._receive(decode(body))
        except WireError as problem:
            self._closed(f"it sent something else than messages: {problem}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed(str(exc) if exc else "the agent has ended")

    def send(self, message: Query) -> None:
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def open_endpoint(place: Endpoint) -> Line:
    """Return a connection to a coordinator."""
    is_for_all = place.token is not None and place.token.startswith(READ_ONLY_ALL_PREFIX)
    connector = CoordinatorConnector(
        place.host,
        place.port,
        run_id="" if is_for_all else place.run_id,
        token=place.token,
        tls=place.tls,
        server_name=place.server_name,
        own_users_only=place.token is None,
    )
    where = f"the coordinator at {place.host}:{place.port}"
    try:
        connection = await connector.connect()
    except ConnectFailed as problem:
        raise JobUnreachable(f"cannot connect to {where}: {problem.why}") from None
    line = Line(place.run_id)
    line.use(connection)
    return line


async def open_socket(path: str, run_id: str, node: str = "") -> Line:
    """Return a connection to an agent at its own socket."""
    line = Line(run_id, node)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            _, opened = await loop.create_unix_connection(
                lambda: _AtSocket(line.received, line.ended), path
            )
    except (OSError, TimeoutError) as problem:
        why = getattr(problem, "strerror", "") or "no response"
        raise JobUnreachable(f"cannot connect to {path}: {why}") from None
    line.send, line.close = opened.send, opened.close
    return line


async def open_contact(
    contact: control.Contact, run_id: str, found: control.Contacts, tls: ssl.SSLContext | None
) -> Line:
    """Return a connection to an agent at its control port; `tls` is that of `tls_of`."""
    connector = CoordinatorConnector(
        contact.address,
        contact.port,
        run_id=found.run_id,
        tls=tls,
        secret=contact.secret,
        read_only=found.read_only,
        server=AGENT,
    )
    line = Line(run_id, contact.node)
    try:
        line.use(await connector.connect())
    except ConnectFailed as problem:
        raise JobUnreachable(f"cannot connect to {named(contact)}: {problem.why}") from None
    return line


def tls_of(found: control.Contacts) -> ssl.SSLContext | None:
    """Return how connections to agents are encrypted, if they are."""
    if not found.pem:
        return None
    from holdfast.net.tls import mutual_context

    try:
        ca, cert, key = found.pem
        return mutual_context(ca, cert, key, serving=False)
    except (ValueError, OSError) as problem:  # An `SSLError` is both.
        raise JobUnreachable(f"the certificates of the job are not usable: {problem}") from None


def named(contact: control.Contact) -> str:
    """Return an agent as a person is told of it."""
    return f"{AGENT} at {format_endpoint(quoted(contact.address), contact.port)}"


def unpacked(kind: type[T], body: bytes) -> T:
    """Return what is in the body of a reply."""
    try:
        return control.unpack(kind, body)
    except WireError as problem:
        raise JobUnreachable(f"it sent something else than was asked for: {problem}") from None
