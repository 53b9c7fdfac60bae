"""Probes between the machines of an `--ha` list: the client and the server.

While a machine's member has no data, this server responds on the client port. It answers a probe with the
facts that `core.etcd.cluster` needs, and whether it accepts a proposal. It answers a client of etcd with the
reason for the wait. A probe first requests this server's path. An etcd does not know that path; the probe
then requests etcd's status and the record of its job. An etcd that has not joined its cluster yet accepts
connections but does not respond.

A connection carries one request, and every resource has a limit: without TLS, anyone may connect.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.core.etcd.cluster import Bootstrap, NoData, ProbedState, Serving
from holdfast.etcd import json_gateway
from holdfast.etcd.cluster_list import RECORD, read_record
from holdfast.etcd.optional_h11 import h11
from holdfast.etcd.transport import ConnectionProblem, open_connection

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import AsyncIterator, Callable

    from holdfast.etcd.transport import HttpConnection, HttpReply

PATH = "/holdfast/probe"
PROBE_BYTES_MAX = 64 * 1024
PROBES_MAX = 64
PROBE_S = 5.0
TIMEOUT_S = 1.0
OK, UNAVAILABLE = 200, 503
GRPC_UNAVAILABLE = 14
BUSY = "too many probes at once"


class Probe(msgspec.Struct, frozen=True):
    """The request of one machine to another one."""

    run_id: str
    machines: tuple[str, ...]
    bootstrap: Bootstrap | None = None


class ProbeReply(msgspec.Struct, frozen=True):
    """The response of a machine whose member has no data."""

    run_id: str
    machines: tuple[str, ...]
    incarnation: int
    accepted: bool = False


class ProbeResult(NamedTuple):
    """The outcome of a probe."""

    state: ProbedState
    why: str = ""
    """Why the state is unknown, in one line."""
    other: ProbeReply | None = None
    """The reply of a machine that serves another job, or has another list."""
    accepted: bool = False


_probe, _answer = msgspec.json.Decoder(Probe), msgspec.json.Decoder(ProbeReply)
_encode = msgspec.json.encode


class ProbeServer:
    """Responds on a listening socket, from `open` until `close`; belongs to one loop."""

    def __init__(
        self, answer: Callable[[Bootstrap | None], ProbeReply], explain: Callable[[], str]
    ) -> None:
        self._answer, self._explain = answer, explain
        self._server: asyncio.Server | None = None
        self._requests: set[asyncio.Task[None]] = set()

    async def open(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Start responding. The server takes ownership of the socket."""
        handshake_s = PROBE_S if tls is not None else None
        self._server = await asyncio.start_server(
            self._serve, sock=listener, ssl=tls, ssl_handshake_timeout=handshake_s
        )

    async def close(self) -> None:
        """Stop, after responding to requests under way."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        me = asyncio.current_task()
        others = [one for one in self._requests if one is not me]
        if others:
            await asyncio.wait(others, timeout=TIMEOUT_S)
            for one in others:
                one.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            async with asyncio.timeout(PROBE_S):
                busy = len(self._requests) > PROBES_MAX
                path, body = await _receive(reader)
                writer.write(self._refuse(BUSY) if busy else self._reply(path, body))
                await writer.drain()
        except (OSError, TimeoutError, ValueError, h11.ProtocolError, asyncio.IncompleteReadError):
            pass  # The peer does not speak HTTP, or disconnected.
        except asyncio.CancelledError:
            pass  # By `close`. asyncio prints an error about a task of a server that ends cancelled.
        finally:
            self._requests.discard(task)
            writer.close()

    def _reply(self, path: str, body: bytes) -> bytes:
        if path != PATH:
            return self._refuse(self._explain())
        try:
            probe = _probe.decode(body)
        except msgspec.MsgspecError:
            return self._refuse("this is not a probe")
        answer = self._answer(None)
        if (probe.run_id, probe.machines) == (answer.run_id, answer.machines):
            answer = self._answer(probe.bootstrap)
        return _response(OK, _encode(answer))

    def _refuse(self, why: str) -> bytes:
        """Return a response that a client of etcd reads as "this member cannot serve yet"."""
        error = {"error": why, "code": GRPC_UNAVAILABLE, "message": why}
        return _response(UNAVAILABLE, _encode(error))


async def _receive(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=PROBE_BYTES_MAX)
    path, body = "", b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(PROBE_BYTES_MAX))
        elif isinstance(event, h11.Request):
            path = event.target.decode()
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > PROBE_BYTES_MAX:
                raise ValueError("the probe is too large")
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


async def probe_member(
    host: str,
    port: int,
    probe: Probe,
    *,
    tls: ssl.SSLContext | None,
    server_name: str = "",
    limit_s: float = TIMEOUT_S,
) -> ProbeResult:
    """Probe a machine's member within the limit. The probe may contain a proposal."""
    try:
        async with _connected(host, port, tls, server_name, limit_s) as connection:
            return await _probe_over(connection, probe, limit_s)
    except TimeoutError:
        return ProbeResult(None, f"no response within {limit_s:g} s")
    except ConnectionProblem as problem:
        return ProbeResult(None, problem.why)


async def cluster_at(
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None,
    server_name: str = "",
) -> str:
    """Return the cluster that an etcd has joined; empty before that."""
    with contextlib.suppress(TimeoutError, ConnectionProblem):
        async with _connected(host, port, tls, server_name, TIMEOUT_S) as connection:
            reply = await connection.request(
                json_gateway.STATUS, b"{}", limit_s=TIMEOUT_S, wants_leader=False
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
            connection.abort("the probe is done")


async def _probe_over(connection: HttpConnection, probe: Probe, limit_s: float) -> ProbeResult:
    async def request_once(path: str, body: bytes) -> HttpReply:
        return await connection.request(path, body, limit_s=limit_s, wants_leader=False)

    reply = await request_once(PATH, _encode(probe))
    if reply.status == OK:
        return _result_of(probe, reply.body)
    reply = await request_once(json_gateway.STATUS, b"{}")
    status = json_gateway.decode_status(reply.body) if reply.status == OK else None
    if status is None:
        return ProbeResult(None, f"it responded with HTTP {reply.status}")
    # Read the job from this member only: other members may be unreachable.
    reply = await request_once(json_gateway.RANGE, _encode({"key": RECORD, "serializable": True}))
    found = json_gateway.decode_value(reply.body) if reply.status == OK else None
    if found is None:
        return ProbeResult(None, "its cluster has only just started")
    try:
        record = read_record(found)
    except ValueError as problem:
        return ProbeResult(None, str(problem))
    if record.run_id != probe.run_id:
        return ProbeResult(None, "it serves another job", other=ProbeReply(record.run_id, (), 0))
    return ProbeResult(Serving(*status))


def _result_of(probe: Probe, body: bytes) -> ProbeResult:
    try:
        answer = _answer.decode(body)
    except msgspec.MsgspecError:
        return ProbeResult(None, "it is neither etcd nor a machine of an --ha list")
    if (answer.run_id, answer.machines) != (probe.run_id, probe.machines):
        return ProbeResult(None, "it serves another job or list", other=answer)
    return ProbeResult(NoData(answer.incarnation), accepted=answer.accepted)
