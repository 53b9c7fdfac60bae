"""The command `python -m simulator`: run simulated jobs, and print the story of one that breaks an invariant.

It starts no process and opens no socket.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import count, takewhile
from typing import TYPE_CHECKING

from simulator import DRIVERS, MINUTES, NODES, PROFILES, mixed, simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from simulator import Result, World

PROGRESS_S = 2.0
STORY_LINES = 60  # The lines of a failure's story, unless `--story` prints all.
NODES_MAX = 10_000
MINUTES_MAX = 10_000.0
VIOLATED, INTERRUPTED = 1, 130

DRIVER_HELP = {
    "coordinator": "one process, which may die and be replaced",
    "etcd": "the nodes elect a leader; the coordinator's faults hit etcd instead",
    "backend": "every node, on a compare-and-set store; the coordinator's faults hit the store instead",
}
DESCRIPTION = """\
Run simulated jobs of many nodes in virtual time. The decisions are the real ones;
the network, the clocks and the workers are simulated. Every invariant is checked
after each step. The same flags give the same run on any machine.
"""
EXAMPLES = """\
examples:
  python -m simulator --seed 7 --nodes 64 --minutes 10
      one run with faults of all kinds
  python -m simulator --seed 7 --profile coordinator --story
      what happens when the coordinator dies, line by line
  python -m simulator --seeds 1:10000 --driver etcd
      many runs; the seed selects the profile and the number of nodes
  python -m simulator --seed 1 --seconds 60
      as many runs as fit into a minute, starting with seed 1

The exit code is 0 if every invariant held and 1 otherwise. A violation prints the
end of the run's story and the command that repeats it.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the simulator's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m simulator",
        usage="python -m simulator [flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--seed", type=_whole_number, metavar="N", help="the run, or with --seconds the first run"
    )
    which.add_argument(
        "--seeds", type=_seeds, metavar="A:B", help="run the seeds A to B, inclusive"
    )
    parser.add_argument(
        "--seconds", type=_minutes, metavar="S", help="start new runs for S seconds of real time"
    )
    parser.add_argument(
        "--nodes",
        type=_nodes,
        metavar="N",
        help=f"agents of a run (default {NODES}; with several runs, the seed selects the number)",
    )
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=MINUTES,
        metavar="M",
        help=f"virtual time of a run, including the quiet time at its end (default {MINUTES:g})",
    )
    parser.add_argument(
        "--profile",
        choices=list(PROFILES),
        metavar="NAME",
        help="the faults (default everything; with several runs, the seed selects the profile): "
        + "; ".join(f"{name}: {profile.about}" for name, profile in PROFILES.items()),
    )
    parser.add_argument(
        "--driver",
        choices=list(DRIVERS),
        default="coordinator",
        metavar="NAME",
        help="which process decides for a job (default coordinator): "
        + "; ".join(f"{name}: {about}" for name, about in DRIVER_HELP.items()),
    )
    parser.add_argument(
        "--story", action="store_true", help="print every step, not only those before a violation"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the simulator with these arguments and return its exit code."""
    try:
        parser = build_parser()
        args = parser.parse_args(argv)
        if args.seeds and args.seconds:
            parser.error("--seeds and --seconds cannot be combined")
        return execute(args)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        sys.stderr.write("simulator: interrupted\n")
        return INTERRUPTED


def execute(args: argparse.Namespace) -> int:
    """Simulate the requested seeds, up to the first violation."""
    is_one = args.seeds is None and args.seconds is None
    progress = SeedProgress(total=0 if args.seconds else len(_seeds_of(args)))
    for seed in _until(args.seconds, _seeds_of(args)):
        profile, nodes = ("everything", NODES) if is_one else mixed(seed)
        result = simulate(
            seed,
            nodes=args.nodes or nodes,
            minutes=args.minutes,
            profile=args.profile or profile,
            driver=args.driver,
            complete_story=args.story,
            progress=progress.within,
        )
        progress.ran(result)
        if args.story or result.violation:
            lines = result.story if args.story else result.story[-STORY_LINES:]
            sys.stdout.write("".join(f"{line}\n" for line in lines))
        if result.violation:
            sys.stdout.write(
                f"simulator: {result.invariant} does not hold: {result.violation}\n"
                f"repeat it with: {result.command}\n"
            )
            return VIOLATED
    sys.stdout.write(f"{progress}, every invariant held\n")
    return 0


def _seeds_of(args: argparse.Namespace) -> range:
    first = 1 if args.seed is None else args.seed
    if args.seconds is not None:
        return range(first, sys.maxsize)
    return range(args.seeds[0], args.seeds[1] + 1) if args.seeds else range(first, first + 1)


def _until(seconds: float | None, seeds: range) -> Iterable[int]:
    if seconds is None:
        return seeds
    end = time.monotonic() + seconds
    return takewhile(lambda _seed: time.monotonic() < end, count(seeds.start))


class SeedProgress:
    """Reports progress on standard error every few seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._runs = self._steps = 0
        self._began = self._reported = time.monotonic()

    def __str__(self) -> str:
        took = max(1e-9, time.monotonic() - self._began)
        runs = "1 run" if self._runs == 1 else f"{self._runs:,} runs"
        return f"{runs}, {self._steps:,} steps, {self._steps / took:,.0f} steps/s"

    def ran(self, result: Result) -> None:
        self._runs += 1
        self._steps += result.steps
        of = f" of {self._total:,}" if self._total else ""
        self._report(f"{self._runs:,}{of} runs, {self._steps:,} steps")

    def within(self, world: World) -> None:
        steps = self._steps + world.steps
        self._report(
            f"{self._runs:,} runs and {world.now / 60:.1f} virtual minutes, {steps:,} steps"
        )

    def _report(self, what: str) -> None:
        now = time.monotonic()
        if now - self._reported >= PROGRESS_S:
            self._reported = now
            sys.stderr.write(f"simulator: {what}\n")
            sys.stderr.flush()


# Values of flags.


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _seeds(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form A:B, such as 1:1000")
    span = (_whole_number(first), _whole_number(last))
    if span[0] > span[1]:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
    return span


def _nodes(text: str) -> int:
    nodes = _whole_number(text)
    if not 1 <= nodes <= NODES_MAX:
        raise argparse.ArgumentTypeError(f"{nodes} is not between 1 and {NODES_MAX}")
    return nodes


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < minutes <= MINUTES_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {MINUTES_MAX:g}")
    return minutes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
