"""`start_processes`: one call that starts commands or functions as a group of workers."""

from __future__ import annotations

import errno

from holdfast.errors import EnvironmentProblem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.processes.keeper.client import Keeper
    from holdfast.processes.logs.specs import LogsSpecs
    from holdfast.processes.workers.group import PContext
    from holdfast.processes.zygote.client import WarmStart

# What the kernel says where a limit of this machine or user is reached, and what to do then.
# Descriptors on their way to the keeper count like open ones (ETOOMANYREFS).
_MORE_FILES = "raise the limit of open files, see `ulimit -n`, or start fewer workers"
_MORE_PROCESSES = "raise the limit of processes, see `ulimit -u`, or start fewer workers"
HINTS = {
    errno.EMFILE: _MORE_FILES,
    errno.ENFILE: _MORE_FILES,
    errno.ETOOMANYREFS: _MORE_FILES,
    errno.EAGAIN: _MORE_PROCESSES,
    errno.ENOMEM: "free some memory, or start fewer workers",
}


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: object = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
    *,
    keeper: Keeper | None = None,
    warm: WarmStart | None = None,
    capture_stderr: bool = True,
) -> PContext:
    """Start one worker for each local rank and return their context, which must be closed.

    A string is a program, and `args` its arguments; anything else is a function, called in new
    processes by `start_method`. `args` and `envs` are by local rank, 0 to n-1. `warm` goes with
    its `keeper`, for commands and for functions by `spawn`.
    """
    how: dict[str, Any] = {
        "log_line_prefixes": log_line_prefixes,
        "numa_options": numa_options,
        "duplicate_stdout_filters": duplicate_stdout_filters,
        "duplicate_stderr_filters": duplicate_stderr_filters,
        "capture_stderr": capture_stderr,
    }
    context: PContext
    try:
        if isinstance(entrypoint, str):
            from holdfast.processes.workers.command_workers import SubprocessContext

            context = SubprocessContext(
                name, entrypoint, args, envs, logs_specs, keeper=keeper, warm=warm, **how
            )
        else:
            from holdfast.processes.workers.function_workers import MultiprocessContext

            if start_method == "spawn":
                how.update(keeper=keeper, warm=warm)
            context = MultiprocessContext(
                name, entrypoint, args, envs, start_method, logs_specs, **how
            )
        context.start()
    except OSError as error:
        if error.errno not in HINTS:
            raise
        raise EnvironmentProblem(
            f"could not start {len(args)} workers: {error.strerror}", hint=HINTS[error.errno]
        ) from error
    return context
