"""A client of running jobs: what they are doing, what happens in them, and what is asked of them.

    async with await open_job(find_one("nightly")) as job:
        summary = await job.status(watch=True)
        async for event in job.events(follow=True):
            ...

A place is where a job can be reached: the socket of one of its agents on this machine, or its
coordinator. What can be asked is the same at both. A `JobClient` belongs to one loop; any number of
calls may be under way at once. Whatever goes wrong is a `ControlProblem`, with one line for a person;
a refusal has its reason besides.

All text that comes from others is made printable here, but for what workers wrote themselves.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import secrets
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from holdfast.control.runtime_dir import sockets_here
from holdfast.coordinator.connect import ConnectFailed, CoordinatorConnector
from holdfast.core.limits import ASKED_WHY_CHARS_MAX, NAME_CHARS_MAX
from holdfast.core.protocol import Action, Request, RequestRefusal
from holdfast.errors import HoldfastError
from holdfast.printable import one_line, quoted, visible
from holdfast.wire import control
from holdfast.wire.errors import WireError
from holdfast.wire.frames import FrameReader, encode_frame
from holdfast.wire.handshake import READ_ONLY_ALL_PREFIX
from holdfast.wire.limits import STATUS_FRAME_BYTES_MAX
from holdfast.wire.messages import (
    VERSION_WITH_QUERIES,
    Goodbye,
    JobSummary,
    Query,
    Reply,
    StatusReply,
    StatusRequest,
    decode,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Iterable
    from types import TracebackType

    from holdfast.wire.messages import EventRecord, Message

T = TypeVar("T", bound=msgspec.Struct)

CONNECT_S = 5.0
ANSWER_S = 30.0
"""How long a question may take; more than any part of it may where it is answered."""
WATCH_S = 2.5
"""How long nodes that are first asked to report have for it; in its first second none does."""
LOOK_AGAIN_S = 0.1
COORDINATED = ("c10d", "static")
"""The backends whose jobs have a coordinator."""
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


Place = Endpoint | LocalJob


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
        self._is_coordinated = True  # So that all nodes report, if they are asked to.
        self._beside: dict[str, LocalJob] = {}
        self._opened: dict[str, JobClient] = {}
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
        for one in self._opened.values():
            one._close()
        self._close()

    async def _at(self, node: str) -> JobClient:
        """Return whom to ask about a node: its own agent, if that is on this machine."""
        place = self._beside.get(node)
        if place is None:
            return self
        if node not in self._opened:
            self._opened[node] = await _open_local(place.path, self.run_id)
        return self._opened[node]

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
                return _printable(await self._with_reports(job))
            if not watch or is_whole or is_late:
                return _printable(job)
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _with_reports(self, job: JobSummary) -> JobSummary:
        """Return a job that has no coordinator with what its agents on this machine know."""
        nodes = []
        for node in job.nodes:
            if node.report is None and node.node in self._beside:
                at = await self._at(node.node)
                own = [one for one in (await at.status()).nodes if one.node == node.node]
                nodes.append(msgspec.structs.replace(node, report=own[0].report if own else None))
            else:
                nodes.append(node)
        return msgspec.structs.replace(job, nodes=nodes)

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
        body = control.pack(control.EventsQuery(follow=follow))
        async for reply in self._many(control.EVENTS, node=node, body=body):
            for event in _unpacked(control.Events, reply.body).events:
                yield msgspec.structs.replace(
                    event,
                    source=quoted(event.source),
                    kind=quoted(event.kind),
                    text=one_line(event.text),
                )

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


async def open_job(place: Place, beside: Iterable[LocalJob] = ()) -> JobClient:
    """Return a connection to a job, or raise `ControlProblem`.

    What is about a node whose agent is one of those `beside` is asked there.
    """
    if isinstance(place, LocalJob):
        local = await _open_local(place.path, place.here.run_id)
        local._beside = {one.here.node: one for one in beside if one.here.node}
        local._is_coordinated = place.here.backend in COORDINATED
        return local
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
    connection.expect_large(STATUS_FRAME_BYTES_MAX)
    connection.on_message = client._received
    connection.on_closed = client._ended
    client._send, client._close = connection.send_whole, connection.abort
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
