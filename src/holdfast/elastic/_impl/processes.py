"""`start_processes` and the contexts, with TorchElastic's signatures.

They raise if a program cannot be executed. Holdfast's own agent starts its workers with a `GroupSpec`,
and reports such a program as a failure.
"""

from __future__ import annotations

import errno
import os
from abc import ABCMeta
from typing import TYPE_CHECKING

from holdfast.defaults import SHUTDOWN_S
from holdfast.processes import signals
from holdfast.processes.workers import function_workers, group
from holdfast.processes.workers.group import GroupSpec

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any

    from holdfast.processes.logs.specs import LogsSpecs


class MadeByHoldfast(ABCMeta):
    """Lets `isinstance` accept the worker groups of Holdfast's agent as instances of the classes below."""

    def __instancecheck__(cls, instance: object) -> bool:
        if cls.__module__ != __name__:
            return super().__instancecheck__(instance)
        return isinstance(instance, cls.__bases__[-1])


class ClosesByHook(group.RunningGroup):
    """Stops the workers through `close` and `_close`, which a subclass may override."""

    def close(self, death_sig: signal.Signals | None = None, timeout: float = SHUTDOWN_S) -> None:
        """Stop all workers: `death_sig`, up to `timeout` seconds, then SIGKILL.

        Calls `_close`, and then stops the workers that `_close` has left.
        """
        chosen = death_sig or signals.as_enum(self.stop_signal)
        self._close(death_sig=chosen, timeout=timeout)
        super().close(chosen, timeout)

    def _close(self, death_sig: signal.Signals, timeout: float = SHUTDOWN_S) -> None:
        """Stop all workers. May be called again."""
        super().close(death_sig, timeout)

    def _stop_when_over(self) -> None:
        self.close()


class PContext(ClosesByHook, group.RunningGroup, metaclass=MadeByHoldfast):
    """A group of workers, with TorchElastic's constructor."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        how = name, entrypoint, args, envs, logs_specs, log_line_prefixes
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(GroupSpec(*how, "spawn", None, *filters))


class SubprocessContext(ClosesByHook, group.CommandGroup, metaclass=MadeByHoldfast):
    """Workers that are commands, with TorchElastic's constructor."""

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: object = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        how = name, entrypoint, args, envs, logs_specs, log_line_prefixes
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(GroupSpec(*how, "spawn", numa_options, *filters))


class MultiprocessContext(ClosesByHook, function_workers.FunctionGroup, metaclass=MadeByHoldfast):
    """Workers that are functions, with TorchElastic's constructor."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: object = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        how = name, entrypoint, args, envs, logs_specs, log_line_prefixes
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(GroupSpec(*how, start_method, numa_options, *filters))


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
) -> group.RunningGroup:
    """Start one worker for each local rank and return their context. The caller must close it.

    If `entrypoint` is a string, it is a program, and `args` its arguments. Otherwise it is a function,
    which new processes call (`start_method`). `args` and `envs` are by local rank, 0 to n-1. Raises
    `FileNotFoundError` or `PermissionError` if the program is missing or cannot be executed.
    """
    if isinstance(entrypoint, str):
        for env in envs.values():
            _check_program(entrypoint, env.get("PATH", os.environ.get("PATH", os.defpath)))
    how = name, entrypoint, args, envs, logs_specs, log_line_prefixes
    filters = duplicate_stdout_filters, duplicate_stderr_filters
    return group.start_group(GroupSpec(*how, start_method, numa_options, *filters))


def _check_program(program: str, path: str) -> None:
    folders = [""] if os.sep in program else path.split(os.pathsep)
    found = [place for folder in folders if os.path.exists(place := os.path.join(folder, program))]
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    if not any(os.path.isfile(place) and os.access(place, os.X_OK) for place in found):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), program)
