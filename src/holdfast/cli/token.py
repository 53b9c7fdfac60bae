"""The command `token`: makes the user's token, and derives those of single jobs from it.

The token is the one that agents of this user have: that of `HOLDFAST_TOKEN_FILE` or `HOLDFAST_TOKEN`,
else the user's own. It is shown only on request, since it opens all jobs.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from holdfast.cli.parser import CommandParser, Help
from holdfast.core.limits import RUN_ID_CHARS_MAX
from holdfast.errors import UsageError
from holdfast.net.token import load_token, make_token, own_path, read_token
from holdfast.wire.handshake import (
    FILE_VARIABLE,
    VARIABLE,
    is_job_token,
    job_token,
    read_only_token,
)

if TYPE_CHECKING:
    import argparse

DESCRIPTION = """\
Make the token by which the agents and coordinators of a user know each other,
unless there is one: ~/.holdfast/token, or the file of HOLDFAST_TOKEN_FILE.
"""
EXAMPLES = """\
examples:
  holdfast token
      make it, and say where it is
  scp "$(holdfast token --path)" node1:.holdfast/token
      copy it to a machine with another home (which has the folder)
  export HOLDFAST_TOKEN=$(holdfast token --job nightly)
      let agents that are started from here join --rdzv-id nightly, and no other
      job, at a coordinator that has the token itself
  holdfast token --read-only --job nightly > nightly.token
      let people look at that job, and change nothing (without --job: at all jobs)
  holdfast token --new
      draw another one, for all jobs that are started from now on
"""


def build_parser(name: str) -> CommandParser:
    """Return the parser of `holdfast token`."""
    parser = CommandParser(
        prog=f"holdfast {name}",
        usage="holdfast token [--path | --job ID | --show | --new] [--read-only]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--path", action="store_true", help="print the path of its file")
    what.add_argument(
        "--job",
        metavar="ID",
        help="print the token of one job, which is of no use for any other: ID is its --rdzv-id",
    )
    what.add_argument(
        "--show", action="store_true", help="print the token itself, which opens all jobs"
    )
    what.add_argument(
        "--new",
        action="store_true",
        help="replace it. Agents and coordinators that run keep the old one until they end",
    )
    parser.add_argument(
        "--read-only",
        "--read_only",
        action="store_true",
        help="print the token by which people can look at all jobs, or at one with --job, and change "
        "nothing",
    )
    return parser


def execute(args: argparse.Namespace) -> None:
    """Do what is asked, and print what is asked for and nothing else."""
    path = _file()
    if path is None:
        if args.path or args.new:
            raise UsageError(
                f"{VARIABLE} is set, so the token is in no file", hint=f"unset {VARIABLE} for this"
            )
        token, what = load_token(os.environ), f"the token is that of {VARIABLE}"
        assert token is not None
    else:
        made = (args.new or not os.path.lexists(path)) and make_token(path, anew=args.new)
        token, what = read_token(path, path), f"{path}: {'made' if made else 'is there'}"
    if args.read_only:
        if args.path or args.show or args.new:
            raise UsageError("--read-only: accepted alone, or with --job")
        of_job = _of_job(token, args.job) if args.job is not None else token
        _print(read_only_token(of_job, ""))
    elif args.job is not None:
        _print(_of_job(token, args.job))
    elif args.show:
        _print(token)
    else:
        _print(os.fsencode(path if args.path and path else what))


def _file() -> str | None:
    """Return the file that the token is in; None if it is in the environment itself."""
    if FILE_VARIABLE in os.environ:
        path = os.environ[FILE_VARIABLE]
        if not path:
            raise UsageError(f"{FILE_VARIABLE} is empty", hint="name the file that holds the token")
        return path
    return None if VARIABLE in os.environ else own_path()


def _of_job(token: bytes, run_id: str) -> bytes:
    if not 0 < len(run_id) <= RUN_ID_CHARS_MAX:
        raise UsageError(
            f"--job: accepted: the run id of a job, 1 to {RUN_ID_CHARS_MAX} characters"
        )
    if is_job_token(token):
        raise UsageError("--job: the token is that of one job already, and makes no others")
    return job_token(token, run_id)


def _print(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()
