"""A client of running jobs: what they are doing, what happens in them, and what is asked of them.

    async with await open_job(find_one("nightly")) as job:
        summary = await job.status(watch=True)
        async for event in job.events(follow=True):
            ...

A place is where a job can be reached: the socket of one of its agents on this machine, its
coordinator, or where its agents have stored their control ports. What can be asked is the same at all.
Where no coordinator passes on what is asked of a node, its agent is asked directly, by a connection
that is opened when it is first needed. A `JobClient` belongs to one loop; any number of calls may be
under way at once. Whatever goes wrong is a `ControlProblem`, with one line for a person;
a refusal has its reason besides.

All text that comes from others is made printable here, but for what workers wrote themselves.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import secrets
import time
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from holdfast.control.directory import Directory
from holdfast.control.runtime_dir import sockets_here
from holdfast.coordinator.connect import ConnectFailed, CoordinatorConnector
from holdfast.core.protocol import (
    ASKED_WHY_CHARS_MAX,
    NAME_CHARS_MAX,
    Action,
    Request,
    RequestRefusal,
)
from holdfast.errors import HoldfastError, UsageError
from holdfast.net.endpoints import format_endpoint
from holdfast.printable import one_line, quoted, visible
from holdfast.wire import control
from holdfast.wire.errors import WireError
from holdfast.wire.frames import FrameReader, encode_frame
from holdfast.wire.handshake import READ_ONLY_ALL_PREFIX, READ_ONLY_PREFIX
from holdfast.wire.limits import STATUS_FRAME_BYTES_MAX
from holdfast.wire.messages import (
    VERSION_WITH_QUERIES,
    Goodbye,
    JobSummary,
    NodeReport,
    Query,
    Reply,
    StatusReply,
    StatusRequest,
    decode,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
    from types import TracebackType

    from holdfast.coordinator.connect import ClientConnection
    from holdfast.wire.messages import EventRecord, Message

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

CONNECT_S = 5.0
ANSWER_S = 30.0
"""How long a question may take; more than any part of it may where it is answered."""
WATCH_S = 2.5
"""How long nodes that are first asked to report have for it; in its first second none does."""
LOOK_AGAIN_S = 0.1
COORDINATED = ("c10d", "static")
"""The backends whose jobs have a coordinator, of agents that do not say."""
AGENT = "the agent"
MANY_AGENTS = 256
"""From so many on their connections may need more descriptors than a process is given."""
CONNECTING_MAX = 32
"""Agents to which connections are opened at the same time."""
STAGGER_S = 0.5
"""After this time without an answer of an agent the next one is tried besides."""
AGAIN_S = 5.0
"""An agent that could not be reached is not tried again before that."""
LOOK_S = 1.0
"""How often it is looked where the agents are, at most."""
REPORTS_S = 0.5
"""How long a status waits for agents, at least; what they reported in the last seconds is shown."""
REPORT_S_PER_NODE = 0.005
"""The work of opening one connection, several times over."""
KEPT_S = 5.0
"""How long agents have to tell what has happened, before those that did are listened to."""
TOLD_MAX = 1_024
"""Events of a node that are known again; it keeps fewer itself."""
CLOCKS_DIFFER_S = 0.1
"""What is less than that may be the way there as well."""
ALIVE_S = 60.0
"""One who only listens says so often that it is there; connections that are silent for long are closed."""
ROOM_MIN_BYTES = 1_024
REPLIES_MAX = 4_096
"""Of one question, that wait to be taken; streams are limited by the room they are given."""
UNREACHABLE, REFUSED, NOT_FOUND = 69, 1, 1


class ControlProblem(HoldfastError):
    """A job could not be asked, or refused what was asked for; `refusal` is why, if it did."""

    exit_code = UNREACHABLE

    def __init__(
        self, message: str, refusal: str = "", *, hint: str = "", exit_code: int | None = None
    ) -> None:
        if exit_code is None:
            is_reached = refusal not in ("", RequestRefusal.NO_ANSWER.value)
            exit_code = REFUSED if is_reached else UNREACHABLE
        super().__init__(message, hint=hint, exit_code=exit_code)
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


class LocalJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that an agent on this machine is in."""

    path: str
    here: control.Here


Place = Endpoint | LocalJob | Directory


class NodeStacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of a node's workers, or why they are not known."""

    node: str
    workers: list[control.WorkerStacks] = []
    problem: str = ""


class _Line(asyncio.Protocol):
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

    def send(self, message: Query | StatusRequest) -> None:
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class JobClient:
    """A connection to a job, or with an empty run id to all of a coordinator."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.on_unreached: Callable[[str], object] = lambda _: None
        """Gets a line about each agent that cannot be asked, once for each reason."""
        self.node = ""
        """The node whose agent this is a connection to; empty at a coordinator."""
        self.read_only = False
        """Whether it is known that nothing can be changed over this connection."""
        self._is_coordinated = True  # So that all nodes report, if they are asked to.
        self._beside: dict[str, LocalJob] = {}
        self._look: Callable[[], Awaitable[control.Contacts]] | None = None
        self._directory: Directory | None = None
        self._contacts: dict[str, control.Contact] = {}
        self._found = control.Contacts()
        self._tls: ssl.SSLContext | None = None
        self._looked_at = -LOOK_S
        self._looking = asyncio.Lock()
        self._opened: dict[str, JobClient] = {}
        self._opening: dict[str, asyncio.Task[JobClient | ControlProblem]] = {}
        self._turns = asyncio.Semaphore(CONNECTING_MAX)
        self._unreached: dict[str, tuple[float, ControlProblem]] = {}
        self._reporting: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, tuple[float, NodeReport]] = {}
        self._send: Callable[[Query | StatusRequest], None]
        self._close: Callable[[], object]
        self._replies: dict[int, asyncio.Queue[Reply | StatusReply]] = {}
        self._ids = 0
        self._problem = ""
        self._streams = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in (*self._opening.values(), *self._reporting.values()):
            task.cancel()
        for one in self._opened.values():
            one._close()
        self._close()
        if self._directory is not None:
            self._directory.close()

    # The agents of a job without a coordinator.

    async def _at(self, node: str) -> JobClient:
        """Return whom to ask about a node: its own agent, if that is on this machine, or must be."""
        if node in ("", self.node) or (self._is_coordinated and node not in self._beside):
            return self
        opened = self._opened.get(node)
        if opened is not None and not opened._problem:
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

    async def _open(self, node: str) -> JobClient | ControlProblem:
        try:
            async with self._turns:
                place = self._beside.get(node)
                if place is not None:
                    opened = await _open_local(place.path, self.run_id)
                else:
                    contact = await self._contact_of(node)
                    opened = await _open_contact(contact, self.run_id, self._found, self._tls)
        except ControlProblem as problem:
            self._contacts.pop(node, None)  # It may be elsewhere by now.
            again_at = asyncio.get_running_loop().time() + AGAIN_S
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

    async def _contact_of(self, node: str) -> control.Contact:
        if node not in self._contacts:
            await self._look_again()
        contact = self._contacts.get(node)
        if contact is None:
            raise ControlProblem("it is not in the job any more, or not yet")
        if not contact.port:
            raise ControlProblem(
                "its agent can be asked on its own machine alone: control=off, or an older version of "
                "Holdfast"
            )
        return contact

    async def _look_again(self) -> None:
        """Look where the agents are, unless that was done just now."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if self._look is None or now - self._looked_at < LOOK_S:
                return
            self._looked_at = now
            self._take_contacts(await self._look())

    def _take_contacts(self, found: control.Contacts) -> None:
        if found.pem and found.pem != self._found.pem:
            self._tls = _tls_of(found)
        if len(found.contacts) > MANY_AGENTS:
            from holdfast.net.listening import raise_descriptor_limit

            raise_descriptor_limit()
        self._found = found
        self._contacts = {one.node: one for one in found.contacts}

    async def _ask_contacts(self) -> control.Contacts:
        found = control.Contacts()
        async for reply in self._many(control.CONTACTS):
            part = _unpacked(control.Contacts, reply.body)
            contacts = found.contacts + part.contacts
            found = msgspec.structs.replace(part, contacts=contacts, pem=part.pem or found.pem)
        return found

    @property
    def unreached(self) -> list[str]:
        """A line about each node whose agent cannot be asked now."""
        return [_about(node, problem) for node, (_, problem) in sorted(self._unreached.items())]

    # What can be asked.

    async def jobs(self) -> list[JobSummary]:
        """Return all jobs that can be seen here, in short."""
        reply = await self._one(lambda number: StatusRequest(id=number, run_id=self.run_id))
        assert isinstance(reply, StatusReply)
        return [_printable(one) for one in reply.jobs]

    async def status(self, *, watch: bool = False, wait_s: float = WATCH_S) -> JobSummary:
        """Return the state of the job; with `watch` the nodes report about their workers.

        The first time that takes a moment, for which `wait_s` is the limit; from then on what they
        last reported is there at once.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            reply = await self._one(
                lambda number: StatusRequest(id=number, run_id=self.run_id, watch=watch)
            )
            assert isinstance(reply, StatusReply)
            if not reply.jobs:
                raise ControlProblem(
                    f"there is no job {self.run_id!r} here", RequestRefusal.NO_SUCH_JOB.value
                )
            job = reply.jobs[0]
            is_whole = all(node.report is not None for node in job.nodes)
            is_late = asyncio.get_running_loop().time() >= deadline
            if watch and not is_whole and not self._is_coordinated:
                return _printable(await self._with_reports(job, wait_s))
            if not watch or is_whole or is_late:
                return _printable(job)
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _with_reports(self, job: JobSummary, wait_s: float) -> JobSummary:
        """Return a job that has no coordinator with what its agents report, as far as they do in time."""
        loop = asyncio.get_running_loop()
        missing = [one.node for one in job.nodes if one.report is None]
        for node in missing:
            if node not in self._reporting:
                self._reporting[node] = asyncio.ensure_future(self._report_of(node))
        tasks = [self._reporting[node] for node in missing]
        limit_s = max(wait_s, REPORTS_S, REPORT_S_PER_NODE * len(missing))
        await asyncio.wait(tasks, timeout=limit_s)
        recent = loop.time() - AGAIN_S
        names = {one.node for one in job.nodes}
        self._reports = {
            node: one for node, one in self._reports.items() if node in names and one[0] >= recent
        }
        self._unreached = {node: one for node, one in self._unreached.items() if node in names}
        for node in missing:
            if node in self._reporting and node not in self._reports:
                contact = self._contacts.get(node)
                who = _named(contact) if contact is not None else AGENT
                late = ControlProblem(f"no answer of {who} in {limit_s:g} s")
                self._unreached.setdefault(node, (loop.time(), late))
        nodes = [
            one
            if one.node not in self._reports or one.report is not None
            else msgspec.structs.replace(one, report=self._reports[one.node][1])
            for one in job.nodes
        ]
        return msgspec.structs.replace(job, nodes=nodes)

    async def _report_of(self, node: str) -> None:
        try:
            at = await self._at(node)
            reply = await at._ask(control.REPORT)
            report = _unpacked(NodeReport, reply.body)
        except ControlProblem as problem:
            again_at = asyncio.get_running_loop().time() + AGAIN_S
            self._unreached.setdefault(node, (again_at, problem))
        else:
            self._reports[node] = (asyncio.get_running_loop().time(), report)
            self._unreached.pop(node, None)
        finally:
            del self._reporting[node]

    async def request(
        self,
        action: Action,
        *,
        node: str = "",
        why: str = "",
        grace_s: float = -1.0,
        request_id: str = "",
    ) -> None:
        """Ask for something; raise `ControlProblem` with the reason if it is refused."""
        request = Request(
            id=request_id or secrets.token_hex(8),
            action=action.value,
            node=node,
            grace_s=grace_s,
            who=who_asks(),
            why=one_line(why, ASKED_WHY_CHARS_MAX),
        )
        await self._ask(control.ACT, body=control.pack(request))

    async def events(self, *, follow: bool = False, node: str = "") -> AsyncIterator[EventRecord]:
        """Yield the events that are kept, and with `follow` each as it comes."""
        if self._is_coordinated or node:
            at = await self._at(node)
            async for found in at._portions(follow=follow, node=node):
                for event in found.events:
                    yield _printable_event(event)
            return
        merged = _MergedEvents(self)
        try:
            for event in await merged.kept():
                yield event
            while follow:
                yield await merged.next()
        finally:
            merged.close()

    async def _portions(self, *, follow: bool, node: str = "") -> AsyncIterator[control.Events]:
        body = control.pack(control.EventsQuery(follow=follow))
        async for reply in self._many(control.EVENTS, node=node, body=body):
            yield _unpacked(control.Events, reply.body)

    async def logs(
        self, node: str, wanted: control.LogsQuery, *, streams: int = 1
    ) -> AsyncIterator[control.LogLines]:
        """Yield what workers of a node wrote; `streams` are read at the same time."""
        room = max(ROOM_MIN_BYTES, control.WINDOW_BYTES // max(1, streams))
        query = msgspec.structs.replace(wanted, room=room)
        taken = 0
        at = await self._at(node)
        async for reply in at._many(control.LOGS, node=node, body=control.pack(query)):
            if not reply.body:
                continue
            lines = _unpacked(control.LogLines, reply.body)
            yield lines
            taken += len(lines.text)
            if taken >= room // 2:
                more = control.pack(control.More(size=taken))
                at._send(Query(id=reply.id, what=control.MORE, run_id=self.run_id, body=more))
                taken = 0

    async def stacks(self, node: str) -> NodeStacks:
        """Return the stacks of a node's workers."""
        workers: list[control.WorkerStacks] = []
        try:
            async with asyncio.timeout(ANSWER_S):
                at = await self._at(node)
                async for reply in at._many(control.STACKS, node=node):
                    found = _unpacked(control.Stacks, reply.body).workers
                    workers += [
                        msgspec.structs.replace(one, text=visible(one.text)) for one in found
                    ]
        except ControlProblem as problem:
            return NodeStacks(node=node, workers=workers, problem=problem.message)
        except TimeoutError:
            return NodeStacks(node=node, workers=workers, problem=f"no answer in {ANSWER_S:g} s")
        return NodeStacks(node=node, workers=workers)

    async def stages(self, node: str) -> list[control.GenerationStages]:
        """Return where the time of the newest generations went, as a node saw it."""
        found: list[control.GenerationStages] = []
        try:
            async with asyncio.timeout(ANSWER_S):
                at = await self._at(node)
                async for reply in at._many(control.STAGES, node=node):
                    found += _unpacked(control.Stages, reply.body).generations
        except TimeoutError:
            raise ControlProblem(f"{node} did not answer within {ANSWER_S:g} s") from None
        return [
            msgspec.structs.replace(
                one,
                why=one_line(one.why),
                reason=one_line(one.reason),
                detail=one_line(one.detail),
            )
            for one in found
        ]

    async def here(self) -> control.Here:
        """Return what an agent says of itself; at its own socket alone."""
        reply = await self._ask(control.HERE)
        return _unpacked(control.Here, reply.body)

    # Questions and answers.

    def _use(self, connection: ClientConnection) -> None:
        connection.expect_large(STATUS_FRAME_BYTES_MAX)
        connection.on_message = self._received
        connection.on_closed = self._ended
        self._send, self._close = connection.send_whole, connection.abort

    async def _ask(self, what: str, *, body: bytes = b"") -> Reply:
        reply = await self._one(
            lambda number: Query(id=number, what=what, run_id=self.run_id, body=body)
        )
        assert isinstance(reply, Reply)
        return reply

    async def _one(self, make: Callable[[int], Query | StatusRequest]) -> Reply | StatusReply:
        number, replies = self._begin()
        try:
            self._send(make(number))
            async with asyncio.timeout(ANSWER_S):
                return self._checked(await replies.get())
        except TimeoutError:
            raise ControlProblem(f"no answer within {ANSWER_S:g} s") from None
        finally:
            del self._replies[number]

    async def _many(self, what: str, *, node: str = "", body: bytes = b"") -> AsyncIterator[Reply]:
        number, replies = self._begin()
        is_over = False
        try:
            self._send(Query(id=number, what=what, run_id=self.run_id, node=node, body=body))
            while not is_over:
                try:
                    async with asyncio.timeout(ALIVE_S):
                        reply = await replies.get()
                except TimeoutError:
                    body = control.pack(control.More(size=0))
                    self._send(Query(id=number, what=control.MORE, run_id=self.run_id, body=body))
                    continue
                is_over = isinstance(reply, StatusReply) or reply.last or bool(reply.refusal)
                checked = self._checked(reply)
                assert isinstance(checked, Reply)
                if checked.body:
                    yield checked
        finally:
            del self._replies[number]
            if not is_over and not self._problem:
                self._send(Query(id=number, what=control.CANCEL, run_id=self.run_id))

    def _begin(self) -> tuple[int, asyncio.Queue[Reply | StatusReply]]:
        if self._problem:
            raise ControlProblem(self._problem)
        self._ids += 1
        queue: asyncio.Queue[Reply | StatusReply] = asyncio.Queue(REPLIES_MAX)
        self._replies[self._ids] = queue
        return self._ids, queue

    def _checked(self, reply: Reply | StatusReply) -> Reply | StatusReply:
        if isinstance(reply, StatusReply) or not reply.refusal:
            return reply
        if reply.id < 0:
            raise ControlProblem(self._problem)
        raise ControlProblem(one_line(reply.why) or reply.refusal, reply.refusal)

    def _received(self, message: Message) -> None:
        if isinstance(message, Goodbye):
            self._ended(quoted(message.why) or "the connection was closed")
        elif isinstance(message, (Reply, StatusReply)):
            queue = self._replies.get(message.id)
            if queue is not None:
                try:
                    queue.put_nowait(message)
                except asyncio.QueueFull:
                    self._ended("more came than was asked for")
                    self._close()

    def _ended(self, why: str) -> None:
        if self._problem:
            return
        self._problem = why
        lost = RequestRefusal.NO_ANSWER.value
        for number, queue in self._replies.items():
            if not queue.full():
                queue.put_nowait(Reply(id=number, refusal=lost, why=why))


class _MergedEvents:
    """The events of all agents of a job without a coordinator, in one order.

    What was kept is ordered by how long ago it was, since the clocks of hosts may differ; what comes
    after that, as it comes. Agents that come later, or come back, are listened to as well.
    """

    def __init__(self, client: JobClient) -> None:
        self._client = client
        self._skews: dict[str, float] = {}  # By so much the clock here is ahead of a node's.
        self._told: dict[str, dict[EventRecord, None]] = {}  # The newest of each node.
        self._fresh: asyncio.Queue[EventRecord] = asyncio.Queue(REPLIES_MAX)
        self._news = asyncio.Event()
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._again_at: dict[
            str, float
        ] = {}  # When one that does not tell anything is tried again.
        self._heard: set[str] = set()
        self._watching: asyncio.Task[None] | None = None
        self._end = ControlProblem("the agents have ended")

    def close(self) -> None:
        for task in (*self._listening.values(), *([self._watching] if self._watching else ())):
            task.cancel()

    async def kept(self) -> list[EventRecord]:
        """Return what has happened, as far as the agents that answer in time remember it."""
        asked = [asyncio.ensure_future(self._kept_of(node)) for node in await self._nodes()]
        done, late = await asyncio.wait(asked, timeout=KEPT_S)
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
        """Return the next event that happens; raise `ControlProblem` once nobody is left to tell."""
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        fresh = asyncio.ensure_future(self._fresh.get())
        try:
            await asyncio.wait((fresh, self._watching), return_when=asyncio.FIRST_COMPLETED)
            if fresh.done():
                return fresh.result()
            self._watching.result()
            raise self._end
        finally:
            fresh.cancel()

    async def _nodes(self) -> list[str]:
        client = self._client
        try:
            await client._look_again()
        except ControlProblem as problem:
            if client._problem:
                raise
            client.on_unreached(problem.message)  # Such as that its agent is of an older version.
        return [*dict.fromkeys((client.node, *client._contacts))]

    async def _kept_of(self, node: str) -> list[EventRecord]:
        at = await self._client._at(node)
        async for found in at._portions(follow=False):
            self._note(node, found)
        return [self._placed(node, event) for event in self._told.get(node, ())]

    async def _watch(self) -> None:
        """Listen to all agents, also to those that come later, until none is left."""
        now = asyncio.get_running_loop().time
        while True:
            try:
                nodes = await self._nodes()
            except ControlProblem:
                nodes = []  # Those who are listened to already go on.
            for node in nodes:
                if node not in self._listening and now() >= self._again_at.get(node, 0.0):
                    self._listening[node] = asyncio.ensure_future(self._listen(node))
            if not self._listening:
                return
            self._news.clear()
            try:
                # Somebody may be out of reach for a while, as long as others tell of the job.
                async with asyncio.timeout(AGAIN_S if self._again_at and self._heard else None):
                    await self._news.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(LOOK_S)

    async def _listen(self, node: str) -> None:
        try:
            at = await self._client._at(node)
            self._heard.add(node)
            self._again_at.pop(node, None)
            async for found in at._portions(follow=True):
                for event in self._note(node, found):
                    await self._fresh.put(self._placed(node, event))
                self._news.set()
        except ControlProblem as problem:
            self._end = problem
        finally:
            self._heard.discard(node)
            self._again_at[node] = asyncio.get_running_loop().time() + AGAIN_S
            del self._listening[node]
            self._news.set()

    def _note(self, node: str, found: control.Events) -> list[EventRecord]:
        """Take in some events of a node; return those that are new."""
        if found.now:
            skew = time.time() - found.now
            self._skews[node] = min(self._skews.get(node, skew), skew)
        told = self._told.setdefault(node, {})
        fresh = [event for event in found.events if event not in told]
        told.update(dict.fromkeys(fresh))
        for old in [*told][: max(0, len(told) - TOLD_MAX)]:
            del told[old]
        return fresh

    def _placed(self, node: str, event: EventRecord) -> EventRecord:
        """Return an event by the clock here."""
        skew = self._skews.get(node, 0.0)
        if abs(skew) >= CLOCKS_DIFFER_S:
            event = msgspec.structs.replace(event, wall=max(0.0, event.wall + skew))
        return _printable_event(event)


async def open_job(place: Place, beside: Iterable[LocalJob] = ()) -> JobClient:
    """Return a connection to a job, or raise `ControlProblem`.

    What is about a node whose agent is one of those `beside` is asked there.
    """
    if isinstance(place, LocalJob):
        local = await _open_local(place.path, place.here.run_id)
        local.node = place.here.node
        local._beside = {one.here.node: one for one in beside if one.here.node}
        coordinated = place.here.coordinated
        local._is_coordinated = (
            place.here.backend in COORDINATED if coordinated is None else coordinated
        )
        local._look = local._ask_contacts
        return local
    if isinstance(place, Directory):
        try:
            return await _open_listed(place)
        except BaseException:
            place.close()
            raise
    client = JobClient(place.run_id)
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
        raise ControlProblem(f"{where} cannot be asked: {problem.why}") from None
    if connection.version < VERSION_WITH_QUERIES:
        connection.abort()
        raise ControlProblem(
            f"{where} is of a version of Holdfast that cannot be asked",
            RequestRefusal.UNKNOWN.value,
        )
    client._use(connection)
    client.read_only = (place.token or b"").startswith(READ_ONLY_PREFIX)
    return client


async def _open_listed(place: Directory) -> JobClient:
    """Return a connection to the leader's agent, or to the first of the others that answers."""
    found = await _read(place.contacts)
    there = [one for one in found.contacts if one.port]
    if not there:
        where = f"of {place.run_id!r} at {place.where}"
        if not found.contacts:
            job = await _read(lambda: place.summary(place.run_id))
            over = f"; it is over: {job.outcome}" if job is not None and job.outcome else ""
            raise ControlProblem(f"there is no agent {where}{over}", exit_code=NOT_FOUND)
        raise ControlProblem(
            f"the agents {where} can be asked on their own machines alone: control=off, or an older "
            "version of Holdfast"
        )
    tls = _tls_of(found)
    trying: set[asyncio.Task[JobClient]] = set()
    problem: ControlProblem | None = None
    chosen: JobClient | None = None
    try:
        while chosen is None and (there or trying):
            if there:
                trying.add(
                    asyncio.ensure_future(_open_contact(there.pop(0), place.run_id, found, tls))
                )
            done, trying = await asyncio.wait(
                trying, timeout=STAGGER_S if there else None, return_when=asyncio.FIRST_COMPLETED
            )
            for one in done:
                error = one.exception()
                if error is None:
                    chosen, unneeded = one.result(), chosen
                    if unneeded is not None:
                        unneeded._close()
                elif isinstance(error, ControlProblem):
                    problem = problem or error
                else:
                    raise error
    finally:
        for one in trying:
            one.cancel()
    if chosen is None:
        assert problem is not None
        job = await _read(lambda: place.summary(place.run_id))
        if job is not None and job.outcome:
            raise ControlProblem(
                f"job {place.run_id!r} is over: {job.outcome}", exit_code=NOT_FOUND
            )
        raise problem
    chosen._is_coordinated = False
    chosen._look, chosen._directory = lambda: _read(place.contacts), place
    chosen.read_only = found.read_only
    chosen._take_contacts(found)
    return chosen


async def run_ids_of(place: Directory) -> list[str]:
    """Return the jobs that can be looked up at a place."""
    return await _read(place.run_ids)


async def stored_jobs(place: Directory) -> list[JobSummary]:
    """Return these jobs as they are stored, or the one that is meant."""

    def read() -> list[JobSummary]:
        names = [place.run_id] if place.run_id else place.run_ids()
        return [one for one in map(place.summary, names) if one is not None]

    try:
        return [_printable(one) for one in await _read(read)]
    finally:
        place.close()


async def _read(read: Callable[[], R]) -> R:
    """Return what is stored somewhere; raise `ControlProblem` if it cannot be read."""
    try:
        return await asyncio.to_thread(read)
    except UsageError:
        raise
    except HoldfastError as problem:
        raise ControlProblem(problem.message, hint=problem.hint) from None


def _tls_of(found: control.Contacts) -> ssl.SSLContext | None:
    if not found.pem:
        return None
    from holdfast.net.tls import mutual_context

    try:
        ca, cert, key = found.pem
        return mutual_context(ca, cert, key, serving=False)
    except (ValueError, OSError) as problem:  # An `SSLError` is both.
        raise ControlProblem(f"the job's certificates cannot be used: {problem}") from None


async def _open_contact(
    contact: control.Contact, run_id: str, found: control.Contacts, tls: ssl.SSLContext | None
) -> JobClient:
    """Return a connection to an agent at its control port."""
    connector = CoordinatorConnector(
        contact.address,
        contact.port,
        run_id=found.run_id,
        tls=tls,
        secret=contact.secret,
        read_only=found.read_only,
        server=AGENT,
    )
    client = JobClient(run_id)
    try:
        client._use(await connector.connect())
    except ConnectFailed as problem:
        raise ControlProblem(f"{_named(contact)} cannot be asked: {problem.why}") from None
    client.node = contact.node
    return client


async def _open_local(path: str, run_id: str) -> JobClient:
    client = JobClient(run_id)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            _, line = await loop.create_unix_connection(
                lambda: _Line(client._received, client._ended), path
            )
    except (OSError, TimeoutError) as problem:
        why = getattr(problem, "strerror", "") or "no answer"
        raise ControlProblem(f"{path} cannot be asked: {why}") from None
    client._send, client._close = line.send, line.close
    return client


async def local_jobs() -> list[LocalJob]:
    """Return the jobs of this user's agents on this machine; forget those that were killed."""
    try:
        paths = sockets_here()
    except OSError as problem:
        raise ControlProblem(f"cannot look for jobs: {problem}", exit_code=78) from None
    found = await asyncio.gather(*(_look(path) for path in paths))
    return sorted(
        (one for one in found if one is not None), key=lambda job: (job.here.run_id, job.here.pid)
    )


async def _look(path: str) -> LocalJob | None:
    try:
        client = await _open_local(path, "")
    except ControlProblem:
        _remove_if_dead(path)
        return None
    async with client:
        try:
            async with asyncio.timeout(CONNECT_S):
                here = await client.here()
        except (ControlProblem, TimeoutError):
            return None
    return LocalJob(path=path, here=here)


def _remove_if_dead(path: str) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as trial:
        trial.settimeout(CONNECT_S)
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            try:
                os.unlink(path)
            except OSError:
                pass  # Somebody else was quicker.
        except OSError:
            pass


def _named(contact: control.Contact) -> str:
    return f"{AGENT} at {format_endpoint(quoted(contact.address), contact.port)}"


def _about(node: str, problem: ControlProblem) -> str:
    return f"{quoted(node)}: {problem.message}"


def _printable_event(event: EventRecord) -> EventRecord:
    return msgspec.structs.replace(
        event, source=quoted(event.source), kind=quoted(event.kind), text=one_line(event.text)
    )


def _unpacked(kind: type[T], body: bytes) -> T:
    try:
        return control.unpack(kind, body)
    except WireError as problem:
        raise ControlProblem(f"it sent something else than was asked for: {problem}") from None


def who_asks() -> str:
    """Return who this is, for people: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return one_line(f"{user}@{os.uname().nodename}", NAME_CHARS_MAX)


def _printable(job: JobSummary) -> JobSummary:
    """Return a job whose texts may be shown."""
    replace = msgspec.structs.replace
    nodes = [
        replace(
            node,
            node=quoted(node.node),
            host=quoted(node.host),
            address=quoted(node.address),
            role=quoted(node.role),
            phase=quoted(node.phase),
        )
        for node in job.nodes
    ]
    return replace(
        job,
        run_id=one_line(job.run_id),
        phase=quoted(job.phase),
        outcome=quoted(job.outcome),
        why=one_line(job.why),
        history=[one_line(line) for line in job.history],
        causes=[one_line(line) for line in job.causes],
        nodes=nodes,
    )
