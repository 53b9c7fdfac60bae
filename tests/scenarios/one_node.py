"""Players of the machines of one node: `core.supervision` and `core.stopping`.

::

    new local_world_size=2 max_restarts=1          create a machine for the following events
    new local_world_size=2 max_restarts=1 started=true      the same, with running workers
    0.25 WorkerExited generation=0 local_rank=1 failed=true      an event, with its time in seconds

The output has the effects in order, or the error; the last line is the state after the event. Fields with
their default value are omitted. A file may have several `new` machines.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from transcripts import Clock, listed, read_fact, read_keys, write_fact

from holdfast.core import stopping, supervision
from holdfast.core.machine import Event, InvalidEvent, Tick
from holdfast.core.values import Value

if TYPE_CHECKING:
    from holdfast.core.stopping import StopPhase
    from holdfast.core.supervision import State

EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        *(kind for _, kind in supervision.Supervision._handlers),
        supervision.WorkerBlocked,
        supervision.WorkerUnblocked,
        Tick,
    )
}


class SupervisionSettings(Value):
    local_world_size: int
    max_restarts: int
    started: bool = False
    stuck_limit_s: float = 0.0


class SupervisionPlayer:
    def __init__(self) -> None:
        self.handled: set[tuple[State, type]] = set()

    def play(self, line: str) -> list[str]:
        first, *words = shlex.split(line)
        if first == "new":
            self._make(read_fact(SupervisionSettings, words))
            return [self._state()]
        event = read_fact(EVENTS[words[0]], words[1:])
        self.handled.add((self.machine.state, type(event)))
        try:
            effects = self.machine.handle(self.clock.read(first), event)
            output = [write_fact(effect) for effect in effects]
        except InvalidEvent as error:
            output = [f"InvalidEvent: {error}"]
        self.machine.check()
        if isinstance(event, supervision.Requested):
            refusal, why = self.machine.answers[event.id]
            answer = refusal.value if refusal else "granted"
            output.append(f"{event.id} is {answer}{why and f': {why}'}")
        return [*output, self._state()]

    def _make(self, settings: SupervisionSettings) -> None:
        self.machine = supervision.Supervision(
            local_world_size=settings.local_world_size,
            max_restarts=settings.max_restarts,
            stuck_limit_s=settings.stuck_limit_s or None,
        )
        self.clock = Clock()
        if settings.started:
            self.machine.handle(0, supervision.Begun())
            self.machine.handle(0, supervision.RoundJoined(0, 0, 1))
            self.machine.handle(0, supervision.WorkersStarted(0))

    def _state(self) -> str:
        machine = self.machine
        parts = [f"generation {machine.generation}"]
        if machine.running:
            parts.append(f"running {listed(machine.running)}")
        if machine.first_failed is not None:
            parts.append(f"first failed {machine.first_failed}")
        budget = machine.budget
        parts.append(f"{budget.used} of {budget.max_restarts} restarts used")
        return f"{machine.state.value}: {', '.join(parts)}"


class StopSettings(Value):
    running: str
    signum: int
    grace_s: float
    reap_s: float
    unresponsive: str = ""
    notice_s: float = 0.0


STOP_EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        stopping.StopRequested,
        stopping.LeaderExited,
        stopping.LeftoversGone,
        stopping.KillRequested,
        stopping.KeeperLost,
        Tick,
    )
}


class StoppingPlayer:
    def __init__(self) -> None:
        self.passed: set[tuple[StopPhase, StopPhase]] = set()

    def play(self, line: str) -> list[str]:
        first, *words = shlex.split(line)
        if first == "new":
            settings = read_fact(StopSettings, words)
            self.stop = stopping.Stop(
                read_keys(settings.running),
                signum=settings.signum,
                grace_s=settings.grace_s,
                reap_s=settings.reap_s,
                unresponsive=read_keys(settings.unresponsive),
                notice_s=settings.notice_s or None,
            )
            self.clock = Clock()
            return [self._state()]
        before = self.stop.phase
        event = read_fact(STOP_EVENTS[words[0]], words[1:])
        effects = self.stop.handle(self.clock.read(first), event)
        self.passed.add((before, self.stop.phase))
        return [*map(write_fact, effects), self._state()]

    def _state(self) -> str:
        stop = self.stop
        parts = []
        for name, keys in (
            ("running", stop.running),
            ("killed", stop.killed),
            ("given up", stop.given_up),
        ):
            if keys:
                parts.append(f"{name} {listed(keys)}")
        if stop.grace_expired:
            parts.append("grace expired")
        deadline = stop.next_deadline()
        parts.append("no deadline" if deadline is None else f"deadline at {deadline:g}")
        return f"{stop.phase.value}: {', '.join(parts)}"
