"""Player of nodes over a compare-and-set store (`core.shared_state`), one call at a time.

::

    new min=2 max=2 restarts=1 settle=1          a job's settings, and an empty store
    0.0 a ready                                  a node reports its phase (and a generation)
    0.0 a respond                                the store performs a's call and responds
    0.0 a response-lost                          ... and the response is lost: a's call fails
    0.0 a fail no route                          a's call fails and is not performed
    5.0 a tick / 5.0 a rejoin 7                  it rejoins as this incarnation, with the id it was given
    5.0 a/2 ready m1                             its id is generated, and reserved by the machine m1
    5.0 a/2 ready                                another agent with the id of a
    5.0 all                                      the store responds until no node has a call
    store is empty                               the store restarted without its state

The output has the effects with their node, each node's call and next deadline, and the job.
"""

from __future__ import annotations

import shlex

from transcripts import Clock

from fake_node import RUN
from holdfast.core.job_settings import JobSettings
from holdfast.core.machine import TICK, short_text
from holdfast.core.phases import NodePhase
from holdfast.core.protocol import Failure, NodeInfo
from holdfast.core.session import DeliverView, GiveUp, Rejoined, StatusChanged
from holdfast.core.shared_state import (
    CallFailed,
    CallState,
    ReadState,
    SessionEffect,
    SessionEvent,
    SharedStateSession,
    StateRead,
    StateWritten,
    Timeouts,
    WriteConflict,
    WriteState,
    decode,
)

NAMES = {"min": "min_nodes", "max": "max_nodes", "restarts": "max_restarts", "settle": "settle_s"}


class SharedStatePlayer:
    def __init__(self) -> None:
        self.calls: set[tuple[CallState, CallState]] = set()
        self.nodes: dict[str, SharedStateSession] = {}
        self.pending: dict[str, ReadState | WriteState] = {}
        self.state: bytes | None = None
        self.token = 0
        self.clock = Clock()

    def play(self, line: str) -> list[str]:
        first, *words = shlex.split(line)
        if first == "new":
            given = dict(word.split("=") for word in words)
            fields = {NAMES[name]: int(text) for name, text in given.items()}
            self.settings = JobSettings(**fields)  # type: ignore[arg-type]
            return [self._job()]
        if first == "store":
            self.state = None
            return [self._job()]
        now = self.clock.read(first)
        if words == ["all"]:
            lines = []
            while self.pending:
                lines += self._answer(now, next(iter(self.pending)))
        else:
            lines = self._handle_command(now, *words)
        return [*lines, *map(self._node, self.nodes), self._job()]

    def _handle_command(self, now: float, name: str, verb: str, *words: str) -> list[str]:
        match verb:
            case "respond":
                return self._answer(now, name)
            case "response-lost":
                self._perform(self.pending.pop(name))
                return self._handle(now, name, CallFailed("the response was lost"))
            case "fail":
                del self.pending[name]
                return self._handle(now, name, CallFailed(" ".join(words)))
            case "tick":
                return self._handle(now, name, TICK)
            case "rejoin":
                view = self.nodes[name].view
                new_id = view.new_id if view is not None else ""
                return self._handle(now, name, Rejoined(int(words[0]), new_id))
        phase = NodePhase(verb)
        self.reserved_on = "".join(one for one in words if one[0] == "m")
        words = tuple(one for one in words if one[0] != "m")
        failure = Failure(node=name, summary="oh") if phase is NodePhase.FAILED else None
        generation = int(words[0]) if words else -1
        return self._handle(now, name, StatusChanged(phase, generation, failure))

    def _answer(self, now: float, name: str) -> list[str]:
        return self._handle(now, name, self._perform(self.pending.pop(name)))

    def _perform(self, call: ReadState | WriteState) -> SessionEvent:
        if isinstance(call, ReadState):
            return StateRead(self.state, self.token if self.state else None)
        if call.token != (self.token if self.state else None):
            return WriteConflict()
        self.state, self.token = call.state, self.token + 1
        return StateWritten()

    def _handle(self, now: float, name: str, event: SessionEvent) -> list[str]:
        if name not in self.nodes:
            self.nodes[name] = SharedStateSession(
                now,
                run_id=RUN,
                info=NodeInfo(
                    node=name.partition("/")[0],
                    incarnation=len(self.nodes) + 1,
                    address=name.replace("/", "."),
                    reserved_on=self.reserved_on,
                ),
                settings=self.settings,
                timeouts=Timeouts(unreachable_s=30.0),
                draw=lambda: 0.5,
            )
        session = self.nodes[name]
        before = session.call
        effects = session.handle(now, event)
        self.calls.add((before, session.call))
        return [f"{name}: {self._effect(name, effect)}" for effect in effects]

    def _effect(self, name: str, effect: SessionEffect) -> str:
        match effect:
            case ReadState():
                self.pending[name] = effect
                return "read"
            case WriteState():
                self.pending[name] = effect
                return f"write {', '.join(map(short_text, effect.changes)) or 'a heartbeat'}"
            case DeliverView(view):
                return f"deliver {view}" + (f", rejoin as {view.new_id}" if view.new_id else "")
            case GiveUp(unreachable_s, why):
                return f"give up after {unreachable_s:g} s: {why}"
        return short_text(effect)

    def _node(self, name: str) -> str:
        session = self.nodes[name]
        deadline = session.next_deadline(self.clock.now)
        when = "no deadline" if deadline is None else f"next at {deadline:.3f}"
        return f"{name} is {session.call.value}, {when}"

    def _job(self) -> str:
        if self.state is None:
            return "job: none"
        job = decode(self.state)
        nodes = ", ".join(f"{node.info.node}/{node.heartbeats}" for node in job.nodes.values())
        return f"job: {job.phase.value}, generation {job.generation}, nodes {nodes or 'none'}"
