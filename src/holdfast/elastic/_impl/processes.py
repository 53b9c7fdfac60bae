"""`start_processes` as TorchElastic's callers expect it: what cannot be executed is raised.

Holdfast's agents start their workers by another way, and make a report of such a program.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from holdfast.processes.workers import group

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.processes.logs.specs import LogsSpecs


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
) -> group.PContext:
    """Start one worker for each local rank and return their context, which must be closed.

    A string is a program, and `args` its arguments; anything else is a function, called in new
    processes by `start_method`. `args` and `envs` are by local rank, 0 to n-1. Raises
    `FileNotFoundError` or `PermissionError` for a program that is missing or cannot be executed.
    """
    if isinstance(entrypoint, str):
        for env in envs.values():
            _check_program(entrypoint, env.get("PATH", os.environ.get("PATH", os.defpath)))
    return group.start_processes(
        name,
        entrypoint,
        args,
        envs,
        logs_specs,
        log_line_prefixes,
        start_method,
        numa_options,
        duplicate_stdout_filters,
        duplicate_stderr_filters,
    )


def _check_program(program: str, path: str) -> None:
    folders = [""] if os.sep in program else path.split(os.pathsep)
    found = [place for folder in folders if os.path.exists(place := os.path.join(folder, program))]
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    if not any(os.path.isfile(place) and os.access(place, os.X_OK) for place in found):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), program)
