"""The command `report`: writes one HTML file about a job, from its log directories.

It only reads files, so it works for jobs that ended, were killed or still run, on any machine that has
the folders.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from holdfast import console
from holdfast.cli.parser import CommandParser
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.printable import one_line
from holdfast.processes.failures.error_file import write_whole
from holdfast.views.report import model, records
from holdfast.views.report.html import render

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from holdfast.views.report.model import Report
    from holdfast.views.report.records import NodeRun

DESCRIPTION = """\
Make one HTML file of what happened in a job: how it ended and why, a timeline of
generations, goodput and what cost the rest, every failure, and the progress and
rate of each rank. It needs no server, and nothing from elsewhere.
"""
EXAMPLES = """\
examples:
  holdfast run --log-dir logs train.py
  holdfast report logs
      the newest job in logs, as logs/report.html
  holdfast report node1/logs node2/logs --output job.html
      one job from the folders of its nodes
  holdfast report logs --json | jq .goodput
      the same for programs

A job records what this needs if it was started with --log-dir, --redirects or
--tee, or if it failed.
"""
STDOUT = "-"
DEFAULT_NAME = "report.html"
TELL_AFTER_S, TELL_EVERY_S = 2.0, 1.0
"""When to report progress on standard error."""


def build_parser(name: str) -> CommandParser:
    """Return the parser of `holdfast report`."""
    parser = CommandParser(
        prog=f"holdfast {name}",
        usage="holdfast report [--output FILE] [--json] FOLDER ...",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="where to write it; - for standard output (report.html in the first FOLDER)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="write JSON, to standard output unless --output is given",
    )
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="log directories of the job's nodes, or of all runs: the newest job is taken",
    )
    return parser


def execute(args: argparse.Namespace) -> None:
    """Write the report, and print where it is."""
    report = make(args.folders)
    if args.json:
        text = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    else:
        text = render(report).encode("utf-8", "backslashreplace")
    output = args.output or (STDOUT if args.json else os.path.join(args.folders[0], DEFAULT_NAME))
    if output == STDOUT:
        _print(text)
        return
    if not args.output and os.path.islink(output):
        # The owner of the folder must not choose which file of this user is replaced.
        raise UsageError(f"{output} is a symbolic link; name a file with --output")

    try:
        write_whole(output, text)
    except OSError as problem:
        raise EnvironmentProblem(
            f"cannot write {output}: {problem.strerror or problem}",
            hint="name another file with --output",
        ) from None
    _print(f"{address_of(output)}\n".encode())


def make(folders: Sequence[str]) -> Report:
    """Return the report of the newest job in these folders."""
    tell = _Teller()
    jobs = records.jobs_in(records.read(folders, tell))
    if not jobs:
        raise UsageError(f"FOLDER: no timeline in {folders[0]!r} can be read")
    if len(jobs) > 1:
        tell.line(f"these folders have {len(jobs)} jobs; the newest is {_named(jobs[0])}")
        tell.line("name the folders of another one for its report")
    for count, run in enumerate(jobs[0]):
        tell(f"read the logs of {count} of {len(jobs[0])} nodes")
        records.look_around(run)
    tell(f"put {len(jobs[0])} nodes together")
    return model.describe(jobs[0], len(jobs) - 1)


def address_of(path: str) -> str:
    """Return the URL of a file."""
    return "file://" + quote(os.fsencode(os.path.abspath(path)))


def _named(job: Sequence[NodeRun]) -> str:
    run = job[0].run
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.wall))
    return f"{one_line(run.run_id, 100)} of {began}"


class _Teller:
    """Reports progress on standard error, if it takes long."""

    def __init__(self) -> None:
        self._next = time.monotonic() + TELL_AFTER_S

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + TELL_EVERY_S
            self.line(text)

    def line(self, text: str) -> None:
        try:
            console.write_line(f"holdfast report: {text}")
        except OSError:
            pass  # Nobody listens.


def _print(data: bytes) -> None:
    """Write to standard output; a reader that closes it is not a failure."""
    if sys.stdout is None:
        raise EnvironmentProblem("standard output is closed")
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as problem:
        raise EnvironmentProblem(
            f"cannot write to standard output: {problem.strerror or problem}"
        ) from None
