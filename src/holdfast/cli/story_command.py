"""The command `story`: merges story files and prints their steps in the order of their causes.

A step follows its cause and the earlier steps of its own node. Otherwise the order is that of the files, which
contain no times.
"""

from __future__ import annotations

import heapq
import re
import sys
from typing import TYPE_CHECKING

from holdfast.cli.parser import CommandParser
from holdfast.core.values import Value
from holdfast.errors import UsageError
from holdfast.printable import one_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

DESCRIPTION = """\
Show what happened in a job, step by step, over all its nodes: what each agent and
the coordinator received, what they decided, and which earlier step was the cause.
"""
EXAMPLES = """\
examples:
  holdfast run --story job.story --nnodes 2 ... train.py      (on each node)
  holdfast story job.story
      all steps, in the order of their causes
  holdfast story node1.story node2.story --from node1/supervision#7
      one step, and everything it led to on any node
  holdfast story job.story --why node2/supervision#9
      one step, and what led to it
"""

MESSAGE = re.compile(r"[^\s(),=]+/(?:status|view)#[\d.]*\d")
DESCRIBED = re.compile(rf"({MESSAGE.pattern})(\[.*?\])")


class StoryLine(Value):
    """One line of a story file, which is one step."""

    step: str
    cause: str
    state: str
    event: str
    effects: str

    @property
    def node(self) -> str:
        """The node that took the step."""
        return self.step.rpartition("/")[0]


class Listing:
    """The steps of several files. `causes` has the index of each step's cause, or None."""

    def __init__(self, lines: Sequence[StoryLine]) -> None:
        self.lines = lines
        self.causes: list[int | None] = []
        steps: dict[str, list[int]] = {}
        senders: dict[str, list[int]] = {}
        for at, line in enumerate(lines):
            steps.setdefault(line.step, []).append(at)
            for message in MESSAGE.findall(line.effects):
                senders.setdefault(message, []).append(at)
        for at, line in enumerate(lines):
            # The ids of an agent that was restarted begin again.
            found = _nearest(steps.get(line.cause, []), at)
            if found is None:
                # If a node sent the message to itself, the cause is its last earlier step that sent it.
                sent = senders.get(line.cause, [])
                own = [one for one in sent if one < at and lines[one].node == line.node]
                others = [one for one in sent if lines[one].node != line.node]
                found = own[-1] if own else _nearest(others, at)
            self.causes.append(found if found != at else None)

    def text(self, at: int, described: set[str]) -> str:
        """Return a step as it is printed; a message is described where it occurs first."""

        def describe(found: re.Match[str]) -> str:
            message, what = found.groups()
            new = message not in described
            described.add(message)
            return message + what if new else message

        line, cause = self.lines[at], self.causes[at]
        origin = line.cause
        if cause is not None and origin != self.lines[cause].step:
            origin = f"{self.lines[cause].step} by {origin}"
        what = DESCRIBED.sub(describe, f"{line.event} -> {line.effects or 'nothing'}")
        state = f" ({line.state})" if line.state else ""
        return f"{line.step}{state}: {what}" + (f" <- {origin}" if origin else "")

    def in_order(self) -> list[int]:
        """Return the indices of all steps, each after its cause and its node's earlier steps."""
        after: list[list[int]] = [[] for _ in self.lines]
        waits = [0] * len(self.lines)
        newest: dict[str, int] = {}
        for at, line in enumerate(self.lines):
            for before in {newest.get(line.node), self.causes[at]} - {None}:
                assert before is not None
                after[before].append(at)
                waits[at] += 1
            newest[line.node] = at
        ready = [at for at, count in enumerate(waits) if not count]
        order: list[int] = []
        while ready:
            at = heapq.heappop(ready)
            order.append(at)
            for later in after[at]:
                waits[later] -= 1
                if not waits[later]:
                    heapq.heappush(ready, later)
        # If a file lacks lines, steps can form a cycle. Such steps come last, in the order of the files.
        return [*order, *sorted(set(range(len(self.lines))).difference(order))]

    def index_of(self, step: str, flag: str) -> int:
        """Return the index of a step, by its id or the end of it."""
        found = [at for at, line in enumerate(self.lines) if line.step == step]
        found = found or [at for at, line in enumerate(self.lines) if line.step.endswith(step)]
        if len({self.lines[at].step for at in found}) != 1:
            what = "is not a step" if not found else "matches several steps"
            raise UsageError(f"{flag}: {step!r} {what} of these files; accepted: an id, as listed")
        return found[-1]  # The newest, if the agent was restarted.

    def caused_by(self, first: int) -> set[int]:
        """Return the indices of a step and of all steps that it led to."""
        found = {first}
        for at in self.in_order():
            if self.causes[at] in found:
                found.add(at)
        return found

    def causes_of(self, last: int) -> set[int]:
        """Return the indices of a step and of all steps that led to it."""
        found: set[int] = set()
        at: int | None = last
        while at is not None and at not in found:
            found.add(at)
            at = self.causes[at]
        return found


def _nearest(steps: list[int], at: int) -> int | None:
    """Return the last of these steps before another one, or else the first."""
    before = [one for one in steps if one < at]
    return before[-1] if before else next(iter(steps), None)


def read(paths: Iterable[str]) -> list[StoryLine]:
    """Return the lines of story files, file by file, without lines of another form.

    With `--story -` a file can contain other output too, but a file without any step is a mistake.
    """
    lines: list[StoryLine] = []
    for path in paths:
        before = len(lines)
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                for text in file:
                    fields = text.rstrip("\n").split("\t")
                    if len(fields) == len(StoryLine.__match_args__):
                        lines.append(StoryLine(*fields))
        except OSError as problem:
            raise UsageError(f"FILE: cannot read {path!r}: {problem.strerror}") from None
        if len(lines) == before:
            raise UsageError(f"FILE: {path!r} has no steps; accepted: files written by --story")
    return lines


def build_parser(name: str) -> CommandParser:
    """Return the parser of `holdfast story`."""
    parser = CommandParser(
        prog=f"holdfast {name}",
        usage="holdfast story [--from STEP | --why STEP] FILE ...",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--from", dest="first", metavar="STEP", help="a step, and everything it led to"
    )
    which.add_argument("--why", dest="last", metavar="STEP", help="a step, and what led to it")
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="files written by --story, of any nodes"
    )
    return parser


def execute(args: argparse.Namespace) -> None:
    """Print the selected steps."""
    listing = Listing(read(args.files))
    shown = set(range(len(listing.lines)))
    if args.first:
        shown = listing.caused_by(listing.index_of(args.first, "--from"))
    elif args.last:
        shown = listing.causes_of(listing.index_of(args.last, "--why"))
    described: set[str] = set()
    for at in listing.in_order():
        if at in shown:
            sys.stdout.write(f"{one_line(listing.text(at, described))}\n")
