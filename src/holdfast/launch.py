"""The replacement for `torch.distributed.launch`, for scripts that are not yet adapted to `holdfast run`.

There is one difference from `holdfast run`: workers also get their local rank as `--local-rank=N`,
unless `--use-env` is given. `python -m holdfast.launch` exits with the codes of `holdfast run`.
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
        raise UsageError("--no-python: requires --use-env: a program may not accept --local-rank")
    return args


if __name__ == "__main__":
    from holdfast.cli.main import run_and_exit, run_command

    run_and_exit(lambda: run_command(sys.argv[1:], lambda words: _checked(parse_args(words))))
