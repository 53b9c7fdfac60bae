"""The errors of Holdfast, grouped by whose fault they are, with their exit codes.

::

    HoldfastError                     has a one-line message, a hint, an exit code
    ├── UsageError                    a flag, argument or setting is not valid  exit 2
    ├── CannotStart                   the user's program cannot be started      exit 126 or 127
    ├── EnvironmentProblem            a problem on this machine                 exit 78
    ├── PluginError                   a plug-in, or code of the calling program exit 78
    ├── JobStopped                    a person stopped the job                  exit 143
    └── InternalError                 a bug in Holdfast                         exit 70

A failed worker is not in this tree: the user's program failed, and
`holdfast.processes.failures.failure.ChildFailedError` describes it.
"""

from __future__ import annotations

import errno
import os

from holdfast.printable import one_line


class HoldfastError(Exception):
    """Base of the errors that Holdfast raises.

    `str(error)` is always one line, even if it contains text from elsewhere. It names the flag, file or host,
    and says what to do.
    """

    exit_code = 70

    def __init__(self, message: str, *, hint: str = "", exit_code: int | None = None) -> None:
        message, hint = one_line(message), one_line(hint)
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(HoldfastError, ValueError):
    """A flag, argument or setting has a value that is not valid.

    It is also a `ValueError`, which callers of the TorchElastic API catch.
    """

    exit_code = 2


class CannotStart(HoldfastError):
    """The program of a worker cannot be started: it is missing or not executable.

    The exit codes are the shell's: 127 for a missing program, 126 for one that cannot be executed.
    """

    exit_code = 127


class EnvironmentProblem(HoldfastError):
    """A problem on this machine, such as a missing folder, a port in use or a kernel feature that it lacks."""

    exit_code = 78


class PluginError(HoldfastError, RuntimeError):
    """A plug-in or the calling program failed, or gave Holdfast something that is not valid.

    It is also a `RuntimeError`, which callers of the TorchElastic API catch.
    """

    exit_code = 78


class JobStopped(HoldfastError):
    """A person stopped the job (`holdfast stop`): the exit code is that of SIGTERM."""

    exit_code = 143


class InternalError(HoldfastError):
    """A bug in Holdfast: an impossible state was reached."""

    exit_code = 70


# The errors that the kernel returns at a limit of this user or machine. Handling them imports nothing, because a
# process that cannot open files cannot import modules.
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS, errno.EAGAIN, errno.ENOMEM)


def shortage_hint(number: int | None) -> str:
    """Return the limit behind an error number, and what to do; empty for any other number."""
    if number in (errno.EMFILE, errno.ETOOMANYREFS):  # Files on their way to a keeper count too.
        files = _limit("SC_OPEN_MAX")
        return f"the limit of open files is {files}; raise it, `ulimit -n`, or start fewer workers"
    if number == errno.EAGAIN:
        processes = _limit("SC_CHILD_MAX")
        return (
            f"the limit of processes and threads is {processes}; raise it, `ulimit -u` or pids.max "
            "of the control group, or start fewer workers"
        )
    if number == errno.ENFILE:
        return "raise the machine's limit of open files, /proc/sys/fs/file-max"
    return "free some memory, or start fewer workers" if number == errno.ENOMEM else ""


def _limit(name: str) -> object:
    value = os.sysconf(name)
    return value if value >= 0 else "not set"


def find_shortage(problem: BaseException) -> EnvironmentProblem | None:
    """Return the shortage of this machine that caused an error; None for any other error.

    EAGAIN does not count: it means something else, unless a fork returned it.
    """
    seen: BaseException | None = problem
    while seen is not None:
        number = seen.errno if isinstance(seen, OSError) else None
        if isinstance(seen, MemoryError):
            number = errno.ENOMEM
        elif isinstance(seen, ImportError) and os.strerror(errno.EMFILE) in str(seen):
            number = errno.EMFILE  # The loader of shared libraries keeps only the text.
        elif isinstance(seen, RuntimeError) and str(seen) == "can't start new thread":
            return EnvironmentProblem("cannot start a thread", hint=shortage_hint(errno.EAGAIN))
        if number in SHORTAGES and number != errno.EAGAIN:
            where = f"{seen.filename}: " if isinstance(seen, OSError) and seen.filename else ""
            return EnvironmentProblem(
                f"cannot continue: {where}{os.strerror(number)}", hint=shortage_hint(number)
            )
        seen = seen.__cause__ or seen.__context__
    return None
