"""The contract of every machine in `holdfast.core`: events in, effects out, a story with causes.

A machine only decides. It has no I/O and no clock; `now` is the caller's monotonic time. The caller (the
shell) obeys this contract::

    effects = machine.handle(now, event, cause)    # one fact, in the past tense: `WorkerExited`
    for effect in effects:                         # imperatives: `StopWorkers`
        perform(effect, cause=machine.story.last)  # IN ORDER; report the outcome as ONE event
    sleep_until(machine.next_deadline(now))        # if the machine has deadlines: `handle(now, TICK)`

- If an event cannot happen in the current state, `handle` raises `InvalidEvent` and changes nothing.
  A late event that no longer matters is ignored: no effects, no step.
- `check()` asserts the machine's invariants. Its cost does not grow with the job.
- A machine with states has an enum of states and one literal table of transitions,
  `(state, event type) -> method` (`TableMachine`). Other machines dispatch by `match`.
- Events and effects are values: subclasses of `Event` and `Effect`, or messages of `core.protocol`.

**Story.** Every machine keeps its newest steps in `story`. A step has an id, `node/machine#number`, and a
cause: the id of the step that led to it, in this machine or another. An external event, such as a
worker's exit or a timer, has no cause. The shell passes `machine.story.last` on as the cause of the
events that an effect produces. Messages between nodes need no extra field: a `Status` and a `View` have
ids (`n1/status#5`, `n1/view#2.7`); the step that sends a message lists it in its effects, and the
receiving step has the message's id as its cause. So you can follow a failure from the worker's exit through the
agent's supervision and session to the coordinator's rounds, and from there to the sessions and
supervisions of all nodes. `Story.sink` is called with every recorded step of every machine. `str(step)`
is the step's line in a listing.

Steps that change nothing (heartbeats, acknowledgements, most timers) are not recorded.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from holdfast.core.values import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any, ClassVar

STEPS_MAX = 256  # A restart is about six steps of a supervision.
EFFECTS_KEPT_MAX = 16  # Per step: a round of thousands of nodes sends a view to each.
TEXT_CHARS_MAX = 200  # Per message in a listing, and per event or effect.
FIELD_CHARS_MAX = 60


class Event(Value):
    """Something that happened; named in the past tense."""


class Effect(Value):
    """Something to be done; named in the imperative."""


class Tick(Event):
    """A deadline may have passed."""


TICK = Tick()


class InvalidEvent(Exception):
    """An event cannot happen in this state; the machine has not changed."""


class Step(Value):
    """One step of a machine: its state, the event and the effects."""

    id: str
    cause: str
    now: float
    state: object
    event: object
    effects: tuple[object, ...]

    def __str__(self) -> str:
        state = "" if self.state is None else f" ({short_text(self.state)})"
        effects = ", ".join(short_text(effect) for effect in self.effects) or "nothing"
        cause = f" <- {self.cause}" if self.cause else ""
        return f"{self.id}{state}: {short_text(self.event)} -> {effects}{cause}"


class Story:
    """The newest steps of one machine."""

    sink: ClassVar[Callable[[Step], None] | None] = None
    """Called with every recorded step of every machine."""

    def __init__(self, machine: str, *, node: str = "", steps_max: int = STEPS_MAX) -> None:
        self.machine = machine
        self.node = node
        self.last = ""
        """The id of the newest step: the cause of the events that its effects produce."""
        self._steps: deque[Step] = deque(maxlen=steps_max)
        self._number = 0

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def record(
        self, now: float, state: object, event: object, effects: Sequence[object], cause: str = ""
    ) -> None:
        """Add a step. The story keeps only the first `EFFECTS_KEPT_MAX` effects; the sink gets all."""
        self._number += 1
        self.last = f"{self.node or '-'}/{self.machine}#{self._number}"
        if Story.sink is not None:
            Story.sink(Step(self.last, cause, now, state, event, tuple(effects)))
        if len(effects) > EFFECTS_KEPT_MAX:
            effects = [*effects[:EFFECTS_KEPT_MAX], f"{len(effects) - EFFECTS_KEPT_MAX} more"]
        self._steps.append(Step(self.last, cause, now, state, event, tuple(effects)))


class TableMachine:
    """A machine whose transitions are a table. A subclass defines the tables and sets `state`."""

    _handlers: ClassVar[Mapping[tuple[Enum, type], Callable[[Any, Any], list[Any]]]]
    _ignored: ClassVar[Mapping[Enum, tuple[type, ...]]]
    """Events that may still arrive in a state in which they no longer matter."""
    state: Enum

    def __init__(self, story: Story) -> None:
        self.story = story

    def handle(self, now: float, event: Event, cause: str = "") -> list[Effect]:
        state = self.state
        handler = self._handlers.get((state, type(event)))
        if handler is None:
            if type(event) in self._ignored.get(state, ()):
                return []
            raise InvalidEvent(f"{event!r} cannot happen while {state.value}")
        effects = handler(self, event)
        self.story.record(now, state, event, effects, cause)
        return effects


def short_text(value: object, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Return a value as text for a listing, without fields that have their default."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Value):
        defaults = vars(type(value))
        fields = ", ".join(
            f"{name}={short_text(field, FIELD_CHARS_MAX)}"
            for name, field in vars(value).items()
            if name not in defaults or field != defaults[name]
        )
        return f"{type(value).__name__}({fields})" if fields else type(value).__name__
    if isinstance(value, tuple):
        return f"[{', '.join(short_text(one, FIELD_CHARS_MAX) for one in value)}]"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = str(value)
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"
