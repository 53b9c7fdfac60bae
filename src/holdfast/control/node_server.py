"""The thread in which an agent serves control clients, at its own socket and from other hosts.

::

    holdfast logs ── unix socket ──► NodeServer ◄── a connection of its own ── coordinator
                                        │    ▲
                      `ControlPoint.call`│    └───── agent port, in a job without coordinator
                                        ▼
                                   the agent's loop

The server answers queries about this node. It passes queries about the whole job to the coordinator,
over a connection like that of any other client; without a coordinator it answers them from the state
that the nodes share. The first client starts the thread, and the agent's loop never waits for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from holdfast import console
from holdfast.control.history import NodeHistory, NodeState, RunEnd, WorkerState, eta_s
from holdfast.control.log_streams import LogStream
from holdfast.control.series import Recent, Sample, json_loss, series_of_node
from holdfast.coordinator.connections import ConnectFailed
from holdfast.core.limits import DURATION_S_MAX, WHY_CHARS_MAX
from holdfast.core.phases import JobOutcome, NodePhase, NodeRole
from holdfast.core.protocol import Request
from holdfast.core.requests import RequestRefusal
from holdfast.core.rounds import JobPhase
from holdfast.core.supervision import StopReason
from holdfast.net.loop_thread import LoopThread
from holdfast.observe import lifecycle
from holdfast.printable import one_line, quoted
from holdfast.processes.gpus import GpuUtilization
from holdfast.processes.procfs import usage_of
from holdfast.processes.stacks import dump_stacks
from holdfast.processes.workers.pages import Progress, points_of
from holdfast.rendezvous.handler import host_label
from holdfast.wire import messages
from holdfast.wire.frames import FrameReader, encode_frame
from holdfast.wire.messages import (
    Attach,
    EventKind,
    EventRecord,
    Goodbye,
    JobSummary,
    NodeReport,
    NodeSummary,
    Query,
    Reply,
    Watch,
    WorkerReport,
    decode,
)
from holdfast.wire.wire_errors import BadMessage, WireError
from holdfast.wire.wire_limits import (
    EVENTS_MAX,
    FRAME_BYTES_MAX,
    STATUS_FRAME_BYTES_MAX,
    WORKERS_REPORTED_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from holdfast.control.control_point import ControlledAgent, ControlPoint
    from holdfast.control.history import History
    from holdfast.control.port_server import PortServer
    from holdfast.coordinator.connections import ClientConnection
    from holdfast.core.job_settings import JobSettings
    from holdfast.wire.messages import Message

    Kept = tuple[float, lifecycle.LifecycleEvent]
    """An event, and the time of day at which it became known."""

T = TypeVar("T")

CONNECTIONS_MAX = 64
"""Connections at the socket, and as many at the agent port. Remote clients cannot block local ones."""
STREAMS_MAX = 256
"""The limit for the log streams of all clients together (each holds a descriptor), and for the event
streams of each client."""
QUERIES_MAX = 64
"""Pending queries per client. The coordinator has its own limit."""
UNREAD_BYTES_MAX = 4 * 1024 * 1024
"""The server disconnects a client with more unread bytes."""
LOOP_S = 5.0
"""How long the agent's loop may take to respond."""
DECISION_S = 15.0
"""How long the coordinator may take to decide about a request."""
STACKS_AT_ONCE = 8
STACKS_IN_REPLY = 3
"""This many stacks fit into a frame, even with the longest texts."""
IDLE_S = 60.0
"""An unused connection to the coordinator stays open this long."""
CLOSE_S = 1.0
STACKS_CHARS_MAX = 64 * 1024
"""The length of one worker's stacks; the rest is cut off."""


LAST_QUERY_S = 0.5
"""How long an agent that leaves may ask whether others of its job remain."""


class RunEnding(NamedTuple):
    """The end of an agent's run, for its clients."""

    why: str = "the agent has exited"
    outcome: str = ""
    """The outcome of the job, if it is over as far as this agent knows."""
    has_left: bool = False
    """Whether a signal stopped this agent, and others may continue."""


class NoResponse(Exception):
    """A query cannot be answered now; the message is the reason."""


class Client:
    """One control client: at the socket, at the agent port, or the coordinator."""

    read_only = False
    """Whether the client may only watch."""

    def __init__(self, server: NodeServer) -> None:
        self.server = server
        self.streams: dict[int, LogStream] = {}
        self.following: set[int] = set()
        """Queries that follow events."""
        self.pending = 0
        """Queries without a reply yet."""

    def send(self, message: Message) -> None:
        raise NotImplementedError

    @property
    def unread_bytes(self) -> int:
        raise NotImplementedError

    def drop(self, why: str, outcome: str = "", *, left: bool = False) -> None:
        """Close the connection; see `Goodbye`."""
        raise NotImplementedError

    def forget(self) -> None:
        """End all streams."""
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()
        self.following.clear()
        self.server.clients.discard(self)

    def replied(self, _: object) -> None:
        self.pending -= 1


def goodbye(why: str, outcome: str, *, left: bool) -> bytes:
    """Return the frame of a `Goodbye`."""
    return encode_frame(Goodbye(why=one_line(why, WHY_CHARS_MAX), outcome=outcome, left=left))


class SocketClient(Client, asyncio.Protocol):
    """A client at the agent's socket, which only this user and root can open."""

    def __init__(self, server: NodeServer) -> None:
        super().__init__(server)
        self._reader = FrameReader(FRAME_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._upstream: ClientConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._unsent: list[Query] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.server.clients.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self.server.received(self, decode(body))
        except WireError as problem:
            self.drop(str(problem))

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.forget()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.abort()

    def send(self, message: Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message, STATUS_FRAME_BYTES_MAX))
            if self.unread_bytes > UNREAD_BYTES_MAX:
                self.drop("the client does not read its replies")

    @property
    def unread_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def drop(self, why: str, outcome: str = "", *, left: bool = False) -> None:
        if self._transport is not None:
            self._transport.write(goodbye(why, outcome, left=left))
            self._transport.close()

    # Queries for the coordinator.

    def forward(self, message: Query) -> None:
        if self._upstream is not None and self._upstream.is_open:
            self._upstream.send_whole(message)
            return
        self._unsent.append(message)
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            upstream = await self.server.connect()
            upstream.expect_large(STATUS_FRAME_BYTES_MAX)
            upstream.on_message = self.send
            upstream.on_closed = lambda why: self.drop(why, quoted(upstream.goodbye.outcome))
            self._upstream = upstream
            for message in self._unsent:
                upstream.send_whole(message)
        except ConnectFailed as problem:
            refusal = RequestRefusal.NO_ANSWER.value
            why = one_line(f"cannot connect to the coordinator: {problem.why}", WHY_CHARS_MAX)
            for message in self._unsent:
                self.send(Reply(id=message.id, refusal=refusal, why=why))
        finally:
            self._unsent.clear()
            self._connecting = None


class CoordinatorClient(Client):
    """The coordinator, over a connection that this agent opened for it."""

    def __init__(self, server: NodeServer, connection: ClientConnection) -> None:
        super().__init__(server)
        self.connection = connection
        connection.on_message = self._received
        connection.on_closed = self._closed
        server.clients.add(self)

    def _received(self, message: Message) -> None:
        self.server.received(self, message)

    def _closed(self, why: str) -> None:
        del why
        self.forget()
        self.server.detached(self)

    def send(self, message: Message) -> None:
        self.connection.send_whole(message)

    @property
    def unread_bytes(self) -> int:
        return self.connection.unsent_bytes

    def drop(self, why: str, outcome: str = "", *, left: bool = False) -> None:
        del outcome, left  # The coordinator knows it.
        self.connection.close(why)
        self._closed(why)


class NodeServer:
    """Serves control clients of one node in a thread of its own, until `close`."""

    def __init__(self, point: ControlPoint, agent: ControlledAgent) -> None:
        self.clients: set[Client] = set()
        self._point, self._agent = point, agent
        self._thread = LoopThread("holdfast-control", self._log_failure)
        self._thread.start()
        self._loop = self._thread.loop
        self._port: PortServer | None = None
        self._attached: CoordinatorClient | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._watched_until = 0.0
        self._reporting: asyncio.TimerHandle | None = None
        self._report_every_s = 0.0
        self._unreported: list[EventRecord] = []
        self._membership = agent.membership
        handler: Any = agent.group.spec.rdzv_handler
        self._run_id: str = handler.get_run_id()
        self._handler = handler
        self._endpoint: str = getattr(handler, "endpoint", "")
        self._backend: str = handler.get_backend()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dump: asyncio.Task[list[messages.WorkerStacks]] | None = None
        self._last_history: asyncio.Task[list[bytes]] | None = None
        self._next_history: asyncio.Task[list[bytes]] | None = None
        self._usage = Recent()
        """The memory of the workers and the use of GPUs, while clients watch."""
        self._gpus = GpuUtilization()

    @property
    def _node(self) -> str:
        return getattr(self._handler, "node_id", "")

    def close(self) -> None:
        """End the thread and the connections; clients learn how the job ended, if this agent knows."""
        end = ending_of(self._agent, self._point.history)
        try:
            self._thread.run(self._end(end), CLOSE_S)
        except (TimeoutError, RuntimeError):
            pass  # For example, a file system hangs. The thread ends with the process.
        self._thread.stop()

    async def _end(self, end: RunEnding) -> None:
        self._gpus.close()
        if self._port is not None:
            self._port.close()
        if end.has_left and self.clients and await self._have_others_left():
            end = RunEnding(messages.ALL_LEFT, JobOutcome.STOPPED.value)
        self._send_last_report()
        for client in [*self.clients]:
            client.drop(end.why, end.outcome, left=end.has_left)
            client.forget()
        if self._reporting is not None:
            self._reporting.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.sleep(0)

    def _send_last_report(self) -> None:
        """Send the coordinator the events that its clients do not have yet."""
        if self._unreported and self._membership is not None:
            # The agent's loop waits for this thread, so this thread may read its state.
            report = report_of(self._agent, self._point.history)
            self._send(report, self._unreported)

    def _send(self, report: NodeReport, events: list[EventRecord]) -> None:
        view = self._membership.view if self._membership is not None else None
        if self._membership is not None and view is not None:
            self._membership.control.send_report(
                msgspec.structs.replace(report, incarnation=view.incarnation, events=events)
            )

    async def _have_others_left(self) -> bool:
        """Whether this agent, which leaves because of a signal, is the last of its job."""
        try:
            async with asyncio.timeout(LAST_QUERY_S):
                job = await self._summary()
        except (TimeoutError, NoResponse, ConnectFailed, WireError):
            return False
        others = [one for one in job.nodes if one.node != self._node] if job is not None else []
        return job is not None and all(one.phase == NodePhase.LEAVING.value for one in others)

    async def _summary(self) -> JobSummary | None:
        """Return the state of the job, from the coordinator or from where the nodes store it."""
        if self._membership is None:
            return None
        if not self._has_coordinator:
            return await _read_stored(self._membership.control.summary)
        connection = await self.connect()
        connection.expect_large(STATUS_FRAME_BYTES_MAX)
        replies: asyncio.Queue[Message] = asyncio.Queue()
        connection.on_message = replies.put_nowait
        query = messages.pack(messages.StatusQuery())
        try:
            connection.send_whole(
                Query(id=1, what=messages.STATUS, run_id=self._run_id, body=query)
            )
            reply = await replies.get()
        finally:
            connection.abort()
        if not isinstance(reply, Reply) or not reply.body:
            return None
        jobs = messages.unpack(messages.JobSummaries, reply.body).jobs
        return jobs[0] if jobs else None

    def _log_failure(self, what: str) -> None:
        console.debug(f"control server: {what}")

    # From the agent's threads.

    def adopt(self, descriptor: int) -> None:
        """Serve a client that connected to the socket."""
        self._thread.post(self._begin, descriptor)

    def adopt_client(self, connection: socket.socket, address: str) -> None:
        """Serve a client that connected to the agent's port."""
        if not self._thread.post(self._begin_client, connection, address):
            connection.close()

    def watch(self, watch: Watch) -> None:
        self._thread.post(self._watch, watch)

    def publish(self, event: Kept) -> None:
        self._thread.post(self._publish, event)

    # Connections.

    def _begin_client(self, connection: socket.socket, address: str) -> None:
        port = self._membership.control.port if self._membership is not None else None
        if port is None:
            connection.close()
            return
        if self._port is None:
            from holdfast.control.port_server import PortServer  # It imports this module.

            self._port = PortServer(self, port)
        self._port.adopt(connection, address)

    def _begin(self, descriptor: int) -> None:
        connection = socket.socket(fileno=descriptor)
        if sum(isinstance(one, SocketClient) for one in self.clients) >= CONNECTIONS_MAX:
            connection.close()
            return
        connection.settimeout(0)
        self._spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        await self._loop.create_connection(lambda: SocketClient(self), sock=connection)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def connect(self) -> ClientConnection:
        """Return a connection to the coordinator, or raise `ConnectFailed`."""
        if self._membership is None or not self._membership.control.has_coordinator:
            raise ConnectFailed("the job has no coordinator")
        return await self._membership.control.connector().connect()

    def _watch(self, watch: Watch) -> None:
        now = self._loop.time()
        if watch.for_s:
            self._watched_until = max(self._watched_until, now + watch.for_s)
            self._report_every_s = watch.every_s
            if self._reporting is None or watch.every_s:
                self._report_soon(0.0)
        if watch.attach and self._attached is None and self._attaching is None:
            self._attaching = self._loop.create_task(self._attach())

    async def _attach(self) -> None:
        try:
            connection = await self.connect()
            self._attached = CoordinatorClient(self, connection)
            view = self._membership.view if self._membership is not None else None
            incarnation = view.incarnation if view is not None else 0
            connection.send_whole(
                Attach(run_id=self._run_id, node=self._node, incarnation=incarnation)
            )
            self._loop.call_later(IDLE_S, self._detach_if_idle)
        except ConnectFailed as problem:
            console.debug(f"cannot receive queries from the coordinator: {problem.why}")
        finally:
            self._attaching = None

    def _detach_if_idle(self) -> None:
        attached = self._attached
        if attached is None:
            return
        if attached.streams or attached.following:
            self._loop.call_later(IDLE_S, self._detach_if_idle)
        else:
            attached.drop("no queries for a while")

    def detached(self, passed: CoordinatorClient) -> None:
        if self._attached is passed:
            self._attached = None

    # Reports to the coordinator, while its clients watch this node.

    def _report_soon(self, delay_s: float) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        self._reporting = self._loop.call_later(delay_s, self._begin_report)

    def _begin_report(self) -> None:
        self._reporting = None
        if self._loop.time() < self._watched_until:
            self._spawn(self._report())

    async def _report(self) -> None:
        every_s = self._report_every_s
        try:
            report = await self._own_report(workers=every_s > 0)
        except NoResponse:
            report = self._stuck_report()
        size = messages.EVENTS_AT_ONCE
        events, self._unreported = self._unreported[:size], self._unreported[size:]
        if every_s or events:
            self._send(report, events)
        if every_s or self._unreported:
            self._report_soon(0.05 if self._unreported else every_s)

    async def _own_report(self, *, workers: bool = True) -> NodeReport:
        if self._point.awaited:
            return self._waiting_report()
        report = await self._in_agent(
            lambda: report_of(self._agent, self._point.history, workers=workers)
        )
        if not workers:
            return report
        self._gpus.refresh()
        shares = self._gpus.shares
        gpu = sum(shares) / len(shares) if shares else None
        rss_bytes = sum(one.rss_bytes for one in report.workers)
        self._usage.add(Sample(time.monotonic(), rss=rss_bytes or None, gpu=gpu))
        return msgspec.structs.replace(report, gpus=len(shares), gpu=gpu or 0.0)

    def _waiting_report(self) -> NodeReport:
        """Return the state of an agent whose loop waits in a user's code."""
        return NodeReport(
            run_id=self._run_id,
            node=node_name(self._agent),
            state=self._agent.machine.state.value,
            activity=one_line(f"waiting for {self._point.awaited}", WHY_CHARS_MAX),
        )

    def _check_loop(self) -> None:
        """Raise `NoResponse` if the agent's loop waits in a user's code."""
        if self._point.awaited:
            raise NoResponse(
                f"the agent waits for {self._point.awaited}; SIGTERM to process {os.getpid()} stops it"
            )

    def _stuck_report(self) -> NodeReport:
        node = node_name(self._agent)
        return NodeReport(run_id=self._run_id, node=node, state=NodeState.STUCK)

    async def _in_agent(self, function: Callable[[], T]) -> T:
        """Call a function in the agent's loop; raise `NoResponse` if it cannot respond."""
        self._check_loop()
        try:
            async with asyncio.timeout(LOOP_S):
                return await asyncio.wrap_future(self._point.call(function))
        except (TimeoutError, RuntimeError):
            raise NoResponse(f"the agent's loop did not respond within {LOOP_S:g} s") from None

    # Events.

    def _publish(self, kept: Kept) -> None:
        record = record_of(self._node, kept)
        if self._loop.time() < self._watched_until and len(self._unreported) < EVENTS_MAX:
            self._unreported.append(record)
            if self._reporting is None or not self._report_every_s:
                self._report_soon(0.05)
        for client in [*self.clients]:
            for number in client.following:
                body = messages.pack(messages.Events(events=[record], now=time.time()))
                client.send(Reply(id=number, body=body, last=False))
        if isinstance(kept[1], lifecycle.GenerationStarted):
            for client in self.clients:
                for stream in client.streams.values():
                    if stream.follows:
                        self._spawn(self._continue_stream(stream))

    # Queries.

    def received(self, client: Client, message: Message) -> None:
        """Answer a query or pass it on; raise `WireError` for an invalid message."""
        if client.pending >= QUERIES_MAX and not isinstance(client, CoordinatorClient):
            raise BadMessage(f"more than {QUERIES_MAX} queries at once")
        if isinstance(message, Query):
            self._query(client, message)
        elif isinstance(message, Goodbye):
            client.drop("")
        else:
            raise BadMessage(f"an agent does not accept {type(message).__name__}")

    @property
    def _has_coordinator(self) -> bool:
        return self._membership is not None and self._membership.control.has_coordinator

    @property
    def _join_problem(self) -> str:
        """Why this node cannot join its job; empty if it has joined, or if nothing prevents it."""
        membership = self._membership
        return membership.problem() if membership is not None and membership.view is None else ""

    @property
    def _is_alone(self) -> bool:
        """Whether the job has one node. A user's own rendezvous handler may have connected more."""
        return self._membership is None and (self._agent.group.group_world_size or 1) == 1

    def _query(self, client: Client, query: Query) -> None:
        is_for_here = query.node in ("", self._node, node_name(self._agent)) or isinstance(
            client, CoordinatorClient
        )
        what = query.what
        if client.read_only and what not in messages.READS:
            self._refuse(client, query, RequestRefusal.READ_ONLY, "this control port is read-only")
        elif what in (messages.MORE, messages.CANCEL) and (
            query.id in client.streams or query.id in client.following
        ):
            self._follow_up(client, query)
        elif what == messages.HERE and isinstance(client, SocketClient):
            self._reply(self._describe_agent(client, query), client, query)
        elif what == messages.CONTACTS and isinstance(client, SocketClient):
            self._reply(self._contacts(client, query), client, query)
        elif what == messages.ACT and isinstance(client, SocketClient) and self._join_problem:
            why = f"this node has not joined the job: {self._join_problem}"
            why = f"{why}; only a signal stops this agent: kill {os.getpid()}"
            self._refuse(client, query, RequestRefusal.NO_ANSWER, why)
        elif what == messages.STATUS and (not self._has_coordinator or self._join_problem):
            self._reply(self._status(client, query), client, query)
        elif what == messages.REPORT and is_for_here:
            self._reply(self._send_report(client, query), client, query)
        elif what == messages.LOGS and is_for_here:
            self._reply(self._logs(client, query), client, query)
        elif what == messages.STACKS and is_for_here:
            self._reply(self._stacks(client, query), client, query)
        elif what == messages.HISTORY and is_for_here:
            self._reply(self._history(client, query), client, query)
        elif (
            what == messages.EVENTS
            and (isinstance(client, CoordinatorClient) or query.node or not self._has_coordinator)
            and is_for_here
        ):
            self._events(client, query)
        elif isinstance(client, SocketClient) and self._has_coordinator:
            client.forward(query)
        elif what in (messages.MORE, messages.CANCEL):
            pass  # The query has ended already.
        elif what == messages.ACT and not isinstance(client, CoordinatorClient):
            self._reply(self._act(client, query), client, query)
        elif not is_for_here:
            why = f"this is the agent of {self._node}; without a coordinator it cannot reach {query.node}"
            self._refuse(client, query, RequestRefusal.NOT_HERE, why)
        else:
            why = f"this version of Holdfast does not know {what!r}"
            self._refuse(client, query, RequestRefusal.UNKNOWN, why)

    def _reply(self, work: Coroutine[Any, Any, None], client: Client, query: Query) -> None:
        """Answer a query in a task; if there is no answer, refuse the query with the reason."""

        async def reply() -> None:
            try:
                await work
            except NoResponse as problem:
                self._refuse(client, query, RequestRefusal.NO_ANSWER, str(problem))
            except BadMessage as problem:
                client.drop(str(problem))

        client.pending += 1
        self._spawn(reply()).add_done_callback(client.replied)

    def _refuse(self, client: Client, query: Query, refusal: RequestRefusal, why: str) -> None:
        client.send(Reply(id=query.id, refusal=refusal.value, why=one_line(why, WHY_CHARS_MAX)))

    def _follow_up(self, client: Client, query: Query) -> None:
        if query.what == messages.CANCEL:
            client.following.discard(query.id)
            stream = client.streams.pop(query.id, None)
            if stream is not None:
                stream.close()
            return
        size = messages.unpack(messages.StreamCredit, query.body).size
        if not size:
            client.send(Reply(id=query.id, last=False))  # The stream is still open.
        elif query.id in client.streams:
            client.streams[query.id].add_credit(size)

    async def _describe_agent(self, client: Client, query: Query) -> None:
        try:
            report = await self._own_report(workers=False)
        except NoResponse:
            report = self._stuck_report()
        spec = self._agent.group.spec
        here = messages.AgentIdentity(
            run_id=self._run_id,
            node=self._node if self._is_alone else node_name(self._agent),
            pid=os.getpid(),
            backend=self._backend,
            endpoint=one_line(self._endpoint, WHY_CHARS_MAX),
            program=one_line(self._agent.describe_program(), 255),
            state=report.state,
            generation=report.generation,
            workers=spec.local_world_size,
            elapsed_s=report.elapsed_s,
            coordinated=self._has_coordinator or self._is_alone,
        )
        client.send(Reply(id=query.id, body=messages.pack(here)))

    async def _contacts(self, client: Client, query: Query) -> None:
        """Reply with the addresses of the other agents of a job that has no coordinator."""
        found = messages.Contacts()
        if self._membership is not None and not self._join_problem:
            found = await _read_stored(self._membership.control.contacts)
        size = messages.CONTACTS_AT_ONCE
        for at in range(0, max(1, len(found.contacts)), size):
            part = msgspec.structs.replace(
                found, contacts=found.contacts[at : at + size], pem=[] if at else found.pem
            )
            last = at + size >= len(found.contacts)
            client.send(Reply(id=query.id, body=messages.pack(part), last=last))

    async def _send_report(self, client: Client, query: Query) -> None:
        client.send(Reply(id=query.id, body=messages.pack(await self._own_report())))

    async def _status(self, client: Client, query: Query) -> None:
        """Reply with the state of a job that has no coordinator, or that this node cannot join."""
        report = await self._own_report()
        if self._membership is None:
            summary = own_summary(self._agent, report)
        elif problem := self._join_problem:
            summary = summary_before_joining(
                self._agent, report, self._membership.settings, problem
            )
        else:
            found = await _read_stored(self._membership.control.summary)
            if found is None:
                raise NoResponse("this agent does not know the state of the job yet")
            summary = with_report(found, report)
        is_wanted = query.run_id in ("", summary.run_id)
        body = messages.pack(messages.JobSummaries(jobs=[summary] if is_wanted else []))
        client.send(Reply(id=query.id, body=body))

    async def _act(self, client: Client, query: Query) -> None:
        self._check_loop()
        request = messages.unpack(Request, query.body)
        try:
            async with asyncio.timeout(DECISION_S):
                answer = await asyncio.wrap_future(self._point.request(request))
        except TimeoutError:
            raise NoResponse(f"the coordinator did not respond within {DECISION_S:g} s") from None
        client.send(Reply(id=query.id, refusal=answer.refusal, why=answer.why))

    def _events(self, client: Client, query: Query) -> None:
        follow = messages.unpack(messages.EventsQuery, query.body).follow
        if follow and len(client.following) >= STREAMS_MAX:
            why = f"{STREAMS_MAX} streams are open already"
            self._refuse(client, query, RequestRefusal.TOO_MANY, why)
            return
        records = [record_of(self._node, one) for one in self._point.recent_events]
        records.sort(key=lambda one: one.wall)
        size = messages.EVENTS_AT_ONCE
        for at in range(0, len(records), size):
            body = messages.pack(messages.Events(events=records[at : at + size], now=time.time()))
            client.send(Reply(id=query.id, body=body, last=False))
        if follow:
            client.following.add(query.id)
        else:
            client.send(Reply(id=query.id))

    async def _logs(self, client: Client, query: Query) -> None:
        wanted = messages.unpack(messages.LogsQuery, query.body)
        streams = sum(len(one.streams) for one in self.clients)
        if streams >= STREAMS_MAX or query.id in client.streams:
            why = f"{streams} streams are open already"
            self._refuse(client, query, RequestRefusal.TOO_MANY, why)
            return
        stream = LogStream(wanted, self._loop)
        client.streams[query.id] = stream

        def send(lines: messages.LogLines) -> None:
            client.send(Reply(id=query.id, body=messages.pack(lines), last=False))

        def end(why: str) -> None:
            client.streams.pop(query.id, None)
            stream.close()
            refusal = RequestRefusal.NO_ANSWER.value if why else ""
            client.send(Reply(id=query.id, refusal=refusal, why=why))

        found = await self._continue_stream(stream)
        if not found and query.id in client.streams:
            client.streams.pop(query.id).close()
            why = (
                "this node has no output of workers yet, or keeps none (--log-tail 0, --log-dir /dev/null)"
                if not wanted.ranks
                else "this node has no output of workers with these ranks"
            )
            self._refuse(client, query, RequestRefusal.NOT_HERE, why)
            return
        stream.begin(send, end)

    async def _continue_stream(self, stream: LogStream) -> int:
        """Add the files of this generation to a stream; return how many files it reads now."""
        try:
            generation, files = await self._in_agent(
                lambda: (self._agent.machine.generation, self._agent.log_files)
            )
        except NoResponse:
            return 0
        return stream.add(generation, files)

    async def _history(self, client: Client, query: Query) -> None:
        # Its computation takes a while, so all queries that arrive during one share the next one.
        if self._next_history is None:
            self._next_history = self._spawn(self._compute_history(self._last_history))
        bodies = await asyncio.shield(self._next_history)
        for at, body in enumerate(bodies, 1):
            client.send(Reply(id=query.id, body=body, last=at == len(bodies)))

    async def _compute_history(self, previous: asyncio.Task[list[bytes]] | None) -> list[bytes]:
        """Return the parts of this node's history, after the previous computation."""
        if previous is not None:
            await asyncio.wait([previous])
        self._last_history, self._next_history = self._next_history, None
        now = time.monotonic()
        bodies, curves, memory = await self._in_agent(
            lambda: (
                [messages.pack(one) for one in self._point.history.parts(now)],
                self._agent.curves(),
                self._agent.past_memory,
            )
        )
        # The rest in this thread: the agent's loop should not wait for it.
        points = [[points_of(one) for one in workers] for workers in curves]
        series = series_of_node(points, memory, self._usage.series(now), now)
        return [*bodies, messages.pack(NodeHistory(now=now, series=series))]

    async def _stacks(self, client: Client, query: Query) -> None:
        # A dump pauses the workers, so all queries that arrive during one share it.
        if self._dump is None or self._dump.done():
            self._dump = self._spawn(self._dump_workers())
        stacks = await asyncio.shield(self._dump)
        for at in range(0, max(1, len(stacks)), STACKS_IN_REPLY):
            body = messages.pack(messages.Stacks(workers=stacks[at : at + STACKS_IN_REPLY]))
            last = at + STACKS_IN_REPLY >= len(stacks)
            client.send(Reply(id=query.id, body=body, last=last))

    async def _dump_workers(self) -> list[messages.WorkerStacks]:
        workers = await self._in_agent(lambda: live_workers(self._agent))
        stacks: list[messages.WorkerStacks] = []
        at_once = asyncio.Semaphore(STACKS_AT_ONCE)

        async def dump(rank: int, pid: int) -> None:
            async with at_once:
                text = await asyncio.to_thread(dump_stacks, pid)
                text = text[:STACKS_CHARS_MAX]
                stacks.append(messages.WorkerStacks(rank=rank, pid=pid, text=text))

        await asyncio.gather(*(dump(rank, pid) for rank, pid in workers[:WORKERS_REPORTED_MAX]))
        return sorted(stacks, key=lambda one: one.rank)


async def _read_stored(read: Callable[[], T]) -> T:
    """Return what the nodes have stored; raise `NoResponse` if it is not readable."""
    try:
        return await asyncio.to_thread(read)
    except Exception as problem:  # noqa: BLE001 (a backend of the user's own may raise anything)
        raise NoResponse(quoted(str(problem))) from None


# The messages that clients get from an agent about its node: workers, state and events.


def live_workers(agent: ControlledAgent) -> list[tuple[int, int]]:
    """Return rank and process id of the workers that have not exited."""
    workers = agent.group.workers
    return [(workers[rank].global_rank, pid) for rank, pid in sorted(agent.live_workers.items())]


def report_of(agent: ControlledAgent, history: History, *, workers: bool = True) -> NodeReport:
    """Return the state of an agent and its workers; call it in the agent's loop."""
    handler: Any = agent.group.spec.rdzv_handler
    now = time.monotonic()
    reports: list[WorkerReport] = []
    if workers:
        live = agent.live_workers
        pages = agent.pages()
        for worker in agent.group.workers[:WORKERS_REPORTED_MAX]:
            pid = live.get(worker.local_rank, 0)
            page = pages.get(worker.local_rank)
            cpu_s, rss_bytes = usage_of(pid) if pid else (-1.0, 0)
            page = page or Progress()
            step_age_s = _age(now, page.step_ns)
            left_s = eta_s(page.step, page.total, page.pace, step_age_s)
            reports.append(
                WorkerReport(
                    rank=worker.global_rank,
                    local_rank=worker.local_rank,
                    pid=pid,
                    state=_worker_state(history, worker.local_rank, pid),
                    step=-1 if page.step is None else page.step,
                    step_age_s=step_age_s,
                    heartbeat_age_s=_age(now, page.heartbeat_ns),
                    section=page.sections[-1].name[:255] if page.sections else "",
                    cpu_s=cpu_s,
                    rss_bytes=rss_bytes,
                    total=page.total or 0,
                    loss=json_loss(page.loss),
                    eta_s=-1.0 if left_s is None else min(left_s, DURATION_S_MAX),
                )
            )
    return NodeReport(
        run_id=handler.get_run_id(),
        node=node_name(agent),
        state=NodeState.PRELOADING if agent.activity else history.node_state,
        activity=one_line(agent.activity, WHY_CHARS_MAX),
        workers=reports,
        **history.time(now)._asdict(),
    )


def _worker_state(history: History, local_rank: int, pid: int) -> WorkerState:
    if pid:
        return WorkerState.RUNNING
    _, state = history.workers.get(local_rank, (None, WorkerState.TERMINATED))
    return state if state is not WorkerState.RUNNING else WorkerState.TERMINATED


OUTCOMES = {
    RunEnd.SUCCEEDED: JobOutcome.SUCCEEDED,
    RunEnd.FAILED: JobOutcome.FAILED,
    RunEnd.ERROR: JobOutcome.FAILED,
    RunEnd.STOPPED: JobOutcome.STOPPED,
    RunEnd.LEFT: JobOutcome.STOPPED,
}
"""How a job of one node ended, by the end of its run."""


def ending_of(agent: ControlledAgent, history: History) -> RunEnding:
    """Return the end of an agent's run, and that of its job if this agent knows it."""
    end = history.run_end
    has_left = end is RunEnd.LEFT
    if agent.membership is not None:
        view = agent.membership.view
        if view is not None and view.role is NodeRole.CLOSED and view.outcome is not None:
            return RunEnding(view.why, view.outcome.value)
        return RunEnding(has_left=has_left)
    if end not in OUTCOMES or (agent.group.group_world_size or 1) > 1:
        return RunEnding()
    newest = history.newest
    cause = newest.cause or newest.detail if newest is not None else ""
    why = {
        RunEnd.SUCCEEDED: StopReason.SUCCEEDED.value,
        RunEnd.STOPPED: agent.machine.request_text,
        RunEnd.LEFT: history.end_error,
    }.get(end, cause or "an error of the agent ended it")
    return RunEnding(why, OUTCOMES[end].value)


def node_name(agent: ControlledAgent) -> str:
    """Return the name of this node in its job."""
    handler: object = agent.group.spec.rdzv_handler
    return getattr(handler, "node_id", "") or host_label()


def summary_before_joining(
    agent: ControlledAgent, report: NodeReport, settings: JobSettings, problem: str
) -> JobSummary:
    """Return what a node knows about a job that it cannot join: only itself, and the problem."""
    summary = own_summary(agent, report)
    report = msgspec.structs.replace(report, activity=one_line(problem, WHY_CHARS_MAX))
    node = msgspec.structs.replace(summary.nodes[0], rank=-1, first_rank=-1, report=report)
    return msgspec.structs.replace(
        summary,
        phase=JobPhase.FORMING.value,
        round=-1,
        members=0,
        present=0,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        nodes=[node],
    )


def own_summary(agent: ControlledAgent, report: NodeReport) -> JobSummary:
    """Return the state of a job that has no coordinator, as far as this node knows it.

    If the rendezvous handler is the user's own, there may be other nodes, which the agent can count
    but not reach.
    """
    machine, group = agent.machine, agent.group
    spec, nodes = group.spec, group.group_world_size or 1
    node = NodeSummary(
        node=report.node,
        host=os.uname().nodename,
        role=spec.role,
        phase=report.state,
        rank=group.group_rank or 0,
        generation=report.generation,
        first_rank=max(0, group.workers[0].global_rank),
        size=spec.local_world_size,
        report=report,
    )
    return JobSummary(
        run_id=report.run_id,
        phase="active" if report.state in ("running", "stopping") else report.state,
        round=report.generation,
        generation=report.generation,
        restarts=machine.restart_count,
        max_restarts=machine.budget.max_restarts,
        present=nodes,
        members=nodes,
        min_nodes=nodes,
        max_nodes=nodes,
        nodes=[node],
        why=machine.request_text,
    )


def _age(now: float, at_ns: int) -> float:
    return max(0.0, now - at_ns / 1e9) if at_ns else -1.0


def with_report(summary: JobSummary, report: NodeReport) -> JobSummary:
    """Return a job with the report of this node."""
    nodes = [
        msgspec.structs.replace(one, report=report) if one.node == report.node else one
        for one in summary.nodes
    ]
    return msgspec.structs.replace(summary, nodes=nodes)


KINDS = {
    lifecycle.RunStarted: EventKind.RUN_STARTED,
    lifecycle.RunEnded: EventKind.RUN_ENDED,
    lifecycle.RendezvousEnded: EventKind.RENDEZVOUS_ENDED,
    lifecycle.RanksAssigned: EventKind.RANKS_ASSIGNED,
    lifecycle.GenerationStarted: EventKind.GENERATION_STARTED,
    lifecycle.GenerationStopping: EventKind.GENERATION_STOPPING,
    lifecycle.GenerationStopped: EventKind.GENERATION_STOPPED,
    lifecycle.FirstHeartbeat: EventKind.FIRST_HEARTBEAT,
    lifecycle.WorkerEnded: EventKind.WORKER_ENDED,
    lifecycle.WorkersFailed: EventKind.WORKERS_FAILED,
    lifecycle.WatchdogEvent: EventKind.WATCHDOG,
    lifecycle.RequestCarriedOut: EventKind.REQUESTED,
    lifecycle.ProtectionChanged: EventKind.PROTECTION,
}


def record_of(node: str, kept: Kept) -> EventRecord:
    """Return a lifecycle event as a message."""
    wall, event = kept
    if isinstance(event, lifecycle.WorkersFailed):  # The failure is older than its details.
        wall = event.failures[0].wall
    fields = {name: value for name, value in vars(event).items() if value not in (None, "")}
    worker = fields.get("worker")
    rank = worker.global_rank if isinstance(worker, lifecycle.WorkerInfo) else -1
    generation = fields.get("generation", -1)
    return EventRecord(
        wall=max(0.0, wall),
        source=node,
        kind=KINDS.get(type(event), EventKind.CUSTOM),
        generation=generation if isinstance(generation, int) else -1,
        rank=rank,
        is_problem=_is_problem(event),
        outcome=event.state or event.cut_short if isinstance(event, lifecycle.RunEnded) else "",
        text=one_line(text_of(event), WHY_CHARS_MAX),
    )


def _is_problem(event: lifecycle.LifecycleEvent) -> bool:
    match event:
        case lifecycle.WorkerEnded():
            return event.failed and not event.stopped
        case lifecycle.RunEnded():  # A signal, for example, also raises an error.
            return (event.state or event.cut_short) in (RunEnd.FAILED, RunEnd.ERROR)
        case lifecycle.ProtectionChanged():
            return bool(event.missing)
    return isinstance(event, lifecycle.WorkersFailed)


def text_of(event: lifecycle.LifecycleEvent) -> str:
    """Return a lifecycle event as a line."""
    match event:
        case lifecycle.GenerationStarted():
            ranks = ", ".join(f"{one.global_rank} (pid {one.pid})" for one in event.workers)
            return f"generation {event.generation} started: ranks {ranks}"
        case lifecycle.GenerationStopping():
            return f"stopping generation {event.generation}: {event.reason.value}"
        case lifecycle.GenerationStopped():
            return f"generation {event.generation}: all workers exited"
        case lifecycle.WorkersFailed():
            return "; ".join(
                f"rank {one.global_rank} failed: {one.ending}"
                for one in event.failures
                if not one.consequence
            )
        case lifecycle.WorkerEnded():
            how = "was stopped" if event.stopped else "succeeded"
            if event.failed and not event.stopped:
                how = "failed"
            return f"rank {event.worker.global_rank} (pid {event.worker.pid}) {how}"
        case lifecycle.FirstHeartbeat():
            return f"rank {event.worker.global_rank} is running"
        case lifecycle.RunEnded():
            left = "stopped by a signal" if event.cut_short == RunEnd.LEFT else event.cut_short
            return f"the run ended: {event.state or left}"
        case lifecycle.RendezvousEnded():
            return f"node {event.group_rank} of {event.group_world_size}" if not event.error else ""
        case lifecycle.RanksAssigned():
            return "the workers have their ranks"
        case lifecycle.RequestCarriedOut():
            return event.what
        case lifecycle.ProtectionChanged():
            return lifecycle.protection_text(event.missing)
        case lifecycle.WatchdogEvent():
            return f"{event.what} {event.scope}".strip()
    return ""
