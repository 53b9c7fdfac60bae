"""The agents of one job, each over a connection of its own.

A coordinator passes queries on to nodes. In a job without one, the client connects to each agent: at
its socket if the agent is on this machine, otherwise at its port. Connections open when they are first
needed. An agent that is not reachable is named, with the reason, and does not delay the others.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from holdfast.control.connection import (
    AGENT,
    REPLIES_MAX,
    ControlConnection,
    ControlProblem,
    JobNotFound,
    JobUnreachable,
    named,
    open_contact,
    open_socket,
    tls_of,
    unpacked,
)
from holdfast.printable import one_line, quoted
from holdfast.wire import control
from holdfast.wire.messages import EventRecord, NodeReport

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

MANY_AGENTS = 256
"""With more agents, the connections may need more descriptors than a process gets by default."""
CONNECTING_MAX = 32
"""Connections that open at the same time."""
AGAIN_S = 5.0
"""The pause before another attempt to reach an agent."""
LOOK_S = 1.0
"""The pause between two lookups of where the agents are, at least."""
REPORTS_S = 0.5
"""How long a status waits for agents, at least. Older reports of a few seconds count too."""
REPORT_S_PER_NODE = 0.005
"""Several times the work of opening one connection."""
RECENT_S = 5.0
"""How long agents may take to send their recent events."""
KNOWN_MAX = 1_024
"""Events of a node that the client recognizes when it gets them again; the node keeps fewer."""
CLOCKS_DIFFER_S = 0.1
"""A smaller difference may be the delay of the network."""


class Agents:
    """The connection `own` to one agent or the coordinator, and those to other agents, until `close`.

    With `passes_on`, the peer of `own` answers for all nodes. `beside` has the sockets of agents on
    this machine, by node. `look` returns where the others are, and `reopen` a connection to another
    agent that replaces `own`.
    """

    def __init__(
        self,
        own: ControlConnection,
        *,
        passes_on: bool,
        beside: Mapping[str, str] | None = None,
        look: Callable[[], Awaitable[control.Contacts]] | None = None,
        reopen: Callable[[], Awaitable[ControlConnection]] | None = None,
        found: control.Contacts | None = None,
    ) -> None:
        self.passes_on = passes_on
        self.on_unreached: Callable[[str], object] = lambda _: None
        """Gets a line about each agent that is not reachable, once for each reason."""
        self.own = own
        self._reopen = reopen
        self._reopening = asyncio.Lock()
        self._beside = dict(beside or {})
        self._look = look or self._ask_own
        self._looked_at = -LOOK_S
        self._looking = asyncio.Lock()
        self._found = control.Contacts()
        self._contacts: dict[str, control.Contact] = {}
        self._tls: ssl.SSLContext | None = None
        self._opened: dict[str, ControlConnection] = {}
        self._opening: dict[str, asyncio.Task[ControlConnection | ControlProblem]] = {}
        self._turns = asyncio.Semaphore(CONNECTING_MAX)
        self._unreached: dict[str, tuple[float, ControlProblem]] = {}
        self._reporting: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, tuple[float, NodeReport]] = {}
        if found is not None:
            self._take(found)

    def close(self) -> None:
        for task in (*self._opening.values(), *self._reporting.values()):
            task.cancel()
        for one in (self.own, *self._opened.values()):
            one.close()

    @property
    def unreached(self) -> list[str]:
        """A line about each node whose agent is not reachable now."""
        return [_about(node, problem) for node, (_, problem) in sorted(self._unreached.items())]

    @property
    def is_lost(self) -> bool:
        """Whether the agent at `own` has exited, and another can replace it."""
        return bool(self.own.problem) and self._reopen is not None

    async def anyone(self) -> ControlConnection:
        """Return the connection for queries about the whole job, to another agent if the first exited."""
        async with self._reopening:
            if self._reopen is not None and self.is_lost:
                self.own = await self._reopen()
            return self.own

    async def at(self, node: str) -> ControlConnection:
        """Return the connection for queries about a node; raise `ControlProblem` without one."""
        is_own = node == self.own.node and not self.is_lost
        if not node or is_own or (self.passes_on and node not in self._beside):
            return await self.anyone()
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
        """Return the nodes whose agents are known, that of `own` first."""
        try:
            await self._look_again()
        except ControlProblem as problem:
            if self.own.problem:
                raise
            self.on_unreached(problem.message)
        own = () if self.is_lost else (self.own.node,)
        return [*dict.fromkeys((*own, *self._contacts))]

    async def _open(self, node: str) -> ControlConnection | ControlProblem:
        try:
            async with self._turns:
                path = self._beside.get(node)
                if path is not None:
                    opened = await open_socket(path, self.own.run_id, node)
                else:
                    contact = await self._contact_of(node)
                    run_id = self.own.run_id
                    opened = await open_contact(contact, run_id, self._found, self._tls)
        except ControlProblem as problem:
            self._contacts.pop(node, None)  # The node may have another address by now.
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
            raise JobNotFound("the node is not in the job")
        if not contact.port:
            raise JobUnreachable("its agent is reachable only from its own host (control=off)")
        return contact

    async def _look_again(self) -> None:
        """Look up where the agents are, unless that happened just now."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now - self._looked_at >= LOOK_S:
                self._looked_at = now
                self._take(await self._look())

    def _take(self, found: control.Contacts) -> None:
        if found.pem and found.pem != self._found.pem:
            self._tls = tls_of(found)
        if len(found.contacts) > MANY_AGENTS:
            from holdfast.net.listening import raise_descriptor_limit

            raise_descriptor_limit()
        self._found = found
        self._contacts = {one.node: one for one in found.contacts}

    async def _ask_own(self) -> control.Contacts:
        found = control.Contacts()
        async for reply in self.own.stream(control.CONTACTS):
            part = unpacked(control.Contacts, reply.body)
            contacts = found.contacts + part.contacts
            found = msgspec.structs.replace(part, contacts=contacts, pem=part.pem or found.pem)
        return found

    # Reports.

    async def reports(self, nodes: Sequence[str], wait_s: float) -> dict[str, NodeReport]:
        """Return the reports of those nodes that respond in time."""
        loop = asyncio.get_running_loop()
        for node in nodes:
            if node not in self._reporting:
                self._reporting[node] = asyncio.ensure_future(self._report_of(node))
        limit_s = max(wait_s, REPORTS_S, REPORT_S_PER_NODE * len(nodes))
        await asyncio.wait([self._reporting[node] for node in nodes], timeout=limit_s)
        recent = loop.time() - AGAIN_S
        names = {*nodes}
        self._reports = {
            node: one for node, one in self._reports.items() if node in names and one[0] >= recent
        }
        self._unreached = {node: one for node, one in self._unreached.items() if node in names}
        for node in nodes:
            if node in self._reporting and node not in self._reports:
                contact = self._contacts.get(node)
                who = named(contact) if contact is not None else AGENT
                late = JobUnreachable(f"no response from {who} within {limit_s:g} s")
                self._unreached.setdefault(node, (loop.time(), late))
        return {node: report for node, (_, report) in self._reports.items()}

    async def _report_of(self, node: str) -> None:
        try:
            connection = await self.at(node)
            reply = await connection.ask(control.REPORT)
            report = unpacked(NodeReport, reply.body)
        except ControlProblem as problem:
            again_at = asyncio.get_running_loop().time() + AGAIN_S
            self._unreached.setdefault(node, (again_at, problem))
        else:
            self._reports[node] = (asyncio.get_running_loop().time(), report)
            self._unreached.pop(node, None)
        finally:
            del self._reporting[node]


def _about(node: str, problem: ControlProblem) -> str:
    return f"{quoted(node)}: {problem.message}"


async def events_at(
    connection: ControlConnection, *, follow: bool, node: str = ""
) -> AsyncIterator[control.Events]:
    """Yield the recent events that a peer knows; with `follow`, also each new one."""
    body = control.pack(control.EventsQuery(follow=follow))
    async for reply in connection.stream(control.EVENTS, node=node, body=body):
        yield unpacked(control.Events, reply.body)


class MergedEvents:
    """The events of all agents of a job without a coordinator, in one order.

    Recent events are ordered by their age, because the clocks of hosts may differ; new events by their
    arrival. Agents that join or rejoin later are followed too.
    """

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._skews: dict[str, float] = {}  # How far this clock is ahead of a node's.
        self._known: dict[
            str, dict[EventRecord, None]
        ] = {}  # The newest known events of each node.
        self._fresh: asyncio.Queue[EventRecord] = asyncio.Queue(REPLIES_MAX)
        self._changed = asyncio.Event()
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._again_at: dict[str, float] = {}  # When to try a silent agent again.
        self._followed: set[str] = set()
        self._watching: asyncio.Task[None] | None = None
        self._end: ControlProblem = JobUnreachable("the agents have ended")

    def close(self) -> None:
        for task in (*self._listening.values(), *([self._watching] if self._watching else ())):
            task.cancel()

    async def kept(self) -> list[EventRecord]:
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
                await self._agents.anyone()
            except ControlProblem as problem:
                # The job is over; or the etcd of --ha has exited too, which explains less.
                raise (problem if isinstance(problem, JobNotFound) else self._end) from None
            self._watching = None
            await asyncio.sleep(LOOK_S)

    async def _kept_of(self, node: str) -> list[EventRecord]:
        connection = await self._agents.at(node)
        async for found in events_at(connection, follow=False):
            self._note(node, found)
        return [self._placed(node, event) for event in self._known.get(node, ())]

    async def _watch(self) -> None:
        """Follow all agents, also those that join later, until none is left."""
        now = asyncio.get_running_loop().time
        while True:
            try:
                nodes = await self._agents.nodes()
            except ControlProblem:
                nodes = []  # The agents that are followed already go on.
            for node in nodes:
                if node not in self._listening and now() >= self._again_at.get(node, 0.0):
                    self._listening[node] = asyncio.ensure_future(self._listen(node))
            self._again_at = {node: at for node, at in self._again_at.items() if node in nodes}
            if not self._listening:
                return
            self._changed.clear()
            try:
                # An agent may be unreachable for a while, as long as others send events.
                async with asyncio.timeout(AGAIN_S if self._again_at and self._followed else None):
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(LOOK_S)

    async def _listen(self, node: str) -> None:
        try:
            connection = await self._agents.at(node)
            self._followed.add(node)
            self._again_at.pop(node, None)
            async for found in events_at(connection, follow=True):
                for event in self._note(node, found):
                    await self._fresh.put(self._placed(node, event))
                self._changed.set()
        except ControlProblem as problem:
            self._end = problem
        finally:
            self._followed.discard(node)
            self._again_at[node] = asyncio.get_running_loop().time() + AGAIN_S
            del self._listening[node]
            self._changed.set()

    def _note(self, node: str, found: control.Events) -> list[EventRecord]:
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

    def _placed(self, node: str, event: EventRecord) -> EventRecord:
        """Return an event with its time by this clock."""
        skew = self._skews.get(node, 0.0)
        if abs(skew) >= CLOCKS_DIFFER_S:
            event = msgspec.structs.replace(event, wall=max(0.0, event.wall + skew))
        return printable_event(event)


def printable_event(event: EventRecord) -> EventRecord:
    """Return an event whose texts are safe to print."""
    return msgspec.structs.replace(event, source=quoted(event.source), text=one_line(event.text))
