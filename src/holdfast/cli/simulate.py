"""The verb `simulate`: run simulated jobs, and show the story of one that breaks an invariant.

It starts no process and opens no socket. What runs is `holdfast.testing.sim`; this module only
reads the flags, reports progress, and prints what was found.
"""

from __future__ import annotations

import argparse
import sys
import time

from holdfast.cli.parser import CommandParser, Help

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.testing.sim import Result, World

PROGRESS_S = 2.0
STORY_LINES = 60  # Of a failure, unless the whole story is asked for.
NODES_MAX = 10_000
MINUTES_MAX = 10_000.0
VIOLATED = 1

DRIVER_HELP = {
    "coordinator": "one process that may die and be replaced",
    "etcd": "the nodes themselves, one of them leading; the coordinator's faults are etcd's",
    "backend": "each node, in a compare-and-set store; the coordinator's faults are the store's",
}
DESCRIPTION = """\
Run simulated jobs of many nodes in virtual time: the decisions are the real ones,
the network, the clocks and the workers are not. Every invariant is checked after
each step. The same flags give the same run, on any machine.
"""
EXAMPLES = """\
examples:
  holdfast simulate --seed 7 --nodes 64 --minutes 10
      one run with all kinds of faults
  holdfast simulate --seed 7 --profile coordinator --story
      what happens when the coordinator dies, line by line
  holdfast simulate --seed 7 --profile coordinator --driver etcd --story
      what happens when etcd, or the node that leads, dies
  holdfast simulate --seeds 1:10000
      many runs, with a profile and a number of nodes that depend on the seed

It ends with 0 if every invariant held, and with 1 if one did not: then the story of
that run is shown, and the command that shows it again.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `holdfast simulate`."""
    from holdfast.testing.sim import DRIVERS, MINUTES, NODES, PROFILES

    parser = CommandParser(
        prog="holdfast simulate",
        usage="holdfast simulate [flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=_seed, metavar="N", help="which run (default 1)")
    which.add_argument(
        "--seeds", type=_seeds, metavar="A:B", help="many runs, from seed A to B, both included"
    )
    parser.add_argument(
        "--nodes",
        type=_nodes,
        metavar="N",
        help=f"agents of a run (default {NODES}; with --seeds by the seed)",
    )
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=MINUTES,
        metavar="M",
        help=f"virtual time of a run, with the quiet at its end (default {MINUTES:g})",
    )
    parser.add_argument(
        "--profile",
        choices=list(PROFILES),
        metavar="NAME",
        help="which faults there are (default everything; with --seeds by the seed): "
        + "; ".join(f"{name}: {profile.about}" for name, profile in PROFILES.items()),
    )
    parser.add_argument(
        "--driver",
        choices=list(DRIVERS),
        default="coordinator",
        metavar="NAME",
        help="who decides for a job (default coordinator): "
        + "; ".join(f"{name}: {about}" for name, about in DRIVER_HELP.items()),
    )
    parser.add_argument(
        "--story", action="store_true", help="print all that happens, not only before a failure"
    )
    return parser


def command(argv: Sequence[str]) -> int:
    """Run `holdfast simulate` with these arguments and return its exit code."""
    try:
        args = build_parser().parse_args(argv)
        return execute(args)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        sys.stderr.write("holdfast simulate: interrupted\n")
        return 130


def execute(args: argparse.Namespace) -> int:
    """Run what was asked for, up to the first invariant that does not hold."""
    from holdfast.testing.sim import NODES, mixed, simulate

    seed = 1 if args.seed is None else args.seed
    first, last = args.seeds or (seed, seed)
    progress = Progress(first, last)
    for seed in range(first, last + 1):
        profile, nodes = mixed(seed) if args.seeds else ("everything", NODES)
        result = simulate(
            seed,
            nodes=args.nodes or nodes,
            minutes=args.minutes,
            profile=args.profile or profile,
            driver=args.driver,
            whole_story=args.story,
            progress=progress.within,
        )
        progress.ran(result)
        if args.story or result.violation:
            lines = result.story if args.story else result.story[-STORY_LINES:]
            sys.stdout.write("".join(f"{line}\n" for line in lines))
        if result.violation:
            sys.stdout.write(
                f"holdfast simulate: {result.invariant} does not hold: {result.violation}\n"
                f"see it again: {result.command}\n"
            )
            return VIOLATED
    sys.stdout.write(f"{progress}, every invariant held\n")
    return 0


class Progress:
    """Progress, reported now and then on standard error."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._runs = self._steps = 0
        self._began = self._said = time.monotonic()

    def __str__(self) -> str:
        took = max(1e-9, time.monotonic() - self._began)
        runs = "1 run" if self._runs == 1 else f"{self._runs:,} runs"
        return f"{runs}, {self._steps:,} steps, {self._steps / took:,.0f} steps/s"

    def ran(self, result: Result) -> None:
        self._runs += 1
        self._steps += result.steps
        self._say(f"{self._runs:,} of {self._last - self._first + 1:,} runs, {self._steps:,} steps")

    def within(self, world: World) -> None:
        runs = f"{self._runs:,} runs, " if self._last > self._first else ""
        steps = self._steps + world.steps
        self._say(f"{runs}{world.now / 60:.1f} virtual minutes of this one, {steps:,} steps")

    def _say(self, what: str) -> None:
        now = time.monotonic()
        if now - self._said >= PROGRESS_S:
            self._said = now
            sys.stderr.write(f"holdfast simulate: {what}\n")
            sys.stderr.flush()


# What flags accept.


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number; accepted: digits, such as 5"
        ) from None


def _seeds(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form A:B, such as 1:1000")
    span = (_seed(first), _seed(last))
    if span[0] > span[1]:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
    return span


def _nodes(text: str) -> int:
    count = _seed(text)
    if not 1 <= count <= NODES_MAX:
        raise argparse.ArgumentTypeError(f"{count} is not between 1 and {NODES_MAX}")
    return count


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < minutes <= MINUTES_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {MINUTES_MAX:g}")
    return minutes
