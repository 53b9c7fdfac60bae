"""A client of running jobs: reads their state, events, logs and stacks, and requests changes.

    async with await connect(JobChoice(run_id="nightly")) as job:
        summary = await job.status(watch=True)
        async for event in job.events(follow=True):
            ...

A `JobClient` belongs to one asyncio loop. Any number of calls may be pending at once. Every failure
raises a `ControlProblem`. The client makes all text that it receives printable, except the output of
workers.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import random
import secrets
from typing import TYPE_CHECKING, Self

import msgspec

from holdfast.control.connection import (
    ANSWER_S,
    Agents,
    ControlProblem,
    JobNotFound,
    JobUnreachable,
    open_contact,
    open_endpoint,
    open_socket,
    tls_of,
    unpacked,
)
from holdfast.control.discovery import Directory, LocalJob, find_job, only_one, read
from holdfast.control.history import NodeHistory
from holdfast.control.merged_events import MergedEvents, events_at, printable_event
from holdfast.core.limits import NAME_CHARS_MAX, REQUEST_WHY_CHARS_MAX
from holdfast.core.protocol import Request
from holdfast.printable import one_line, visible
from holdfast.wire import control
from holdfast.wire.handshake import READ_ONLY_PREFIX
from holdfast.wire.job_summary import printable_summary
from holdfast.wire.messages import JobSummary, Query

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from types import TracebackType

    from holdfast.control.connection import ControlConnection
    from holdfast.control.discovery import JobChoice, Place
    from holdfast.core.requests import Action
    from holdfast.wire.messages import EventRecord

WATCH_S = 2.5
"""How long to wait for the first report of a node."""
GIVE_UP_S = 10.0
"""If no agent has responded after this time, give up. A firewall may drop all packets."""
STAGGER_S = 0.5
"""If an agent has not responded after this time, try the next one in parallel."""
WINDOW_BYTES_MIN = 1_024


class NodeStacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of a node's workers, or the problem that prevented reading them."""

    node: str
    workers: list[control.WorkerStacks] = []
    problem: str = ""


class JobClient:
    """A client of one job. With an empty run id, a client of all jobs of a coordinator."""

    def __init__(
        self,
        agents: Agents,
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    async def jobs(self) -> list[JobSummary]:
        """Return a summary of every job that this connection can see."""
        return [printable_summary(one) for one in await self._jobs(control.StatusQuery())]

    async def status(self, *, watch: bool = False, wait_s: float = WATCH_S) -> JobSummary:
        """Return the state of the job. With `watch`, include the nodes' reports about their workers.

        A node that does not report yet has `wait_s` to send its first report.
        """
        jobs = await self._jobs(control.StatusQuery(watch=watch, wait_s=wait_s if watch else 0.0))
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

    async def _jobs(self, query: control.StatusQuery) -> list[JobSummary]:
        body, limit_s = control.pack(query), ANSWER_S + query.wait_s
        connection = await self.agents.any_connection()
        try:
            reply = await connection.query(control.STATUS, body=body, limit_s=limit_s)
        except ControlProblem:
            if not self.agents.is_lost:
                raise
            connection = (
                await self.agents.any_connection()
            )  # The agent has exited: use another one.
            reply = await connection.query(control.STATUS, body=body, limit_s=limit_s)
        return unpacked(control.JobSummaries, reply.body).jobs

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
        reply = await connection.query(control.ACT, body=control.pack(request))
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
            for event in await merged.kept():
                yield event
            while follow:
                yield await merged.next()
        finally:
            merged.close()

    async def logs(
        self, node: str, wanted: control.LogsQuery, *, streams: int = 1
    ) -> AsyncIterator[control.LogLines]:
        """Yield the output of a node's workers.

        `streams` is the number of nodes that the client reads at the same time; they share its buffer.
        """
        room = max(WINDOW_BYTES_MIN, control.WINDOW_BYTES // max(1, streams))
        query = msgspec.structs.replace(wanted, room=room)
        taken = 0
        connection = await self.agents.at(node)
        async for reply in connection.stream(control.LOGS, node=node, body=control.pack(query)):
            if not reply.body:
                continue
            lines = unpacked(control.LogLines, reply.body)
            yield lines
            taken += len(lines.text)
            if taken >= room // 2:
                more = control.pack(control.More(size=taken))
                connection.send(
                    Query(id=reply.id, what=control.MORE, run_id=self.run_id, body=more)
                )
                taken = 0

    async def stacks(self, node: str) -> NodeStacks:
        """Return the stacks of a node's workers."""
        workers: list[control.WorkerStacks] = []
        try:
            async with asyncio.timeout(ANSWER_S):
                connection = await self.agents.at(node)
                async for reply in connection.stream(control.STACKS, node=node):
                    found = unpacked(control.Stacks, reply.body).workers
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
                replies = connection.stream(control.HISTORY, node=node)
                found = [unpacked(NodeHistory, reply.body) async for reply in replies]
        except TimeoutError:
            raise JobUnreachable(f"{node} did not respond within {ANSWER_S:g} s") from None
        for one in (one for part in found for one in part.generations):
            one.why, one.reason = one_line(one.why), one_line(one.reason)
            one.detail, one.cause = one_line(one.detail), one_line(one.cause)
        return found


async def connect(
    choice: JobChoice, on_late: Callable[[list[str]], None] | None = None
) -> JobClient:
    """Return a client of the chosen job. Raise if no job, or more than one, matches."""
    place, neighbours = await find_job(choice, on_late)
    client = await open_job(place, neighbours)
    if not client.run_id:
        try:
            client.run_id = only_one(
                [one.run_id for one in await client.jobs()], f"at {choice.endpoint}"
            )
        except BaseException:
            client.close()
            raise
    return client


async def open_job(place: Place, neighbours: Iterable[LocalJob] = ()) -> JobClient:
    """Return a client of a job, or raise `ControlProblem`.

    `neighbours` are the job's other agents on this machine. The client sends a query about one of their
    nodes directly to its agent.
    """
    if isinstance(place, LocalJob):
        here = place.here
        connection = await open_socket(place.path, here.run_id, here.node)
        sockets = {one.here.node: one.path for one in neighbours if one.here.node}
        return JobClient(Agents(connection, passes_on=here.coordinated, beside=sockets))
    if isinstance(place, Directory):
        try:
            return await _open_listed(place)
        except BaseException:
            place.close()
            raise
    connection = await open_endpoint(place)
    read_only = (place.token or b"").startswith(READ_ONLY_PREFIX)
    return JobClient(Agents(connection, passes_on=True), read_only=read_only)


async def _open_listed(place: Directory) -> JobClient:
    connection, found = await _open_anyone(place)

    async def reopen() -> ControlConnection:
        return (await _open_anyone(place))[0]

    look = lambda: read(place.contacts)  # noqa: E731
    agents = Agents(connection, passes_on=False, look=look, reopen=reopen, found=found)
    return JobClient(agents, read_only=found.read_only, closed=place.close)


async def _open_anyone(place: Directory) -> tuple[ControlConnection, control.Contacts]:
    """Return a connection to the leader's agent, or to the first other agent that responds."""
    found = await read(place.contacts)
    reachable = [one for one in found.contacts if one.port]
    if not reachable:
        where = f"of {place.run_id!r} at {place.where}"
        if not found.contacts:
            job = await read(lambda: place.summary(place.run_id))
            over = f"; the job is over: {job.outcome}" if job is not None and job.outcome else ""
            raise JobNotFound(f"there is no agent {where}{over}")
        raise JobUnreachable(
            f"the agents {where} are reachable only from their own hosts (control=off)"
        )
    return await _first_that_responds(reachable, place, found), found


async def _first_that_responds(
    reachable: list[control.Contact], place: Directory, found: control.Contacts
) -> ControlConnection:
    tls = tls_of(found)
    now = asyncio.get_running_loop().time
    deadline = now() + GIVE_UP_S
    others = reachable[1:]
    random.shuffle(others)  # Neighbours in the list may share a rack that is unreachable.
    left = [*others, reachable[0]]
    trying: set[asyncio.Task[ControlConnection]] = set()
    responded: list[ControlConnection] = []
    problem: ControlProblem | None = None
    try:
        while not responded and (left or trying):
            if left:
                work = open_contact(left.pop(), place.run_id, found, tls)
                trying.add(asyncio.ensure_future(work))
            done, trying = await asyncio.wait(
                trying, timeout=STAGGER_S if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            if now() >= deadline:
                left.clear()
            for one in done:
                try:
                    responded.append(one.result())
                except ControlProblem as refused:
                    problem = problem or refused
    finally:
        for one in trying:
            one.cancel()
    if responded:
        for connection in responded[1:]:
            connection.close()
        return responded[0]
    job = await read(lambda: place.summary(place.run_id))
    if job is not None and job.outcome:
        raise JobNotFound(f"job {place.run_id!r} is over: {job.outcome}")
    assert problem is not None
    raise problem


def author() -> str:
    """Return the name that requests carry as their author: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return one_line(f"{user}@{os.uname().nodename}", NAME_CHARS_MAX)
