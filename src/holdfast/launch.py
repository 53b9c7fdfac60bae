"""`torch.distributed.launch` by its own name, for what is not yet written for `holdfast run`.

It differs from `holdfast run` in one thing: workers get their local rank as `--local-rank=N`, too,
unless `--use-env` is given. `python -m holdfast.launch` ends with the exit codes of the command.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from holdfast.cli.run_command import get_args_parser, run
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence


__all__ = ["launch", "main", "parse_args"]


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Parse a command line of `holdfast run` that may have `--use-env`."""
    parser = get_args_parser()
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="do not give workers --local-rank=N: they read LOCAL_RANK",
    )
    return parser.parse_args(args)


def launch(args: Namespace) -> None:
    """Run the job of a parsed command line until it ends; raise if it cannot start or fails."""
    run(_checked(args))


def main(args: Sequence[str] | None = None) -> None:
    """Run the job of a command line (`sys.argv` if none is given) until it ends."""
    launch(parse_args(args))


def _checked(args: Namespace) -> Namespace:
    if args.no_python and not args.use_env:
        raise UsageError("--no-python: requires --use-env, for a program may not know --local-rank")
    return args


if __name__ == "__main__":
    from holdfast.cli.main import be_command, run_command

    be_command(lambda: run_command(sys.argv[1:], lambda words: _checked(parse_args(words))))
