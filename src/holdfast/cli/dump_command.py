"""The command `dump`: the Python stacks of workers, on this machine or on all nodes of a job.

On this machine the command finds workers in `/proc` and connects to no agent, so it also works if an agent
is stuck. For all nodes it queries their agents, and shows identical stacks once.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from holdfast.cli.operate import add_job_flags, choice_of, connect, print_text
from holdfast.cli.parser import CommandParser
from holdfast.control.job_client import JobNotFound
from holdfast.control.name_matching import match_name
from holdfast.control.stack_groups import grouped
from holdfast.errors import HoldfastError, UsageError
from holdfast.printable import visible
from holdfast.processes.keeper.keeper_program import descendants_of
from holdfast.processes.local_workers import LocalWorker, local_workers
from holdfast.processes.procfs import command_of, exists, initial_environment
from holdfast.processes.stacks import dump_stacks, is_python

if TYPE_CHECKING:
    from holdfast.control.job_client import NodeStacks

CONCURRENT_DUMPS = 8
"""How many workers are dumped at the same time. Simultaneous stacks show which workers wait for each other."""
NODES_AT_ONCE = 64
"""How many nodes the command queries at the same time."""
SUBPROCESSES_SHOWN = 64
"""How many subprocesses of one worker are shown."""
NOTHING_FOUND = 1

DESCRIPTION = """\
Show the Python stacks of all threads of the workers on this machine, or of all
nodes of a job. The scripts need not import Holdfast.
"""
EXAMPLES = """\
examples:
  holdfast dump
      all your workers on this machine
  holdfast dump --run-id nightly
      the workers of one job
  holdfast dump --all-nodes
      the workers of a job on all its nodes, identical stacks once:
      31 ranks: all_reduce, train.py:88; rank 7: read, data.py:12
  holdfast dump --subprocesses 4711
      any process, and all its subprocesses

Stacks are read with py-spy (pip install 'holdfast-run[dump]'), or requested at a
worker's control socket. If neither is available, the state from the kernel is
shown.
"""


def build_parser(name: str) -> CommandParser:
    """Return the parser of `holdfast dump`."""
    parser = CommandParser(
        prog=f"holdfast {name}",
        usage="holdfast dump [flags] [PID ...]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--all-nodes",
        "--all_nodes",
        action="store_true",
        help="show all nodes of a job, by querying their agents",
    )
    add_job_flags(parser, operand=False)
    parser.add_argument(
        "--subprocesses",
        action="store_true",
        help="also show subprocesses of workers; those of a worker that is not a Python program "
        "are always shown",
    )
    parser.add_argument("pids", nargs="*", type=_pid, metavar="PID", help="only these processes")
    return parser


def _pid(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a process id; accepted: digits (--rdzv-id names a job)"
        )
    return int(text[:9])


def execute(args: argparse.Namespace) -> None:
    """Print the stacks of the workers on this machine, or on all nodes."""
    if args.all_nodes or choice_of(args).names_endpoint:
        if args.pids or args.subprocesses:
            raise UsageError(
                "--all-nodes: conflicts with PID and --subprocesses; accepted: one of them"
            )
        _dump_all_nodes(args)
        return

    workers = _chosen(args)
    with ThreadPoolExecutor(CONCURRENT_DUMPS) as pool:
        try:
            for text in pool.map(lambda worker: _dump(worker, args.subprocesses), workers):
                print_text(visible(text))
        except BrokenPipeError:
            pass  # The reader of standard output has exited.


def _chosen(args: argparse.Namespace) -> list[LocalWorker]:
    """Return the chosen workers. Only a pid can choose a process that is not a worker."""
    found = local_workers()
    if args.pids:
        known = {worker.pid: worker for worker in found}
        found = [
            known.get(pid) or LocalWorker(pid, initial_environment(pid), is_worker=False)
            for pid in args.pids
        ]
        gone = [worker.pid for worker in found if not exists(worker.pid)]
        if gone:
            raise HoldfastError(f"no process {gone[0]} on this machine", exit_code=NOTHING_FOUND)
    if args.rdzv_id:
        others = sorted({worker.run_id for worker in found})
        run_id = match_name(args.rdzv_id, others, "jobs")
        found = [worker for worker in found if run_id and worker.run_id == run_id]
        if not found and others:
            raise HoldfastError(
                f"--run-id: no worker of {args.rdzv_id!r} on this machine",
                hint=f"there are workers of {', '.join(map(repr, others))}",
                exit_code=NOTHING_FOUND,
            )
    if not found:
        raise HoldfastError("none of your workers run on this machine", exit_code=NOTHING_FOUND)
    return found


def _dump(worker: LocalWorker, with_subprocesses: bool) -> str:
    text = f"== {worker.described()}\n{_body(dump_stacks(worker.pid, worker.env))}\n"
    below = descendants_of(worker.pid) if with_subprocesses or not is_python(worker.pid) else []
    for pid in below[:SUBPROCESSES_SHOWN]:
        head = f"== below pid {worker.pid}: pid {pid}, {command_of(pid)}"
        text += f"{head}\n{_body(dump_stacks(pid))}\n"
    if len(below) > SUBPROCESSES_SHOWN:
        text += f"== below pid {worker.pid}: {len(below) - SUBPROCESSES_SHOWN} more processes\n"
    return text


def _body(stacks: str) -> str:
    """Indent lines that look like the head of another process."""
    return "\n".join(f" {line}" if line.startswith("==") else line for line in stacks.split("\n"))


# All nodes.


def _dump_all_nodes(args: argparse.Namespace) -> None:
    async def dump() -> tuple[list[tuple[int, str]], list[str]]:
        async with await connect(args) as client:
            job = await client.status()
            turns = asyncio.Semaphore(NODES_AT_ONCE)

            async def query(name: str) -> NodeStacks:
                async with turns:
                    return await client.stacks(name)

            found = await asyncio.gather(
                *(query(node.node) for node in job.nodes if node.first_rank >= 0)
            )
        stacks = [(one.rank, one.text) for node in found for one in node.workers]
        return stacks, [f"{node.node}: {node.problem}" for node in found if node.problem]

    stacks, problems = asyncio.run(dump())
    if not stacks:
        why = problems[0] if problems else "the job has no workers now"
        raise JobNotFound(why)
    groups = grouped(stacks)
    try:
        summary = "; ".join(f"{group.ranks_text}: {group.frame}" for group in groups)
        print_text(visible(f"{summary}\n"))
        for group in groups:
            print_text(visible(f"\n== {group.ranks_text}: {group.frame}\n{_body(group.text)}\n"))
    except BrokenPipeError:
        pass  # The reader of standard output has exited.
    for problem in problems:
        print(f"holdfast dump: {problem}", file=sys.stderr)
