"""Transcripts of the two machines of the core: what goes in, ----, all that comes of it.

A transcript is a text file that begins with a comment saying what it shows. Then come blocks,
parted by empty lines, each with one input above its `----`::

    new local_world_size=2 max_restarts=1          makes a machine; what follows is told to it
    new local_world_size=2 max_restarts=1 started=true      the same, with its workers running
    0.25 WorkerExited generation=0 local_rank=1 failed=true      an event, at its time in seconds

Below `----` are the effects, in order, or the error; the last line is the state after it. A field
that has its default value is left out. A further `new` begins another story in the same file.

To write what happens now below every `----` (a new block may be without one)::

    pytest --rewrite-scenarios tests/scenarios

and read the difference before you keep it: a transcript is a promise.
"""

from __future__ import annotations

import re
import shlex
import signal
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args

import pytest

from holdfast.core import stopping, supervision
from holdfast.core.facts import Fact
from holdfast.core.stopping import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.core.supervision import State

HERE = Path(__file__).parent
MARK = "----"
SIGNAL_FIELDS = ("signum", "died_of")  # written by name: SIGTERM, not 15
EVENTS: dict[str, type[supervision.Event]] = {
    kind.__name__: kind for kind in get_args(supervision.Event)
}
READERS: dict[str, Callable[[str], object]] = {
    "bool": {"true": True, "false": False}.__getitem__,
    "int": int,
    "float": float,
    "str": str,
}
FactT = TypeVar("FactT", bound=Fact)


class Transcript:
    """A file's blocks, each as its lines above and below the mark."""

    def __init__(self, text: str) -> None:
        self.blocks = []
        for chunk in re.split(r"\n{2,}", text.strip()):
            above, _, below = f"{chunk}\n".partition(f"\n{MARK}\n")
            self.blocks.append((above.splitlines(), below.splitlines()))

    def replayed(self, player: Player) -> str:
        """Return the whole text as it must be, by what the player says happens."""
        chunks = []
        for above, _ in self.blocks:
            inputs = [line for line in above if not line.startswith("#")]
            assert len(inputs) <= 1, f"one input a block, please: {inputs}"
            below = [MARK, *player.play(inputs[0])] if inputs else []
            chunks.append("\n".join([*above, *below]))
        return "\n\n".join(chunks) + "\n"


class Player(Protocol):
    """Plays the inputs of one transcript to its machine."""

    def play(self, line: str) -> list[str]:
        """Perform one input; return all that came of it, as lines."""


class Clock:
    """The times of a story, which must not run backwards."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self, text: str) -> float:
        now = float(text)
        assert now >= self.now, f"time runs backwards: {text} after {self.now:g}"
        self.now = now
        return now


class SupervisionSettings(Fact):
    local_world_size: int
    max_restarts: int
    started: bool = False


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
            happened = [write_fact(effect) for effect in effects]
        except supervision.InvalidEvent as error:
            happened = [f"InvalidEvent: {error}"]
        self.machine.check()
        return [*happened, self._state()]

    def _make(self, settings: SupervisionSettings) -> None:
        self.machine = supervision.Supervision(
            local_world_size=settings.local_world_size, max_restarts=settings.max_restarts
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


class StopSettings(Fact):
    running: str
    signum: int
    grace_s: float
    reap_s: float
    hopeless: str = ""


class LeaderEnded(Fact):
    key: int
    died_of: int = 0


class StoppingPlayer:
    def __init__(self) -> None:
        self.passed: set[tuple[Phase, Phase]] = set()

    def play(self, line: str) -> list[str]:
        first, *words = shlex.split(line)
        if first == "new":
            settings = read_fact(StopSettings, words)
            self.stop = stopping.Stop(
                read_keys(settings.running),
                signum=settings.signum,
                grace_s=settings.grace_s,
                reap_s=settings.reap_s,
                hopeless=read_keys(settings.hopeless),
            )
            self.clock = Clock()
            return [self._state()]
        before = self.stop.phase
        effects = self._call(self.clock.read(first), words[0], words[1:])
        self.passed.add((before, self.stop.phase))
        return [*map(write_fact, effects), self._state()]

    def _call(self, now: float, name: str, words: list[str]) -> Iterable[stopping.Effect]:
        if name == "leader_ended":
            ended = read_fact(LeaderEnded, words)
            return self.stop.leader_ended(now, ended.key, died_of=ended.died_of)
        assert not words, f"{name} takes no fields"
        if name in ("cleared", "abandon"):
            getattr(self.stop, name)()
            return []
        timed: dict[str, Callable[[float], list[stopping.Effect]]] = {
            "begin": self.stop.begin,
            "kill_now": self.stop.kill_now,
            "tick": self.stop.tick,
        }
        return timed[name](now)

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
        if stop.patience_lost:
            parts.append("out of patience")
        deadline = stop.next_deadline()
        parts.append("no deadline" if deadline is None else f"deadline at {deadline:g}")
        return f"{stop.phase.value}: {', '.join(parts)}"


def read_fact(kind: type[FactT], words: Iterable[str]) -> FactT:
    """Make a fact of `name=value` words."""
    fields: dict[str, Any] = {}
    for name, text in (word.split("=", 1) for word in words):
        assert name in kind.__annotations__, f"{kind.__name__} has no {name}"
        if name in SIGNAL_FIELDS:
            fields[name] = int(signal.Signals[text])
        else:
            fields[name] = READERS[kind.__annotations__[name]](text)
    return kind(**fields)


def write_fact(fact: Fact) -> str:
    """Write a fact as its name and `name=value` words, but for what is as by default."""
    words = [type(fact).__name__]
    for name, value in vars(fact).items():
        if name in vars(type(fact)) and value == vars(type(fact))[name]:
            continue
        if name in SIGNAL_FIELDS:
            text = signal.Signals(value).name
        else:
            text = str(value.value if isinstance(value, Enum) else value)
        words.append(f"{name}={shlex.quote(text)}")
    return " ".join(words)


def read_keys(text: str) -> list[int]:
    return [int(key) for key in text.split(",") if key]


def listed(keys: Iterable[int]) -> str:
    return " ".join(map(str, sorted(keys)))


PLAYERS: dict[str, type[Player]] = {
    "supervision": SupervisionPlayer,
    "stopping": StoppingPlayer,
}


def transcripts(folder: str) -> list[Path]:
    return sorted((HERE / folder).glob("*.txt"))


FILES = [path for folder in PLAYERS for path in transcripts(folder)]


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_transcript(path: Path, pytestconfig: pytest.Config) -> None:
    written = path.read_text()
    happened = Transcript(written).replayed(PLAYERS[path.parent.name]())
    if pytestconfig.getoption("rewrite_scenarios"):
        path.write_text(happened)
    else:
        assert written == happened


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_transcript_says_first_what_it_shows(path: Path) -> None:
    assert re.match(r"# [A-Z].+\.$", path.read_text().partition("\n\n")[0].replace("\n# ", " "))


def test_every_rule_of_supervision_has_its_transcript() -> None:
    rules = re.findall(r"^(\d+)\. ", supervision.__doc__ or "", flags=re.MULTILINE)
    assert len(rules) >= 6
    numbers = [path.name.partition("_")[0] for path in transcripts("supervision")]
    assert [number for number in numbers if number.isdigit()] == rules


def test_the_transcripts_use_every_handler_of_supervision() -> None:
    player = SupervisionPlayer()
    for path in transcripts("supervision"):
        Transcript(path.read_text()).replayed(player)
    assert set(supervision._HANDLERS) - player.handled == set()


def test_the_transcripts_take_every_path_of_a_stop_and_no_other() -> None:
    player = StoppingPlayer()
    for path in transcripts("stopping"):
        Transcript(path.read_text()).replayed(player)
    moves = {(before, after) for before, after in player.passed if before is not after}
    assert moves == {
        (Phase.ASKING, Phase.LEFTOVERS),
        (Phase.ASKING, Phase.KILLING),
        (Phase.ASKING, Phase.SWEEPING),
        (Phase.ASKING, Phase.ENDED),  # the keeper was lost
        (Phase.LEFTOVERS, Phase.ENDED),
        (Phase.LEFTOVERS, Phase.SWEEPING),
        (Phase.KILLING, Phase.SWEEPING),
        (Phase.SWEEPING, Phase.ENDED),
    }


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("1 WorkersStarted", "generation"),
        ("1 WorkersStarted generation=0 loudly=true", "loudly"),
        ("1 SignalReceived signum=SIGNONE", "SIGNONE"),
        ("1 WorkerExited generation=0 local_rank=0 failed=yes", "yes"),
        ("1 WorkersFled generation=0", "WorkersFled"),
        ("-1 Begun", "backwards"),
    ],
)
def test_a_slip_in_an_input_is_an_error(line: str, complaint: str) -> None:
    player = SupervisionPlayer()
    player.play("new local_world_size=1 max_restarts=0")
    with pytest.raises((AssertionError, KeyError, TypeError), match=complaint):
        player.play(line)


def test_a_transcript_that_says_otherwise_is_noticed_and_rewritten() -> None:
    text = "# It begins.\n\nnew local_world_size=1 max_restarts=0\n----\ndone\n\n0 Begun\n"
    expected = (
        "# It begins.\n\nnew local_world_size=1 max_restarts=0\n----\n"
        "idle: generation -1, 0 of 0 restarts used\n\n"
        "0 Begun\n----\nJoinRound\njoining: generation -1, 0 of 0 restarts used\n"
    )
    assert Transcript(text).replayed(SupervisionPlayer()) == expected
    assert Transcript(expected).replayed(SupervisionPlayer()) == expected
