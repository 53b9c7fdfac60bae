"""A client of running jobs: reads their state, events, logs and stacks, and requests changes.

    async with await discovery.connect(JobChoice(run_id="nightly")) as job:
        summary = await job.status(watch=True)
        async for event in job.events(follow=True):
            ...

A `JobClient` belongs to one asyncio loop. Any number of calls may be pending at once. Every failure
raises a `ControlProblem` with one line for the user. The client makes all text that it receives
printable, except the output of workers.

A coordinator passes queries on to nodes. In a job without one, the client connects to each agent: at
its socket if the agent is on this machine, otherwise at its port. Connections open when they are first
needed. If an agent is unreachable, the client reports it with the reason and continues with the others.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import secrets
import time
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from holdfast.control.history import NodeHistory, RunEnd
from holdfast.coordinator.connect import CoordinatorConnector
from holdfast.coordinator.connections import ConnectFailed
from holdfast.core.limits import NAME_CHARS_MAX, REQUEST_WHY_CHARS_MAX
from holdfast.core.phases import JobOutcome
from holdfast.core.protocol import Request
from holdfast.core.requests import RequestRefusal
from holdfast.errors import HoldfastError
from holdfast.net.endpoints import format_endpoint
from holdfast.net.listening import raise_descriptor_limit
from holdfast.net.tls import mutual_context
from holdfast.printable import one_line, quoted, visible
from holdfast.wire import messages
from holdfast.wire.frames import FrameReader, encode_frame
from holdfast.wire.handshake import READ_ONLY_ALL_PREFIX
from holdfast.wire.messages import (
    Goodbye,
    JobSummary,
    NodeReport,
    Query,
    Reply,
    decode,
    printable_summary,
)
from holdfast.wire.wire_errors import WireError
from holdfast.wire.wire_limits import STATUS_FRAME_BYTES_MAX

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

    from holdfast.coordinator.connections import ClientConnection
    from holdfast.core.requests import Action
    from holdfast.wire.messages import EventRecord, Message

WATCH_S = 2.5
"""How long to wait for the first report of a node."""
WINDOW_BYTES_MIN = 1_024
CONNECT_S = 5.0
ANSWER_S = 30.0
"""How long a reply may take; longer than any limit of the peer."""
ALIVE_S = 60.0
"""A client that only receives sends something this often: servers close silent connections."""
REPLIES_MAX = 4_096
"""Replies to one query that the reader has not taken yet; log streams have their own limit."""
MANY_AGENTS = 256
"""With more agents, the connections may need more descriptors than a process gets by default."""
CONNECTING_MAX = 32
"""Connections that open at the same time."""
RETRY_AGENT_S = 5.0
"""The pause before another attempt to reach an agent."""
LOOKUP_S = 1.0
"""The minimum time between two lookups of the agents' addresses."""
REPORTS_S = 0.5
"""The shortest time limit for the reports in a status. An earlier, recent report replaces a late one."""
REPORT_S_PER_NODE = 0.005
"""The same limit, per node; several times the cost of opening a connection."""
AGENT = "the agent"
RECENT_S = 5.0
"""How long agents may take to send their recent events."""
KNOWN_MAX = 1_024
"""Events of a node that the client recognizes when it gets them again; the node keeps fewer."""
CLOCKS_DIFFER_S = 0.1
"""A smaller difference may be the delay of the network."""

T = TypeVar("T", bound=msgspec.Struct)


class ControlProblem(HoldfastError):
    """A query or a request to a job failed. The subclass gives the kind of problem."""


class JobUnreachable(ControlProblem):
    """No agent or coordinator of the job responded."""

    exit_code = 69


class JobNotFound(ControlProblem):
    """There is no such job, node or worker, or the job is over."""

    exit_code = 1


class NoLocalAgent(JobNotFound):
    """No agent of the job runs on this machine; there may be others elsewhere."""


class JobOver(JobNotFound):
    """The job is over, with this outcome and for this reason."""

    def __init__(self, message: str, outcome: str, why: str) -> None:
        super().__init__(message)
        self.outcome, self.why = outcome, why


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


class NodeStacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of a node's workers, or the problem that prevented reading them."""

    node: str
    workers: list[messages.WorkerStacks] = []
    problem: str = ""


class JobClient:
    """A client of one job. With an empty run id, a client of all jobs of a coordinator."""

    def __init__(
        self,
        agents: AgentConnections,
        *,
        read_only: bool = False,
        closed: Callable[[], None] | None = None,
    ) -> None:
        self.agents = agents
        self.read_only = read_only
        """Whether this client knows that its token is read-only."""
        self._closed = closed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.agents.close()
        if self._closed is not None:
            self._closed()

    @property
    def run_id(self) -> str:
        return self.agents.own.run_id

    @run_id.setter
    def run_id(self, run_id: str) -> None:
        self.agents.own.run_id = run_id

    @property
    def node(self) -> str:
        """The node whose agent this client is connected to; empty for a coordinator."""
        return self.agents.own.node

    @property
    def is_over(self) -> bool:
        """Whether this client has lost its connection and has no other agent to connect to."""
        return bool(self.agents.own.problem) and not self.agents.is_lost

    @property
    def outcome(self) -> str:
        """How the job ended, if the peer's last message said so."""
        return self.agents.own.outcome

    @property
    def has_left(self) -> bool:
        """Whether a signal stopped the peer, according to its last message."""
        return self.agents.own.has_left

    async def wait_closed(self, limit_s: float) -> None:
        """Wait until the connection has closed, or the time has passed."""
        try:
            async with asyncio.timeout(limit_s):
                await self.agents.own.has_ended.wait()
        except TimeoutError:
            pass

    async def jobs(self) -> list[JobSummary]:
        """Return a summary of every job that this connection can see."""
        return [printable_summary(one) for one in await self._jobs(messages.StatusQuery())]

    async def status(self, *, watch: bool = False, wait_s: float = WATCH_S) -> JobSummary:
        """Return the state of the job. With `watch`, include the nodes' reports about their workers.

        A node that does not report yet has `wait_s` to send its first report.
        """
        jobs = await self._jobs(messages.StatusQuery(watch=watch, wait_s=wait_s if watch else 0.0))
        if not jobs:
            raise JobNotFound(f"there is no job {self.run_id!r} here")
        job = jobs[0]
        missing = [node.node for node in job.nodes if node.report is None]
        if watch and missing and not self.agents.passes_on:
            reports = await self.agents.reports(missing, wait_s)
            nodes = [
                msgspec.structs.replace(one, report=one.report or reports.get(one.node))
                for one in job.nodes
            ]
            job = msgspec.structs.replace(job, nodes=nodes)
        return printable_summary(job)

    async def _jobs(self, query: messages.StatusQuery) -> list[JobSummary]:
        body, limit_s = messages.pack(query), ANSWER_S + query.wait_s
        connection = await self.agents.any_connection()
        try:
            reply = await connection.query(messages.STATUS, body=body, limit_s=limit_s)
        except ControlProblem:
            if not self.agents.is_lost:
                raise
            # The agent has exited: use another one.
            connection = await self.agents.any_connection()
            reply = await connection.query(messages.STATUS, body=body, limit_s=limit_s)
        return unpacked(messages.JobSummaries, reply.body).jobs

    async def request(
        self,
        action: Action,
        *,
        node: str = "",
        why: str = "",
        grace_s: float = -1.0,
        request_id: str = "",
    ) -> str:
        """Submit a request. If it is refused, raise `ControlProblem` with the reason.

        Return an empty string. If the request changes nothing, return the reason instead: for example,
        the node is drained already.
        """
        request = Request(
            id=request_id or secrets.token_hex(8),
            action=action.value,
            node=node,
            grace_s=grace_s,
            who=author(),
            why=one_line(why, REQUEST_WHY_CHARS_MAX),
        )
        connection = await self.agents.any_connection()
        reply = await connection.query(messages.ACT, body=messages.pack(request))
        return one_line(reply.why)

    async def events(self, *, follow: bool = False, node: str = "") -> AsyncIterator[EventRecord]:
        """Yield the recent events. With `follow`, then yield each new event."""
        if self.agents.passes_on or node:
            connection = await self.agents.at(node)
            async for found in events_at(connection, follow=follow, node=node):
                for event in found.events:
                    yield printable_event(event)
            return
        merged = MergedEvents(self.agents)
        try:
            for event in await merged.recent_events():
                yield event
            while follow:
                yield await merged.next()
        finally:
            merged.close()

    async def logs(
        self, node: str, wanted: messages.LogsQuery, *, streams: int = 1
    ) -> AsyncIterator[messages.LogLines]:
        """Yield the output of a node's workers.

        `streams` is the number of nodes that the client reads at the same time; they share its buffer.
        """
        room = max(WINDOW_BYTES_MIN, messages.WINDOW_BYTES // max(1, streams))
        query = msgspec.structs.replace(wanted, room=room)
        taken = 0
        connection = await self.agents.at(node)
        async for reply in connection.stream(messages.LOGS, node=node, body=messages.pack(query)):
            if not reply.body:
                continue
            lines = unpacked(messages.LogLines, reply.body)
            yield lines
            taken += len(lines.text)
            if taken >= room // 2:
                more = messages.pack(messages.StreamCredit(size=taken))
                connection.send(
                    Query(id=reply.id, what=messages.MORE, run_id=self.run_id, body=more)
                )
                taken = 0

    async def stacks(self, node: str) -> NodeStacks:
        """Return the stacks of a node's workers."""
        workers: list[messages.WorkerStacks] = []
        try:
            async with asyncio.timeout(ANSWER_S):
                connection = await self.agents.at(node)
                async for reply in connection.stream(messages.STACKS, node=node):
                    found = unpacked(messages.Stacks, reply.body).workers
                    workers += [
                        msgspec.structs.replace(one, text=visible(one.text)) for one in found
                    ]
        except ControlProblem as problem:
            return NodeStacks(node=node, workers=workers, problem=problem.message)
        except TimeoutError:
            return NodeStacks(
                node=node, workers=workers, problem=f"no response within {ANSWER_S:g} s"
            )
        return NodeStacks(node=node, workers=workers)

    async def history(self, node: str) -> list[NodeHistory]:
        """Return a node's history of the newest generations."""
        try:
            async with asyncio.timeout(ANSWER_S):
                connection = await self.agents.at(node)
                replies = connection.stream(messages.HISTORY, node=node)
                found = [unpacked(NodeHistory, reply.body) async for reply in replies]
        except TimeoutError:
            raise JobUnreachable(f"{node} did not respond within {ANSWER_S:g} s") from None
        for one in (one for part in found for one in part.generations):
            one.why, one.reason = one_line(one.why), one_line(one.reason)
            one.detail, one.cause = one_line(one.detail), one_line(one.cause)
        return found


def check_same_job(client: JobClient, run_id: str) -> JobClient:
    """Return a new client of a watched job; raise if that job is over and its name only begins another job's."""
    if run_id and client.run_id != run_id and client.run_id.startswith(run_id):
        client.close()
        raise NoLocalAgent(f"no agent of job {run_id!r} runs on this machine")
    return client


def end_shown_by(
    problem: JobNotFound, hosts: Iterable[str], *, has_left: bool
) -> tuple[str, str] | None:
    """Return the outcome of a job and the reason, if the problem shows that a watched job is over.

    `hosts` are those of the job's nodes, and `has_left` means that a signal stopped the last known agent.
    """
    if isinstance(problem, JobOver):
        return problem.outcome, problem.why
    here = os.uname().nodename
    if isinstance(problem, NoLocalAgent) and any(host != here for host in hosts):
        return None
    if has_left:
        return JobOutcome.STOPPED.value, messages.ALL_LEFT
    return RunEnd.LOST.value, "all its agents have exited"


def author() -> str:
    """Return the name that requests carry as their author: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return one_line(f"{user}@{os.uname().nodename}", NAME_CHARS_MAX)


# Connections: queries and their replies, one connection per agent or coordinator.


class ControlConnection:
    """A connection to a coordinator or an agent, with the queries that have no reply yet.

    A subclass, or an opener below, provides `send` and `close`.
    """

    def __init__(self, run_id: str, node: str = "") -> None:
        self.run_id = run_id
        self.node = node
        """The node whose agent is the peer; empty for a coordinator."""
        self.problem = ""
        """Why the connection has ended, if it has."""
        self.outcome = ""
        """How the job ended, if the peer's last message said so; `problem` is then the reason."""
        self.has_left = False
        """Whether a signal stopped the peer, according to its last message."""
        self.has_ended = asyncio.Event()
        self.send: Callable[[Query], None]
        self.close: Callable[[], object]
        self._replies: dict[int, asyncio.Queue[Reply]] = {}
        self._ids = 0

    def use(self, connection: ClientConnection) -> None:
        connection.expect_large(STATUS_FRAME_BYTES_MAX)
        connection.on_message = self.received
        connection.on_closed = lambda why: self.ended(why, connection.goodbye)
        self.send, self.close = connection.send_whole, connection.abort

    async def query(self, what: str, *, body: bytes = b"", limit_s: float = ANSWER_S) -> Reply:
        """Send a query and return its only reply."""
        number, replies = self._begin()
        try:
            self.send(Query(id=number, what=what, run_id=self.run_id, body=body))
            async with asyncio.timeout(limit_s):
                return self._checked(await replies.get())
        except TimeoutError:
            self.ended(f"no response within {limit_s:g} s")
            self.close()
            raise JobUnreachable(self.problem) from None
        finally:
            del self._replies[number]

    async def stream(self, what: str, *, node: str = "", body: bytes = b"") -> AsyncIterator[Reply]:
        """Send a query and yield its replies; an empty last reply is omitted."""
        number, replies = self._begin()
        is_over = False
        try:
            self.send(Query(id=number, what=what, run_id=self.run_id, node=node, body=body))
            while not is_over:
                try:
                    async with asyncio.timeout(ALIVE_S):
                        reply = await replies.get()
                except TimeoutError:
                    body = messages.pack(messages.StreamCredit(size=0))
                    self.send(Query(id=number, what=messages.MORE, run_id=self.run_id, body=body))
                    continue
                is_over = reply.last or bool(reply.refusal)
                if self._checked(reply).body:
                    yield reply
        finally:
            del self._replies[number]
            if not is_over and not self.problem:
                self.send(Query(id=number, what=messages.CANCEL, run_id=self.run_id))

    def _begin(self) -> tuple[int, asyncio.Queue[Reply]]:
        self._check()
        self._ids += 1
        queue: asyncio.Queue[Reply] = asyncio.Queue()
        self._replies[self._ids] = queue
        return self._ids, queue

    def _checked(self, reply: Reply) -> Reply:
        """Return a reply; if it is a refusal, raise the matching error."""
        if not reply.refusal:
            return reply
        why = one_line(reply.why) or reply.refusal
        if reply.refusal == RequestRefusal.NO_ANSWER.value:
            if self.outcome:
                self._check()
            raise JobUnreachable(why)
        if reply.refusal == RequestRefusal.NO_SUCH_JOB.value:
            raise JobNotFound(why)
        raise RequestRefused(why, reply.refusal)

    def _check(self) -> None:
        """Raise if the connection has ended."""
        if self.outcome:
            raise JobOver(f"the job is over: {self.outcome}", self.outcome, self.problem)
        if self.problem:
            raise JobUnreachable(self.problem)

    def received(self, message: Message) -> None:
        if isinstance(message, Goodbye):
            self.ended(quoted(message.why) or "the connection was closed", message)
        elif isinstance(message, Reply):
            queue = self._replies.get(message.id)
            if queue is not None and queue.qsize() < REPLIES_MAX:
                queue.put_nowait(message)
            elif queue is not None:
                self.ended("receive buffer overflow; closing the connection")
                self.close()

    def ended(self, why: str, last: Goodbye | None = None) -> None:
        if self.problem:
            return
        self.problem = why
        if last is not None:
            self.outcome, self.has_left = quoted(last.outcome), last.left
        self.has_ended.set()
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
            self._closed(f"the agent sent an invalid message: {problem}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed(str(exc) if exc else "the agent has exited")

    def send(self, message: Query) -> None:
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def open_endpoint(endpoint: Endpoint) -> ControlConnection:
    """Return a connection to a coordinator."""
    is_for_all = endpoint.token is not None and endpoint.token.startswith(READ_ONLY_ALL_PREFIX)
    connector = CoordinatorConnector(
        endpoint.host,
        endpoint.port,
        run_id="" if is_for_all else endpoint.run_id,
        token=endpoint.token,
        tls=endpoint.tls,
        server_name=endpoint.server_name,
        own_users_only=endpoint.token is None,
    )
    where = f"the coordinator at {endpoint.host}:{endpoint.port}"
    try:
        connection = await connector.connect()
    except ConnectFailed as problem:
        raise JobUnreachable(f"cannot connect to {where}: {problem.why}") from None
    opened = ControlConnection(endpoint.run_id)
    opened.use(connection)
    return opened


async def open_socket(path: str, run_id: str, node: str = "") -> ControlConnection:
    """Return a connection to an agent at its own socket."""
    opened = ControlConnection(run_id, node)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            _, protocol = await loop.create_unix_connection(
                lambda: _AtSocket(opened.received, opened.ended), path
            )
    except (OSError, TimeoutError) as problem:
        why = getattr(problem, "strerror", "") or "no response"
        raise JobUnreachable(f"cannot connect to {path}: {why}") from None
    opened.send, opened.close = protocol.send, protocol.close
    return opened


async def open_contact(
    contact: messages.Contact, run_id: str, found: messages.Contacts, tls: ssl.SSLContext | None
) -> ControlConnection:
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
    opened = ControlConnection(run_id, contact.node)
    try:
        opened.use(await connector.connect())
    except ConnectFailed as problem:
        raise JobUnreachable(f"cannot connect to {name_of_agent(contact)}: {problem.why}") from None
    return opened


def tls_of(found: messages.Contacts) -> ssl.SSLContext | None:
    """Return the TLS context for connections to agents; None if they are not encrypted."""
    if not found.pem:
        return None
    try:
        ca, cert, key = found.pem
        return mutual_context(ca, cert, key, serving=False)
    except (ValueError, OSError) as problem:  # An `SSLError` is both.
        raise JobUnreachable(f"the certificates of the job are not usable: {problem}") from None


def name_of_agent(contact: messages.Contact) -> str:
    """Return the agent's name for a message."""
    return f"{AGENT} at {format_endpoint(quoted(contact.address), contact.port)}"


def unpacked(kind: type[T], body: bytes) -> T:
    """Return the struct in the body of a reply."""
    try:
        return messages.unpack(kind, body)
    except WireError as problem:
        raise JobUnreachable(f"the reply is not valid: {problem}") from None


class AgentConnections:
    """The connections of a client: `own` to one agent or the coordinator, and others to further agents.

    With `passes_on`, the peer of `own` answers for all nodes. `local_sockets` maps nodes to the sockets of their
    agents on this machine. `read_contacts` returns the contacts of the other agents. `reopen` returns a connection
    to another agent, which replaces `own`.
    """

    def __init__(
        self,
        own: ControlConnection,
        *,
        passes_on: bool,
        local_sockets: Mapping[str, str] | None = None,
        read_contacts: Callable[[], Awaitable[messages.Contacts]] | None = None,
        reopen: Callable[[], Awaitable[ControlConnection]] | None = None,
        found: messages.Contacts | None = None,
    ) -> None:
        self.passes_on = passes_on
        self.on_unreached: Callable[[str], object] = lambda _: None
        """Receives one line per unreachable agent and reason."""
        self.own = own
        self._reopen = reopen
        self._reopening = asyncio.Lock()
        self._local_sockets = dict(local_sockets or {})
        self._read_contacts = read_contacts or self._query_own
        self._lookup_at = -LOOKUP_S
        self._lookup_lock = asyncio.Lock()
        self._found = messages.Contacts()
        self._contacts: dict[str, messages.Contact] = {}
        self._tls: ssl.SSLContext | None = None
        self._opened: dict[str, ControlConnection] = {}
        self._opening: dict[str, asyncio.Task[ControlConnection | ControlProblem]] = {}
        self._turns = asyncio.Semaphore(CONNECTING_MAX)
        self._unreached: dict[str, tuple[float, ControlProblem]] = {}
        self._reporting: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, tuple[float, NodeReport]] = {}
        if found is not None:
            self._set_contacts(found)

    def close(self) -> None:
        for task in (*self._opening.values(), *self._reporting.values()):
            task.cancel()
        for one in (self.own, *self._opened.values()):
            one.close()

    @property
    def unreached(self) -> list[str]:
        """One line per node whose agent is unreachable now."""
        return [_about(node, problem) for node, (_, problem) in sorted(self._unreached.items())]

    @property
    def is_lost(self) -> bool:
        """Whether the agent at `own` has exited, and another can replace it."""
        return bool(self.own.problem) and not self.own.outcome and self._reopen is not None

    async def any_connection(self) -> ControlConnection:
        """Return a connection for queries about the whole job. If its agent has exited, use another agent."""
        async with self._reopening:
            if self._reopen is not None and self.is_lost:
                self.own = await self._reopen()
            return self.own

    async def at(self, node: str) -> ControlConnection:
        """Return the connection for queries about a node; raise `ControlProblem` without one."""
        is_own = node == self.own.node and not self.is_lost
        if not node or is_own or (self.passes_on and node not in self._local_sockets):
            return await self.any_connection()
        opened = self._opened.get(node)
        if opened is not None and not opened.problem:
            return opened
        again_at, problem = self._unreached.get(node, (0.0, None))
        if problem is not None and asyncio.get_running_loop().time() < again_at:
            raise problem
        if node not in self._opening:
            self._opening[node] = asyncio.ensure_future(self._open(node))
        outcome = await asyncio.shield(self._opening[node])
        if isinstance(outcome, ControlProblem):
            raise outcome
        return outcome

    async def nodes(self) -> list[str]:
        """Return the nodes of all known agents, starting with the node of `own`."""
        try:
            await self._refresh_contacts()
        except ControlProblem as problem:
            if self.own.problem:
                raise
            self.on_unreached(problem.message)
        own = () if self.is_lost else (self.own.node,)
        return [*dict.fromkeys((*own, *self._contacts))]

    async def _open(self, node: str) -> ControlConnection | ControlProblem:
        try:
            async with self._turns:
                path = self._local_sockets.get(node)
                if path is not None:
                    opened = await open_socket(path, self.own.run_id, node)
                else:
                    contact = await self._contact_of(node)
                    run_id = self.own.run_id
                    opened = await open_contact(contact, run_id, self._found, self._tls)
        except ControlProblem as problem:
            self._contacts.pop(node, None)  # The node may have another address by now.
            again_at = asyncio.get_running_loop().time() + RETRY_AGENT_S
            known = self._unreached.get(node)
            self._unreached[node] = (again_at, problem)
            if known is None or known[1].message != problem.message:
                self.on_unreached(_about(node, problem))
            return problem
        finally:
            del self._opening[node]
        self._unreached.pop(node, None)
        self._opened[node] = opened
        return opened

    async def _contact_of(self, node: str) -> messages.Contact:
        if node not in self._contacts:
            await self._refresh_contacts()
        contact = self._contacts.get(node)
        if contact is None:
            raise JobNotFound("the node is not in the job")
        if not contact.port:
            raise JobUnreachable("its agent is reachable only from its own host (control=off)")
        return contact

    async def _refresh_contacts(self) -> None:
        """Look up the contacts of the agents, unless the last lookup is recent."""
        async with self._lookup_lock:
            now = asyncio.get_running_loop().time()
            if now - self._lookup_at >= LOOKUP_S:
                self._lookup_at = now
                self._set_contacts(await self._read_contacts())

    def _set_contacts(self, found: messages.Contacts) -> None:
        if found.pem and found.pem != self._found.pem:
            self._tls = tls_of(found)
        if len(found.contacts) > MANY_AGENTS:
            raise_descriptor_limit()
        self._found = found
        self._contacts = {one.node: one for one in found.contacts}

    async def _query_own(self) -> messages.Contacts:
        found = messages.Contacts()
        async for reply in self.own.stream(messages.CONTACTS):
            part = unpacked(messages.Contacts, reply.body)
            contacts = found.contacts + part.contacts
            found = msgspec.structs.replace(part, contacts=contacts, pem=part.pem or found.pem)
        return found

    # Reports.

    async def reports(self, nodes: Sequence[str], wait_s: float) -> dict[str, NodeReport]:
        """Return new reports of the nodes that respond in time, and recent ones of the others."""
        loop = asyncio.get_running_loop()
        for node in nodes:
            if node not in self._reporting:
                self._reporting[node] = asyncio.ensure_future(self._report_of(node))
        limit_s = max(wait_s, REPORTS_S, REPORT_S_PER_NODE * len(nodes))
        await asyncio.wait([self._reporting[node] for node in nodes], timeout=limit_s)
        recent = loop.time() - RETRY_AGENT_S
        names = {*nodes}
        self._reports = {
            node: one for node, one in self._reports.items() if node in names and one[0] >= recent
        }
        self._unreached = {node: one for node, one in self._unreached.items() if node in names}
        for node in nodes:
            if node in self._reporting and node not in self._reports:
                contact = self._contacts.get(node)
                who = name_of_agent(contact) if contact is not None else AGENT
                late = JobUnreachable(f"no response from {who} within {limit_s:g} s")
                self._unreached.setdefault(node, (loop.time(), late))
        return {node: report for node, (_, report) in self._reports.items()}

    async def _report_of(self, node: str) -> None:
        try:
            connection = await self.at(node)
            reply = await connection.query(messages.REPORT)
            report = unpacked(NodeReport, reply.body)
        except ControlProblem as problem:
            again_at = asyncio.get_running_loop().time() + RETRY_AGENT_S
            self._unreached.setdefault(node, (again_at, problem))
        else:
            self._reports[node] = (asyncio.get_running_loop().time(), report)
            self._unreached.pop(node, None)
        finally:
            del self._reporting[node]


def _about(node: str, problem: ControlProblem) -> str:
    return f"{quoted(node)}: {problem.message}"


# The events of a job without a coordinator: those of all its agents, in one order.


async def events_at(
    connection: ControlConnection, *, follow: bool, node: str = ""
) -> AsyncIterator[messages.Events]:
    """Yield the recent events that a peer knows; with `follow`, also each new one."""
    body = messages.pack(messages.EventsQuery(follow=follow))
    async for reply in connection.stream(messages.EVENTS, node=node, body=body):
        yield unpacked(messages.Events, reply.body)


class MergedEvents:
    """The events of all agents of a job without a coordinator, in one order.

    Recent events are ordered by their age, because the clocks of hosts may differ; new events by their
    arrival. Agents that join or rejoin later are followed too.
    """

    def __init__(self, agents: AgentConnections) -> None:
        self._agents = agents
        self._skews: dict[str, float] = {}  # How far this clock is ahead of a node's.
        # The newest known events of each node.
        self._known: dict[str, dict[EventRecord, None]] = {}
        self._fresh: asyncio.Queue[EventRecord] = asyncio.Queue(REPLIES_MAX)
        self._changed = asyncio.Event()
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._again_at: dict[str, float] = {}  # When to try a silent agent again.
        self._followed: set[str] = set()
        self._watching: asyncio.Task[None] | None = None
        self._end: ControlProblem = JobUnreachable("all agents have exited")

    def close(self) -> None:
        for task in (*self._listening.values(), *([self._watching] if self._watching else ())):
            task.cancel()

    async def recent_events(self) -> list[EventRecord]:
        """Return the recent events of the agents that respond in time."""
        asked = [asyncio.ensure_future(self._kept_of(node)) for node in await self._agents.nodes()]
        done, late = await asyncio.wait(asked, timeout=RECENT_S)
        for one in late:
            one.cancel()
        found: list[EventRecord] = []
        problems: list[ControlProblem] = []
        for one in done:
            try:
                found += one.result()
            except ControlProblem as problem:
                problems.append(problem)
        if len(problems) == len(asked):
            raise problems[0]
        return sorted(found, key=lambda event: event.wall)

    async def next(self) -> EventRecord:
        """Return the next event; raise `ControlProblem` once no agent is left."""
        while True:
            if self._watching is None:
                self._watching = asyncio.ensure_future(self._watch())
            fresh = asyncio.ensure_future(self._fresh.get())
            try:
                await asyncio.wait((fresh, self._watching), return_when=asyncio.FIRST_COMPLETED)
                if fresh.done():
                    return fresh.result()
                self._watching.result()
            finally:
                fresh.cancel()
            if not self._agents.is_lost:
                raise self._end
            try:
                await self._agents.any_connection()
            except ControlProblem as problem:
                # Report that the job is over. If the etcd of --ha has exited too, `_end` explains more.
                raise (problem if isinstance(problem, JobNotFound) else self._end) from None
            self._watching = None
            await asyncio.sleep(LOOKUP_S)

    async def _kept_of(self, node: str) -> list[EventRecord]:
        connection = await self._agents.at(node)
        async for found in events_at(connection, follow=False):
            self._new_events(node, found)
        return [self._with_local_time(node, event) for event in self._known.get(node, ())]

    async def _watch(self) -> None:
        """Follow all agents, also those that join later, until none is left."""
        now = asyncio.get_running_loop().time
        while True:
            try:
                nodes = await self._agents.nodes()
            except ControlProblem:
                nodes = []  # Continue with the agents that are followed already.
            for node in nodes:
                if node not in self._listening and now() >= self._again_at.get(node, 0.0):
                    self._listening[node] = asyncio.ensure_future(self._listen(node))
            self._again_at = {node: at for node, at in self._again_at.items() if node in nodes}
            if not self._listening:
                return
            self._changed.clear()
            try:
                # An agent may be unreachable for a while, as long as others send events.
                async with asyncio.timeout(
                    RETRY_AGENT_S if self._again_at and self._followed else None
                ):
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(LOOKUP_S)

    async def _listen(self, node: str) -> None:
        try:
            connection = await self._agents.at(node)
            self._followed.add(node)
            self._again_at.pop(node, None)
            async for found in events_at(connection, follow=True):
                for event in self._new_events(node, found):
                    await self._fresh.put(self._with_local_time(node, event))
                self._changed.set()
        except ControlProblem as problem:
            self._end = problem
        finally:
            self._followed.discard(node)
            self._again_at[node] = asyncio.get_running_loop().time() + RETRY_AGENT_S
            del self._listening[node]
            self._changed.set()

    def _new_events(self, node: str, found: messages.Events) -> list[EventRecord]:
        """Note some events of a node; return the new ones."""
        if found.now:
            skew = time.time() - found.now
            self._skews[node] = min(self._skews.get(node, skew), skew)
        known = self._known.setdefault(node, {})
        fresh = [event for event in found.events if event not in known]
        known.update(dict.fromkeys(fresh))
        for old in [*known][: max(0, len(known) - KNOWN_MAX)]:
            del known[old]
        return fresh

    def _with_local_time(self, node: str, event: EventRecord) -> EventRecord:
        """Return an event with its time by this clock."""
        skew = self._skews.get(node, 0.0)
        if abs(skew) >= CLOCKS_DIFFER_S:
            event = msgspec.structs.replace(event, wall=max(0.0, event.wall + skew))
        return printable_event(event)


def printable_event(event: EventRecord) -> EventRecord:
    """Return an event whose texts are safe to print."""
    return msgspec.structs.replace(event, source=quoted(event.source), text=one_line(event.text))
