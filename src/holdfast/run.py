"""`holdfast run` as a module: `python -m holdfast.run`, or `main([...])` from a program.

It has the functions of `torch.distributed.run` under the same names. `main` raises the error
(`ChildFailedError`, `SignalException`, `HoldfastError`) in the calling program. Run as a module, it
exits with the codes of `holdfast.cli.main`. `holdfast.cli.run_command` does the work.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from holdfast.cli import run_command as command
from holdfast.cli.run_command import *  # noqa: F403

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]
__all__ += command.__all__


def main(args: Sequence[str] | None = None) -> None:
    """Run the job of a command line (`sys.argv` if none is given) until it ends.

    A failure is also written to `TORCHELASTIC_ERROR_FILE`, for the scheduler that set it.
    """
    command.execute(command.parse_args(args))


if __name__ == "__main__":
    from holdfast.cli.main import run_and_exit, run_command

    run_and_exit(lambda: run_command(sys.argv[1:]))
