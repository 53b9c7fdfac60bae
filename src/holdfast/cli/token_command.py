"""The command `token`: creates the user's token, and derives the tokens of single jobs from it.

This user's agents have the same token: from `HOLDFAST_TOKEN_FILE` or `HOLDFAST_TOKEN`, otherwise from the
user's own file. The command prints it only on request, because it gives access to all jobs.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from holdfast.cli.parser import CommandParser
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
Create the token by which your agents and coordinators authenticate each other,
unless it exists: ~/.holdfast/token, or the file of HOLDFAST_TOKEN_FILE.
"""
EXAMPLES = """\
examples:
  holdfast token
      create it, and print its path
  scp "$(holdfast token --path)" node1:.holdfast/token
      copy it to a machine that does not share your home (the directory must exist)
  export HOLDFAST_TOKEN=$(holdfast token --job nightly)
      let agents that are started from this shell join --rdzv-id nightly, and no
      other job, at a coordinator that has your token
  holdfast token --read-only --job nightly > nightly.token
      allow others to watch this job, but not to change it (without --job: all jobs)
  holdfast token --new
      replace it, for all jobs that are started from now on
"""


def build_parser(name: str) -> CommandParser:
    """Return the parser of `holdfast token`."""
    parser = CommandParser(
        prog=f"holdfast {name}",
        usage="holdfast token [--path | --job ID | --show | --new] [--read-only]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--path", action="store_true", help="print the path of the token file")
    what.add_argument(
        "--job",
        metavar="ID",
        help="print a token that gives access to one job only; ID is its --rdzv-id",
    )
    what.add_argument(
        "--show", action="store_true", help="print the token itself, which gives access to all jobs"
    )
    what.add_argument(
        "--new",
        action="store_true",
        help="replace the token. Running agents and coordinators keep the old one until they exit",
    )
    parser.add_argument(
        "--read-only",
        "--read_only",
        action="store_true",
        help="print a token that permits watching all jobs (with --job: one job), but no changes",
    )
    return parser


def execute(args: argparse.Namespace) -> None:
    """Print the line that the flags request, and nothing else."""
    path = _file()
    if path is None:
        if args.path or args.new:
            raise UsageError(
                f"{VARIABLE} is set, so the token is not in a file", hint=f"unset {VARIABLE}"
            )
        token, what = load_token(os.environ), f"{VARIABLE} contains the token"
        assert token is not None
    else:
        made = (args.new or not os.path.lexists(path)) and make_token(path, replace=args.new)
        token, what = read_token(path, path), f"{path}: {'created' if made else 'exists'}"
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
    """Return the file of the token; None if the token is in the environment."""
    if FILE_VARIABLE in os.environ:
        path = os.environ[FILE_VARIABLE]
        if not path:
            raise UsageError(f"{FILE_VARIABLE} is empty", hint="name the file that holds the token")
        return path
    return None if VARIABLE in os.environ else own_path()


def _of_job(token: bytes, run_id: str) -> bytes:
    if not 0 < len(run_id) <= RUN_ID_CHARS_MAX:
        raise UsageError(
            f"--job: {run_id!r} is not a run id; accepted: 1 to {RUN_ID_CHARS_MAX} characters"
        )
    if is_job_token(token):
        raise UsageError("--job: this is already the token of one job; accepted: your own token")
    return job_token(token, run_id)


def _print(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()
