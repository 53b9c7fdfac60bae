"""What can go wrong, whose fault it is, and the exit code for it.

::

    HoldfastError                     has a one-line message, a hint, an exit code
    ├── UsageError                    you called us wrongly                     exit 2
    ├── CannotStart                   the user's program cannot be started      exit 126 or 127
    ├── EnvironmentProblem            this machine lacks or refuses something   exit 78
    └── InternalError                 our own bug                               exit 70

A failing worker is not in this tree: it is the user's program that failed, and
`holdfast.processes.failures.failure.ChildFailedError` describes it.
"""

from __future__ import annotations


class HoldfastError(Exception):
    """Base of the errors Holdfast raises on its own account.

    `str(error)` is always one line that names the flag, file or host and what to do.
    """

    exit_code = 70

    def __init__(self, message: str, *, hint: str = "", exit_code: int | None = None) -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(HoldfastError, ValueError):
    """A flag, argument or setting has a value that cannot be used.

    It is a `ValueError` too, since that is what callers of the TorchElastic API catch.
    """

    exit_code = 2


class CannotStart(HoldfastError):
    """The program of a worker cannot be started: it is missing or not executable.

    The exit codes are the shell's: 127 for a missing program, 126 for one that is there but
    cannot be run.
    """

    exit_code = 127


class EnvironmentProblem(HoldfastError):
    """This machine lacks or refuses something: a folder, a port, a kernel feature."""

    exit_code = 78


class InternalError(HoldfastError):
    """A bug in Holdfast: an impossible state was reached."""

    exit_code = 70
