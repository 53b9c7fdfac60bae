"""The thread in which an agent answers people: at its own socket, and from other machines.

::

    holdfast logs ── unix socket ──► NodeServer ◄── a connection of its own ── coordinator
                                        │    ▲
                        `AgentDoor.call`│    └───── control port, where there is no coordinator
                                        ▼
                                   the agent's loop

What is about this node is answered here. What is about the whole job goes to whoever decides: to the
coordinator, as an operator's connection would; else in the node's own status. The thread begins with
the first that comes, and nothing it does makes the agent's loop wait.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast import console
from holdfast.control.log_streams import LogStream
from holdfast.coordinator.connect import ConnectFailed
from holdfast.core.limits import WHY_CHARS_MAX
from holdfast.core.protocol import Request, RequestRefusal
from holdfast.net.loop_thread import LoopThread
from holdfast.observe import lifecycle
from holdfast.printable import one_line, quoted
from holdfast.wire import control
from holdfast.wire.errors import BadMessage, WireError
from holdfast.wire.frames import FrameReader, encode_frame
from holdfast.wire.limits import (
    EVENTS_MAX,
    FRAME_BYTES_MAX,
    STATUS_FRAME_BYTES_MAX,
    WORKERS_REPORTED_MAX,
)
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

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from typing import Any, TypeVar

    from holdfast.control.control_point import ControlledAgent
    from holdfast.control.history import History
    from holdfast.control.port_server import PortServer
    from holdfast.coordinator.connect import ClientConnection
    from holdfast.core.protocol import RequestAnswer
    from holdfast.wire.messages import Message

    T = TypeVar("T")
    Kept = tuple[float, lifecycle.LifecycleEvent]

CONNECTIONS_MAX = 64
"""At the socket, and as many at the control port: who is there keeps nobody from the agent's own machine."""
STREAMS_MAX = 256
"""Of logs, to all who ask, and of events to each: they hold descriptors."""
QUESTIONS_MAX = 64
"""Under way of one who asks; a coordinator has a limit of its own."""
UNREAD_BYTES_MAX = 4 * 1024 * 1024
"""Whoever leaves more of its answers unread is dropped."""
LOOP_S = 5.0
"""How long the agent's loop has for an answer."""
ACT_S = 15.0
"""How long whoever decides has for one."""
STACKS_AT_ONCE = 8
STACKS_IN_REPLY = 3
"""However long their texts are, they fit into a frame."""
IDLE_S = 60.0
"""A connection to the coordinator that nobody needs any more is kept for so long."""
CLOSE_S = 1.0
STACKS_CHARS_MAX = 64 * 1024
"""Of one worker's stacks."""


class AgentDoor(Protocol):
    """How the thread reaches the agent: a `ControlPoint`."""

    @property
    def kept(self) -> list[Kept]:
        """The newest events; any thread may look."""

    @property
    def history(self) -> History:
        """The history of the run; for the agent's loop."""

    def call(self, function: Callable[[], T]) -> Future[T]: ...

    def request(self, request: Request) -> Future[RequestAnswer]: ...


class Asker:
    """Whoever asks: somebody at the socket or at the control port, or the coordinator."""

    read_only = False
    """Whether it may look and change nothing."""

    def __init__(self, server: NodeServer) -> None:
        self.server = server
        self.streams: dict[int, LogStream] = {}
        self.following: set[int] = set()
        """Queries for events as they come."""
        self.under_way = 0
        """Questions that are being answered."""

    def send(self, message: Message) -> None:
        raise NotImplementedError

    @property
    def unread_bytes(self) -> int:
        raise NotImplementedError

    def drop(self, why: str) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        """End all that was asked for."""
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()
        self.following.clear()
        self.server.askers.discard(self)

    def answered(self, _: object) -> None:
        self.under_way -= 1


class AtSocket(Asker, asyncio.Protocol):
    """Somebody at this agent's socket, who is its user or root: nobody else can open it."""

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
        self.server.askers.add(self)

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
                self.drop("it does not read what it asked for")

    @property
    def unread_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def drop(self, why: str) -> None:
        if self._transport is not None:
            self._transport.write(encode_frame(Goodbye(why=one_line(why, WHY_CHARS_MAX))))
            self._transport.close()

    # What the coordinator is to answer.

    def pass_up(self, message: Query) -> None:
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
            upstream.on_closed = self.drop
            self._upstream = upstream
            for message in self._unsent:
                upstream.send_whole(message)
        except ConnectFailed as problem:
            refusal = RequestRefusal.NO_ANSWER.value
            why = one_line(f"the coordinator does not answer: {problem.why}", WHY_CHARS_MAX)
            for message in self._unsent:
                self.send(Reply(id=message.id, refusal=refusal, why=why))
        finally:
            self._unsent.clear()
            self._connecting = None


class Passed(Asker):
    """The coordinator, over a connection that this agent opened for it."""

    def __init__(self, server: NodeServer, connection: ClientConnection) -> None:
        super().__init__(server)
        self.connection = connection
        connection.on_message = self._received
        connection.on_closed = self._closed
        server.askers.add(self)

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

    def drop(self, why: str) -> None:
        self.connection.close(why)
        self._closed(why)


class NodeServer:
    """Answers people about one node, in a thread of its own, until `close`."""

    def __init__(self, door: AgentDoor, agent: ControlledAgent) -> None:
        self.askers: set[Asker] = set()
        self._door, self._agent = door, agent
        self._thread = LoopThread("holdfast-control", self._broke)
        self._thread.start()
        self._loop = self._thread.loop
        self._port: PortServer | None = None
        self._attached: Passed | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._watched_until = 0.0
        self._reporting: asyncio.TimerHandle | None = None
        self._report_every_s = 0.0
        self._unreported: list[EventRecord] = []
        self._connection = agent.connection
        handler: Any = agent.group.spec.rdzv_handler
        self._run_id: str = handler.get_run_id()
        self._node: str = getattr(handler, "node_id", "")
        self._endpoint: str = getattr(handler, "endpoint", "")
        self._backend: str = handler.get_backend()
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """End the thread; those who watch see their connections end."""
        try:
            self._thread.ask(self._end(), CLOSE_S)
        except (TimeoutError, RuntimeError):
            pass  # A file system that hangs, perhaps: the thread ends with the process.
        self._thread.stop()

    async def _end(self) -> None:
        if self._port is not None:
            self._port.close()
        for asker in [*self.askers]:
            asker.drop("the agent has ended")
            asker.forget()
        if self._reporting is not None:
            self._reporting.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.sleep(0)

    def _broke(self, what: str) -> None:
        console.debug(f"those who watch this job see an error: {what}")

    # From the agent's threads.

    def adopt(self, descriptor: int) -> None:
        """Serve one who has come to the socket."""
        self._thread.post(self._begin, descriptor)

    def adopt_client(self, connection: socket.socket, address: str) -> None:
        """Serve a client that connected to the agent's port."""
        if not self._thread.post(self._begin_client, connection, address):
            connection.close()

    def watch(self, watch: Watch) -> None:
        self._thread.post(self._watch, watch)

    def happened(self, event: Kept) -> None:
        self._thread.post(self._happened, event)

    # Connections.

    def _begin_client(self, connection: socket.socket, address: str) -> None:
        port = self._connection.control.port if self._connection is not None else None
        if port is None:
            connection.close()
            return
        if self._port is None:
            from holdfast.control.port_server import PortServer  # It imports this module.

            self._port = PortServer(self, port)
        self._port.adopt(connection, address)

    def _begin(self, descriptor: int) -> None:
        connection = socket.socket(fileno=descriptor)
        if sum(isinstance(one, AtSocket) for one in self.askers) >= CONNECTIONS_MAX:
            connection.close()
            return
        connection.settimeout(0)
        self._spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        await self._loop.create_connection(lambda: AtSocket(self), sock=connection)

    def _spawn(self, work: Any, asker: Asker | None = None) -> None:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if asker is not None:
            asker.under_way += 1
            task.add_done_callback(asker.answered)

    async def connect(self) -> ClientConnection:
        """Return a connection to the coordinator, or raise `ConnectFailed`."""
        if self._connection is None or not self._connection.control.has_coordinator:
            raise ConnectFailed("the job has none")
        return await self._connection.control.connector().connect()

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
            self._attached = Passed(self, connection)
            view = self._connection.view if self._connection is not None else None
            incarnation = view.incarnation if view is not None else 0
            connection.send_whole(
                Attach(run_id=self._run_id, node=self._node, incarnation=incarnation)
            )
            self._loop.call_later(IDLE_S, self._detach_if_idle)
        except ConnectFailed as problem:
            console.debug(f"no connection for those who watch: {problem.why}")
        finally:
            self._attaching = None

    def _detach_if_idle(self) -> None:
        attached = self._attached
        if attached is None:
            return
        if attached.streams or attached.following:
            self._loop.call_later(IDLE_S, self._detach_if_idle)
        else:
            attached.drop("nobody has asked for a while")

    def detached(self, passed: Passed) -> None:
        if self._attached is passed:
            self._attached = None

    # Reports to the coordinator, while somebody watches there.

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
        except (TimeoutError, RuntimeError):
            report = NodeReport(run_id=self._run_id, node=self._node, state="does not answer")
        size = control.EVENTS_AT_ONCE
        events, self._unreported = self._unreported[:size], self._unreported[size:]
        view = self._connection.view if self._connection is not None else None
        if self._connection is not None and view is not None and (every_s or events):
            self._connection.control.send_report(
                msgspec.structs.replace(report, incarnation=view.incarnation, events=events)
            )
        if every_s or self._unreported:
            self._report_soon(0.05 if self._unreported else every_s)

    async def _own_report(self, *, workers: bool = True) -> NodeReport:
        return await self._in_agent(lambda: report_of(self._door, self._agent, workers=workers))

    async def _in_agent(self, function: Callable[[], T], limit_s: float = LOOP_S) -> T:
        async with asyncio.timeout(limit_s):
            return await asyncio.wrap_future(self._door.call(function))

    # Events.

    def _happened(self, kept: Kept) -> None:
        record = record_of(self._node, kept)
        if self._loop.time() < self._watched_until and len(self._unreported) < EVENTS_MAX:
            self._unreported.append(record)
            if self._reporting is None or not self._report_every_s:
                self._report_soon(0.05)
        for asker in [*self.askers]:
            for number in asker.following:
                body = control.pack(control.Events(events=[record], now=time.time()))
                asker.send(Reply(id=number, body=body, last=False))
        if isinstance(kept[1], lifecycle.GenerationStarted):
            for asker in self.askers:
                for stream in asker.streams.values():
                    if stream.follows:
                        self._spawn(self._go_on(stream))

    # What is asked for.

    def received(self, asker: Asker, message: Message) -> None:
        """Answer or pass on; raise `WireError` for what nobody should send."""
        if asker.under_way >= QUESTIONS_MAX and not isinstance(asker, Passed):
            raise BadMessage(f"more than {QUESTIONS_MAX} questions at once")
        if isinstance(message, Query):
            self._query(asker, message)
        elif isinstance(message, Goodbye):
            asker.drop("")
        else:
            raise BadMessage(f"an agent takes no {type(message).__name__}")

    @property
    def _has_coordinator(self) -> bool:
        return self._connection is not None and self._connection.control.has_coordinator

    def _query(self, asker: Asker, query: Query) -> None:
        is_for_here = query.node in ("", self._node, node_name(self._agent)) or isinstance(
            asker, Passed
        )
        what = query.what
        if asker.read_only and what not in control.READS:
            self._refuse(asker, query, RequestRefusal.READ_ONLY, "people may only look here")
        elif what in (control.MORE, control.CANCEL) and (
            query.id in asker.streams or query.id in asker.following
        ):
            self._follow_up(asker, query)
        elif what == control.HERE and isinstance(asker, AtSocket):
            self._spawn(self._here(asker, query), asker)
        elif what == control.CONTACTS and isinstance(asker, AtSocket):
            self._spawn(self._contacts(asker, query), asker)
        elif what == control.STATUS and not self._has_coordinator:
            self._spawn(self._status(asker, query), asker)
        elif what == control.REPORT and is_for_here:
            self._spawn(self._tell_report(asker, query), asker)
        elif what == control.LOGS and is_for_here:
            self._spawn(self._logs(asker, query), asker)
        elif what == control.STACKS and is_for_here:
            self._spawn(self._stacks(asker, query), asker)
        elif what == control.HISTORY and is_for_here:
            self._spawn(self._history(asker, query), asker)
        elif (
            what == control.EVENTS
            and (isinstance(asker, Passed) or query.node or not self._has_coordinator)
            and is_for_here
        ):
            self._events(asker, query)
        elif isinstance(asker, AtSocket) and self._has_coordinator:
            asker.pass_up(query)
        elif what in (control.MORE, control.CANCEL):
            pass  # It is over already.
        elif what == control.ACT and not isinstance(asker, Passed):
            self._spawn(self._act(asker, query), asker)
        elif not is_for_here:
            why = f"this is the agent of {self._node}; the job has no coordinator to reach {query.node}"
            self._refuse(asker, query, RequestRefusal.NOT_HERE, why)
        else:
            why = f"{what!r} is not known to this version of Holdfast"
            self._refuse(asker, query, RequestRefusal.UNKNOWN, why)

    def _refuse(self, asker: Asker, query: Query, refusal: RequestRefusal, why: str) -> None:
        asker.send(Reply(id=query.id, refusal=refusal.value, why=one_line(why, WHY_CHARS_MAX)))

    def _follow_up(self, asker: Asker, query: Query) -> None:
        if query.what == control.CANCEL:
            asker.following.discard(query.id)
            stream = asker.streams.pop(query.id, None)
            if stream is not None:
                stream.close()
            return
        size = control.unpack(control.More, query.body).size
        if not size:
            asker.send(Reply(id=query.id, last=False))  # It is still there.
        elif query.id in asker.streams:
            asker.streams[query.id].give_room(size)

    async def _here(self, asker: Asker, query: Query) -> None:
        try:
            report = await self._own_report()
        except (TimeoutError, RuntimeError):
            report = NodeReport(run_id=self._run_id, node=node_name(self._agent), state="stuck")
        spec = self._agent.group.spec
        here = control.Here(
            run_id=self._run_id,
            node=self._node,
            pid=os.getpid(),
            backend=self._backend,
            endpoint=one_line(self._endpoint, WHY_CHARS_MAX),
            program=one_line(self._agent.describe_program(), 255),
            state=report.state,
            generation=report.generation,
            workers=spec.local_world_size,
            elapsed_s=report.elapsed_s,
            coordinated=self._connection is None or self._has_coordinator,
        )
        asker.send(Reply(id=query.id, body=control.pack(here)))

    async def _contacts(self, asker: Asker, query: Query) -> None:
        """Tell how to reach the other agents of a job that has no coordinator."""
        found = control.Contacts()
        if self._connection is not None:
            try:
                found = await asyncio.to_thread(self._connection.control.contacts)
            except Exception as problem:  # noqa: BLE001 (what etcd says of it, for a person)
                self._refuse(asker, query, RequestRefusal.NO_ANSWER, quoted(str(problem)))
                return
        size = control.CONTACTS_AT_ONCE
        for at in range(0, max(1, len(found.contacts)), size):
            part = msgspec.structs.replace(
                found, contacts=found.contacts[at : at + size], pem=[] if at else found.pem
            )
            last = at + size >= len(found.contacts)
            asker.send(Reply(id=query.id, body=control.pack(part), last=last))

    async def _tell_report(self, asker: Asker, query: Query) -> None:
        try:
            report = await self._own_report()
        except (TimeoutError, RuntimeError):
            why = f"the agent's loop did not answer within {LOOP_S:g} s"
            self._refuse(asker, query, RequestRefusal.NO_ANSWER, why)
            return
        asker.send(Reply(id=query.id, body=control.pack(report)))

    async def _status(self, asker: Asker, query: Query) -> None:
        """Reply with the state of a job that has no coordinator."""
        try:
            report = await self._own_report()
            if self._connection is None:
                summary = own_summary(self._agent, report)
            else:
                found = await asyncio.to_thread(self._connection.control.summary)
                if found is None:
                    raise RuntimeError("the state of the job is not known here yet")
                summary = with_report(found, report)
        except (TimeoutError, RuntimeError, OSError) as problem:
            why = quoted(str(problem)) or f"the agent's loop did not answer within {LOOP_S:g} s"
            refusal = RequestRefusal.NO_ANSWER.value
            asker.send(Reply(id=query.id, refusal=refusal, why=why))
            return
        except Exception as problem:  # noqa: BLE001 (what etcd says of it, for a person)
            refusal = RequestRefusal.NO_ANSWER.value
            asker.send(Reply(id=query.id, refusal=refusal, why=quoted(str(problem))))
            return
        is_wanted = query.run_id in ("", summary.run_id)
        body = control.pack(control.JobSummaries(jobs=[summary] if is_wanted else []))
        asker.send(Reply(id=query.id, body=body))

    async def _act(self, asker: Asker, query: Query) -> None:
        try:
            request = control.unpack(Request, query.body)
        except BadMessage as problem:
            asker.drop(str(problem))
            return
        try:
            async with asyncio.timeout(ACT_S):
                answer = await asyncio.wrap_future(self._door.request(request))
        except TimeoutError:
            why = f"the coordinator did not respond within {ACT_S:g} s"
            self._refuse(asker, query, RequestRefusal.NO_ANSWER, why)
            return
        asker.send(Reply(id=query.id, refusal=answer.refusal, why=answer.why))

    def _events(self, asker: Asker, query: Query) -> None:
        follow = control.unpack(control.EventsQuery, query.body).follow
        if follow and len(asker.following) >= STREAMS_MAX:
            why = f"{STREAMS_MAX} streams are open already"
            self._refuse(asker, query, RequestRefusal.TOO_MANY, why)
            return
        records = [record_of(self._node, one) for one in self._door.kept]
        records.sort(key=lambda one: one.wall)
        size = control.EVENTS_AT_ONCE
        for at in range(0, len(records), size):
            body = control.pack(control.Events(events=records[at : at + size], now=time.time()))
            asker.send(Reply(id=query.id, body=body, last=False))
        if follow:
            asker.following.add(query.id)
        else:
            asker.send(Reply(id=query.id))

    async def _logs(self, asker: Asker, query: Query) -> None:
        try:
            wanted = control.unpack(control.LogsQuery, query.body)
        except BadMessage as problem:
            asker.drop(str(problem))
            return
        streams = sum(len(one.streams) for one in self.askers)
        if streams >= STREAMS_MAX or query.id in asker.streams:
            why = f"{streams} streams are open already"
            self._refuse(asker, query, RequestRefusal.TOO_MANY, why)
            return
        stream = LogStream(wanted, self._loop)
        asker.streams[query.id] = stream

        def send(lines: control.LogLines) -> None:
            asker.send(Reply(id=query.id, body=control.pack(lines), last=False))

        def end(why: str) -> None:
            asker.streams.pop(query.id, None)
            stream.close()
            refusal = RequestRefusal.NO_ANSWER.value if why else ""
            asker.send(Reply(id=query.id, refusal=refusal, why=why))

        found = await self._go_on(stream)
        if not found and query.id in asker.streams:
            asker.streams.pop(query.id).close()
            why = (
                "no worker here writes to a file: start the job with --redirects 3 or --tee 3 "
                "(and --log-dir)"
                if not wanted.ranks
                else "none of these ranks is here and writes to a file (--redirects, --tee)"
            )
            self._refuse(asker, query, RequestRefusal.NOT_HERE, why)
            return
        stream.begin(send, end)

    async def _go_on(self, stream: LogStream) -> int:
        """Have a stream read what the workers of this generation write."""
        try:
            generation, files = await self._in_agent(
                lambda: (self._agent.machine.generation, self._agent.log_files)
            )
        except (TimeoutError, RuntimeError):
            return 0
        return stream.add(generation, files)

    async def _history(self, asker: Asker, query: Query) -> None:
        try:
            bodies = await self._in_agent(
                lambda: [control.pack(one) for one in self._door.history.parts(time.monotonic())]
            )
        except (TimeoutError, RuntimeError):
            why = f"the agent's loop did not respond within {LOOP_S:g} s"
            self._refuse(asker, query, RequestRefusal.NO_ANSWER, why)
            return
        for at, body in enumerate(bodies, 1):
            asker.send(Reply(id=query.id, body=body, last=at == len(bodies)))

    async def _stacks(self, asker: Asker, query: Query) -> None:
        try:
            workers = await self._in_agent(lambda: live_workers(self._agent))
        except (TimeoutError, RuntimeError):
            why = f"the agent's loop did not answer within {LOOP_S:g} s"
            self._refuse(asker, query, RequestRefusal.NO_ANSWER, why)
            return
        stacks: list[control.WorkerStacks] = []
        at_once = asyncio.Semaphore(STACKS_AT_ONCE)

        async def dump(rank: int, pid: int) -> None:
            from holdfast.processes.stacks import dump_stacks

            async with at_once:
                text = await asyncio.to_thread(dump_stacks, pid)
                text = text[:STACKS_CHARS_MAX]
                stacks.append(control.WorkerStacks(rank=rank, pid=pid, text=text))

        await asyncio.gather(*(dump(rank, pid) for rank, pid in workers[:WORKERS_REPORTED_MAX]))
        stacks.sort(key=lambda one: one.rank)
        for at in range(0, max(1, len(stacks)), STACKS_IN_REPLY):
            body = control.pack(control.Stacks(workers=stacks[at : at + STACKS_IN_REPLY]))
            last = at + STACKS_IN_REPLY >= len(stacks)
            asker.send(Reply(id=query.id, body=body, last=last))


# What an agent says of itself.


def live_workers(agent: ControlledAgent) -> list[tuple[int, int]]:
    """Return rank and process of the workers that have not exited."""
    workers = agent.group.workers
    return [(workers[rank].global_rank, pid) for rank, pid in sorted(agent.live_workers.items())]


def report_of(door: AgentDoor, agent: ControlledAgent, *, workers: bool = True) -> NodeReport:
    """Return what is to be known of an agent and its workers; in its loop."""
    from holdfast.processes.procfs import usage_of

    machine = agent.machine
    handler: Any = agent.group.spec.rdzv_handler
    history, now = door.history, time.monotonic()
    reports: list[WorkerReport] = []
    if workers:
        live = agent.live_workers
        pages = agent.pages()
        for worker in agent.group.workers[:WORKERS_REPORTED_MAX]:
            pid = live.get(worker.local_rank, 0)
            page = pages.get(worker.local_rank)
            cpu_s, rss_bytes = usage_of(pid) if pid else (-1.0, 0)
            step = page.step if page is not None else None
            reports.append(
                WorkerReport(
                    rank=worker.global_rank,
                    local_rank=worker.local_rank,
                    pid=pid,
                    state="running" if pid else "ended",
                    step=-1 if step is None else step,
                    step_age_s=_age(now, page.step_ns if page is not None else 0),
                    heartbeat_age_s=_age(now, page.heartbeat_ns if page is not None else 0),
                    section=page.sections[-1].name[:255] if page and page.sections else "",
                    cpu_s=cpu_s,
                    rss_bytes=rss_bytes,
                )
            )
    return NodeReport(
        run_id=handler.get_run_id(),
        node=node_name(agent),
        state=machine.state.value,
        generation=machine.generation,
        elapsed_s=history.elapsed_s(now),
        standby_s=history.standby_s(now),
        useful_s=history.useful_s(now),
        counts_steps=history.counts_steps,
        workers=reports,
    )


def node_name(agent: ControlledAgent) -> str:
    """Return the name of this node in its job."""
    handler: object = agent.group.spec.rdzv_handler
    return getattr(handler, "node_id", "") or os.uname().nodename


def own_summary(agent: ControlledAgent, report: NodeReport) -> JobSummary:
    """Return the state of a job that has no coordinator, as far as this node knows it.

    The rendezvous handler may be the user's own: there are other nodes then, which the agent can
    count but not reach.
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
        round=machine.generation,
        generation=machine.generation,
        restarts=machine.restart_count,
        max_restarts=machine.budget.max_restarts,
        present=nodes,
        members=nodes,
        min_nodes=nodes,
        max_nodes=nodes,
        nodes=[node],
        why=machine.asked,
    )


def _age(now: float, at_ns: int) -> float:
    return max(0.0, now - at_ns / 1e9) if at_ns else -1.0


def with_report(summary: JobSummary, report: NodeReport) -> JobSummary:
    """Return a job with what its node here knows of itself."""
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
    lifecycle.Requested: EventKind.REQUESTED,
    lifecycle.CustomEvent: EventKind.CUSTOM,
}


def record_of(node: str, kept: Kept) -> EventRecord:
    """Return a lifecycle event for people."""
    wall, event = kept
    if isinstance(event, lifecycle.WorkersFailed):  # What is known of it came later.
        wall = event.failures[0].wall
    fields = {name: value for name, value in vars(event).items() if value not in (None, "")}
    worker = fields.get("worker")
    rank = worker.global_rank if isinstance(worker, lifecycle.WorkerInfo) else -1
    generation = fields.get("generation", -1)
    return EventRecord(
        wall=max(0.0, wall),
        source=node,
        kind=KINDS[type(event)],
        generation=generation if isinstance(generation, int) else -1,
        rank=rank,
        text=one_line(text_of(event), WHY_CHARS_MAX),
    )


def text_of(event: lifecycle.LifecycleEvent) -> str:
    """Return a lifecycle event as a line."""
    match event:
        case lifecycle.GenerationStarted():
            ranks = ", ".join(f"{one.global_rank} (pid {one.pid})" for one in event.workers)
            return f"generation {event.generation} started: ranks {ranks}"
        case lifecycle.GenerationStopping():
            return f"stopping generation {event.generation}: {event.reason.value}"
        case lifecycle.GenerationStopped():
            return f"generation {event.generation} is gone"
        case lifecycle.WorkersFailed():
            return "; ".join(
                f"rank {one.global_rank} failed: {one.ending}"
                for one in event.failures
                if not one.consequence
            )
        case lifecycle.WorkerEnded():
            how = "was stopped" if event.stopped else "is done"
            if event.failed and not event.stopped:
                how = "exited with an error"
            return f"rank {event.worker.global_rank} (pid {event.worker.pid}) {how}"
        case lifecycle.FirstHeartbeat():
            return f"rank {event.worker.global_rank} runs"
        case lifecycle.RunEnded():
            return f"the run ended: {event.state or event.cut_short}"
        case lifecycle.RendezvousEnded():
            return f"node {event.group_rank} of {event.group_world_size}" if not event.error else ""
        case lifecycle.RanksAssigned():
            return "the workers have their ranks"
        case lifecycle.Requested():
            return event.what
        case lifecycle.WatchdogEvent():
            return f"{event.what} {event.scope}".strip()
    return ""
