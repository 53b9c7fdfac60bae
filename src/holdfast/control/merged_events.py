"""The events of a job without a coordinator: those of all its agents, in one order."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from holdfast.control.connection import (
    AGAIN_S,
    LOOK_S,
    REPLIES_MAX,
    ControlProblem,
    JobNotFound,
    JobUnreachable,
    unpacked,
)
from holdfast.printable import one_line, quoted
from holdfast.wire import control

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from holdfast.control.connection import Agents, ControlConnection
    from holdfast.wire.messages import EventRecord

RECENT_S = 5.0
"""How long agents may take to send their recent events."""
KNOWN_MAX = 1_024
"""Events of a node that the client recognizes when it gets them again; the node keeps fewer."""
CLOCKS_DIFFER_S = 0.1
"""A smaller difference may be the delay of the network."""


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
        self._end: ControlProblem = JobUnreachable("all agents have exited")

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
                await self._agents.any_connection()
            except ControlProblem as problem:
                # Report that the job is over. If the etcd of --ha has exited too, `_end` explains more.
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
