"""Transcripts as text: an input, `----`, and the whole output; they are compared or rewritten.

A transcript is a text file. It begins with a comment that says what it shows. Blocks follow, separated by
empty lines; each has one input above its `----`, and the output below. A player interprets the inputs:
`one_node`, `many_nodes`, `shared_nodes`, `etcd_nodes` and `cluster_members` have the players.
"""

from __future__ import annotations

import re
import shlex
import signal
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from holdfast.core.supervision import ExpiredTimer
from holdfast.core.values import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MARK = "----"
SIGNAL_FIELDS = ("signum", "died_of")  # As names: SIGTERM, not 15.
READERS: dict[str, Callable[[str], object]] = {
    "bool": {"true": True, "false": False}.__getitem__,
    "int": int,
    "float": float,
    "str": str,
    "tuple[ExpiredTimer, ...]": lambda text: tuple(map(read_timer, text.split(","))),
}
FactT = TypeVar("FactT", bound=Value)


class Transcript:
    """A file's blocks, each as its lines above and below the mark."""

    def __init__(self, text: str) -> None:
        self.blocks = []
        for chunk in re.split(r"\n{2,}", text.strip()):
            above, _, below = f"{chunk}\n".partition(f"\n{MARK}\n")
            self.blocks.append((above.splitlines(), below.splitlines()))

    def replayed(self, player: Player) -> str:
        """Return the whole text with the output of the player."""
        chunks = []
        for above, _ in self.blocks:
            inputs = [line for line in above if not line.startswith("#")]
            assert len(inputs) <= 1, f"a block has one input, not {inputs}"
            below = [MARK, *player.play(inputs[0])] if inputs else []
            chunks.append("\n".join([*above, *below]))
        return "\n\n".join(chunks) + "\n"


class Player(Protocol):
    """Plays the inputs of one transcript to its machine."""

    def play(self, line: str) -> list[str]:
        """Perform one input; return the output lines."""


class Clock:
    """The times of a transcript, which must not decrease."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self, text: str) -> float:
        now = float(text)
        assert now >= self.now, f"time runs backwards: {text} after {self.now:g}"
        self.now = now
        return now


def read_fact(kind: type[FactT], words: Iterable[str]) -> FactT:
    """Parse an event or effect from `name=value` words."""
    fields: dict[str, Any] = {}
    for name, text in (word.split("=", 1) for word in words):
        assert name in kind.__annotations__, f"{kind.__name__} has no {name}"
        if name in SIGNAL_FIELDS:
            fields[name] = int(signal.Signals[text])
        else:
            fields[name] = READERS[kind.__annotations__[name]](text)
    return kind(**fields)


def write_fact(fact: Value) -> str:
    """Return an event or effect as its name and `name=value` words, without defaults."""
    words = [type(fact).__name__]
    for name, value in vars(fact).items():
        if name in vars(type(fact)) and value == vars(type(fact))[name]:
            continue
        if name in SIGNAL_FIELDS:
            text = signal.Signals(value).name
        elif isinstance(value, tuple):
            text = ",".join(
                f"{one.pid}:{one.scope}:{one.signum}" if isinstance(one, ExpiredTimer) else str(one)
                for one in value
            )
        else:
            text = str(value.value if hasattr(type(value), "__members__") else value)
        words.append(f"{name}={shlex.quote(text)}")
    return " ".join(words)


def read_timer(text: str) -> ExpiredTimer:
    """Parse `pid:scope:signum`."""
    pid, scope, signum = text.split(":")
    return ExpiredTimer(int(pid), scope, int(signum))


def read_keys(text: str) -> list[int]:
    return [int(key) for key in text.split(",") if key]


def listed(keys: Iterable[int]) -> str:
    return " ".join(map(str, sorted(keys)))
