"""The door of a machine whose member of etcd has no data yet, and how others look at a machine.

Until etcd has it, the client port is answered here: to other machines of the list, what
`core.etcd.cluster` wants to know, and whether a proposal is accepted; to etcd's clients, what is waited
for. Whoever looks asks for the door first. An etcd does not know that path, and is then asked for
its status and whose it is; one that has not become a member yet accepts connections and is silent.

One request for each connection, and a limit on everything: without TLS anybody may knock.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple

import h11
import msgspec

from holdfast.core.etcd.cluster import Empty, Founding, Serving, Sighting
from holdfast.etcd import json_gateway
from holdfast.etcd.cluster_list import RECORD, ClusterRecord
from holdfast.etcd.transport import ConnectionProblem, open_connection

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import AsyncIterator, Callable

    from holdfast.etcd.transport import HttpConnection, Reply

PATH = "/holdfast/door"
KNOCK_BYTES_MAX = 64 * 1024
KNOCKS_MAX = 64
KNOCK_S = 5.0
LOOK_S = 1.0
OK, UNAVAILABLE = 200, 503
GRPC_UNAVAILABLE = 14
BUSY = "many knock at once"


class Knock(msgspec.Struct, frozen=True):
    """What a machine says to another that it looks at."""

    run_id: str
    machines: tuple[str, ...]
    founding: Founding | None = None


class Answer(msgspec.Struct, frozen=True):
    """What is answered at the door."""

    run_id: str
    machines: tuple[str, ...]
    incarnation: int
    accepted: bool = False


class View(NamedTuple):
    """What was seen of a machine."""

    sighting: Sighting
    why: str = ""
    """Why nothing was seen, in one line."""
    other: Answer | None = None
    """The answer of a machine that waits for another job, or has another list."""
    accepted: bool = False


_knock, _answer = msgspec.json.Decoder(Knock), msgspec.json.Decoder(Answer)
_encode = msgspec.json.encode


class Door:
    """Answers at a listening socket, from `open` until `close`; belongs to one loop."""

    def __init__(
        self, answer: Callable[[Founding | None], Answer], explain: Callable[[], str]
    ) -> None:
        self._answer, self._explain = answer, explain
        self._server: asyncio.Server | None = None
        self._visits: set[asyncio.Task[None]] = set()

    async def open(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Answer from now on; the socket is this door's to close."""
        handshake_s = KNOCK_S if tls is not None else None
        self._server = await asyncio.start_server(
            self._visit, sock=listener, ssl=tls, ssl_handshake_timeout=handshake_s
        )

    async def close(self) -> None:
        """Answer nobody any more; what is being answered is answered first."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        me = asyncio.current_task()
        others = [one for one in self._visits if one is not me]
        if others:
            await asyncio.wait(others, timeout=LOOK_S)
            for one in others:
                one.cancel()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._visits.add(task)
        try:
            async with asyncio.timeout(KNOCK_S):
                busy = len(self._visits) > KNOCKS_MAX
                path, body = await _receive(reader)
                writer.write(self._refuse(BUSY) if busy else self._reply(path, body))
                await writer.drain()
        except (OSError, TimeoutError, ValueError, h11.ProtocolError, asyncio.IncompleteReadError):
            pass  # Whoever it was does not speak HTTP, or went.
        finally:
            self._visits.discard(task)
            writer.close()

    def _reply(self, path: str, body: bytes) -> bytes:
        if path != PATH:
            return self._refuse(self._explain())
        try:
            knock = _knock.decode(body)
        except msgspec.MsgspecError:
            return self._refuse("this is not a knock at the door")
        answer = self._answer(None)
        if (knock.run_id, knock.machines) == (answer.run_id, answer.machines):
            answer = self._answer(knock.founding)
        return _response(OK, _encode(answer))

    def _refuse(self, why: str) -> bytes:
        """Return what a client of etcd takes for the answer of a member that cannot serve yet."""
        error = {"error": why, "code": GRPC_UNAVAILABLE, "message": why}
        return _response(UNAVAILABLE, _encode(error))


async def _receive(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=KNOCK_BYTES_MAX)
    path, body = "", b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(KNOCK_BYTES_MAX))
        elif isinstance(event, h11.Request):
            path = event.target.decode()
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > KNOCK_BYTES_MAX:
                raise ValueError("more than a knock")
        elif isinstance(event, h11.EndOfMessage):
            return path, body
        else:
            raise ConnectionResetError


def _response(status: int, body: bytes) -> bytes:
    reason = "OK" if status == OK else "Service Unavailable"
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def look_at(
    host: str,
    port: int,
    knock: Knock,
    *,
    tls: ssl.SSLContext | None,
    server_name: str = "",
    limit_s: float = LOOK_S,
) -> View:
    """Return what can be seen of a machine's member within the limit; propose what `knock` has."""
    try:
        async with _connected(host, port, tls, server_name, limit_s) as connection:
            return await _look_through(connection, knock, limit_s)
    except TimeoutError:
        return View(None, f"no answer within {limit_s:g} s")
    except ConnectionProblem as problem:
        return View(None, problem.why)


async def cluster_at(
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None,
    server_name: str = "",
    limit_s: float = LOOK_S,
) -> str:
    """Return the cluster that an etcd has become a member of; nothing if it is not there yet."""
    with contextlib.suppress(TimeoutError, ConnectionProblem):
        async with _connected(host, port, tls, server_name, limit_s) as connection:
            reply = await connection.request(
                json_gateway.STATUS, b"{}", limit_s=limit_s, wants_leader=False
            )
            status = json_gateway.decode_status(reply.body) if reply.status == OK else None
            return status[0] if status is not None else ""
    return ""


@contextlib.asynccontextmanager
async def _connected(
    host: str, port: int, tls: ssl.SSLContext | None, server_name: str, limit_s: float
) -> AsyncIterator[HttpConnection]:
    async with asyncio.timeout(limit_s):
        connection = await open_connection(
            host, port, tls=tls, server_name=server_name, limit_s=limit_s
        )
        try:
            yield connection
        finally:
            connection.abort("it was looked at")


async def _look_through(connection: HttpConnection, knock: Knock, limit_s: float) -> View:
    async def ask(path: str, body: bytes) -> Reply:
        return await connection.request(path, body, limit_s=limit_s, wants_leader=False)

    reply = await ask(PATH, _encode(knock))
    if reply.status == OK:
        return _seen_at_door(knock, reply.body)
    reply = await ask(json_gateway.STATUS, b"{}")
    status = json_gateway.decode_status(reply.body) if reply.status == OK else None
    if status is None:
        return View(None, f"it answered HTTP {reply.status}")
    # Whose it is; as it knows that itself, for others may not be there to be asked.
    reply = await ask(json_gateway.RANGE, _encode({"key": RECORD, "serializable": True}))
    found = json_gateway.decode_value(reply.body) if reply.status == OK else None
    if found is None:
        return View(None, "its cluster has only just begun")
    try:
        record = msgspec.json.decode(found, type=ClusterRecord)
    except msgspec.MsgspecError:
        return View(None, "its cluster is of another version of Holdfast")
    if record.run_id != knock.run_id:
        return View(None, "it is there for another job", other=Answer(record.run_id, (), 0))
    return View(Serving(*status))


def _seen_at_door(knock: Knock, body: bytes) -> View:
    try:
        answer = _answer.decode(body)
    except msgspec.MsgspecError:
        return View(None, "it is neither a machine of a list nor etcd")
    if (answer.run_id, answer.machines) != (knock.run_id, knock.machines):
        return View(None, "it is there for another job or list", other=answer)
    return View(Empty(answer.incarnation), accepted=answer.accepted)
