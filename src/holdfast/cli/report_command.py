"""The command `report`: writes one HTML file about a job from its log directories.

The command reads only files. It therefore works on any machine that has the log directories, and for
jobs that ended, were killed or are still running.
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
from holdfast.processes.failures.error_file import replace_file, write_whole
from holdfast.views.report import model, records
from holdfast.views.report.html import render

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from holdfast.views.report.model import Report
    from holdfast.views.report.records import NodeRun

DESCRIPTION = """\
Write one HTML file about a job: how it ended and why, a timeline of generations,
goodput and the causes of lost time, every failure, and the progress and rate of
each rank. The file is self-contained: it needs no server and no network.
"""
EXAMPLES = """\
examples:
  holdfast run --log-dir logs train.py
  holdfast report logs
      the newest job in logs; writes logs/report.html
  holdfast report node1/logs node2/logs --output job.html
      one job, from the log directories of two nodes
  holdfast report logs --json | jq .goodput
      the same data as JSON

A job writes the files that this command reads if --log-dir, --redirects or --tee
is set, or if the job fails.
"""
STDOUT = "-"
DEFAULT_NAME = "report.html"
PROGRESS_AFTER_S, PROGRESS_INTERVAL_S = 2.0, 1.0
"""Report progress on standard error after this time, and at this interval."""


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
        help="the file to write; - for standard output (report.html in the first FOLDER)",
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
        help="log directories of the job's nodes; if they contain several jobs, the newest is used",
    )
    return parser


def execute(args: argparse.Namespace) -> None:
    """Write the report and print its URL."""
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
        raise UsageError(f"{output} is a symbolic link; name a file with --output")
    # The folder may belong to another user, who could create a link now: it must not be followed.
    write = write_whole if args.output else replace_file
    try:
        write(output, text, 0o600)  # It contains the last lines of workers' logs.
    except OSError as problem:
        raise EnvironmentProblem(
            f"cannot write {output}: {problem.strerror or problem}",
            hint="name another file with --output",
        ) from None
    _print(f"{address_of(output)}\n".encode())


def make(folders: Sequence[str]) -> Report:
    """Return the report of the newest job in these folders."""
    progress = _ProgressPrinter()
    jobs = records.jobs_in(records.read(folders, progress))
    if not jobs:
        raise UsageError(f"FOLDER: no readable timeline in {folders[0]!r}")
    if len(jobs) > 1:
        progress.line(f"found {len(jobs)} jobs; reporting the newest, {_named(jobs[0])}")
        progress.line("for another job, pass only its log directories")
    for count, run in enumerate(jobs[0]):
        progress(f"read the logs of {count} of {len(jobs[0])} nodes")
        records.read_other_files(run)
    progress(f"merging {len(jobs[0])} nodes")
    return model.describe(jobs[0], len(jobs) - 1)


def address_of(path: str) -> str:
    """Return the URL of a file."""
    return "file://" + quote(os.fsencode(os.path.abspath(path)))


def _named(job: Sequence[NodeRun]) -> str:
    run = job[0].run
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.wall))
    return f"{one_line(run.run_id, 100)} of {began}"


class _ProgressPrinter:
    """Prints progress to standard error if the command takes long."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_AFTER_S

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_INTERVAL_S
            self.line(text)

    def line(self, text: str) -> None:
        try:
            console.write_line(f"holdfast report: {text}")
        except OSError:
            pass  # Standard error is closed.


def _print(data: bytes) -> None:
    """Write to standard output. It is not an error if the reader closes the pipe."""
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
