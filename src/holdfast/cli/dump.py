"""The verb `dump`: where the workers of this machine are, as Python stacks, on standard output.

It asks no agent and no coordinator: workers are found in `/proc`, so it helps with an agent that is
stuck too, and with scripts that import nothing of Holdfast.
"""

from __future__ import annotations

import sys

from holdfast.cli.parser import Help, VerbParser
from holdfast.errors import EnvironmentProblem, HoldfastError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from holdfast.control.local_workers import LocalWorker

AT_ONCE = 8
"""How many workers are looked at in the same moment: what waits for each other is best seen so."""
BELOW_MAX = 64
"""How many processes of one worker are shown."""
NOTHING_FOUND = 1

DESCRIPTION = """\
Show where the workers on this machine are: the Python stacks of all their
threads. The scripts need not have imported anything of Holdfast.
"""
EXAMPLES = """\
examples:
  holdfast dump
      of all your workers on this machine
  holdfast dump --run-id nightly
      of one job
  holdfast dump --subprocesses 4711
      of one process, whatever it is, and all that it has started

Stacks are read by py-spy (pip install py-spy), or asked for at a
worker's control socket. Where neither can be, what the kernel tells is shown.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `holdfast dump`."""
    parser = VerbParser(
        prog="holdfast dump",
        usage="holdfast dump [flags] [PID ...]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument(
        "--run-id",
        "--run_id",
        metavar="ID",
        help="only the workers of this job; of all jobs unless given",
    )
    parser.add_argument(
        "--subprocesses",
        action="store_true",
        help="the processes that workers have started too; those of a worker that is no Python "
        "program are shown in any case",
    )
    parser.add_argument("pids", nargs="*", type=int, metavar="PID", help="only these processes")
    return parser


def parse_args(args: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; one that is wrong ends the process with one line and exit code 2."""
    return build_parser().parse_args(args)


def execute(args: argparse.Namespace) -> None:
    """Print the stacks, worker by worker."""
    from concurrent.futures import ThreadPoolExecutor

    workers = _chosen(args)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for text in pool.map(lambda worker: _shown(worker, args.subprocesses), workers):
            _print(text)


def _print(text: str) -> None:
    """Write to standard output, whatever its encoding is; raise if it takes no more."""
    if sys.stdout is None:
        raise EnvironmentProblem("standard output is closed")
    encoding = sys.stdout.encoding
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # Whoever read it has seen enough.
    except OSError as problem:
        raise EnvironmentProblem(
            f"standard output cannot be written: {problem.strerror or problem}"
        ) from None


def _chosen(args: argparse.Namespace) -> list[LocalWorker]:
    """Return the workers that are meant; processes that are no workers only by their number."""
    from holdfast.control.local_workers import LocalWorker, local_workers
    from holdfast.processes.procfs import exists, initial_environment

    found = local_workers()
    if args.pids:
        known = {worker.pid: worker for worker in found}
        found = [
            known.get(pid) or LocalWorker(pid, initial_environment(pid), is_worker=False)
            for pid in args.pids
        ]
        gone = [worker.pid for worker in found if not exists(worker.pid)]
        if gone:
            raise HoldfastError(f"there is no process {gone[0]} here", exit_code=NOTHING_FOUND)
    if args.run_id is not None:
        others = sorted({worker.run_id for worker in found})
        found = [worker for worker in found if worker.run_id == args.run_id]
        if not found and others:
            raise HoldfastError(
                f"--run-id: no worker of {args.run_id!r} runs here",
                hint=f"there are workers of {', '.join(map(repr, others))}",
                exit_code=NOTHING_FOUND,
            )
    if not found:
        raise HoldfastError("no worker of yours runs on this machine", exit_code=NOTHING_FOUND)
    return found


def _shown(worker: LocalWorker, with_subprocesses: bool) -> str:
    from holdfast.control.stacks import dump_stacks, is_python
    from holdfast.processes.keeper.main import descendants_of
    from holdfast.processes.procfs import command_of

    text = f"== {worker.described()}\n{dump_stacks(worker.pid, worker.env)}\n"
    below = descendants_of(worker.pid) if with_subprocesses or not is_python(worker.pid) else []
    for pid in below[:BELOW_MAX]:
        text += f"== below pid {worker.pid}: pid {pid}, {command_of(pid)}\n{dump_stacks(pid)}\n"
    if len(below) > BELOW_MAX:
        text += f"== below pid {worker.pid}: {len(below) - BELOW_MAX} more processes\n"
    return text
