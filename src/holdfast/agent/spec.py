"""The data of an agent: its specification, the workers, their group and the result of a run.

Names, fields and defaults are TorchElastic's.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from enum import Enum
from typing import TYPE_CHECKING

from holdfast.errors import UsageError
from holdfast.lazy_dataclass import factory_field, lazy_dataclass

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.processes.failures.failure import ProcessFailure
    from holdfast.rendezvous.handler import RendezvousHandler
    from holdfast.store.store_interface import RoundStore


DEFAULT_ROLE = "default"


class WorkerState(str, Enum):  # noqa: UP042 (StrEnum's text differs from TorchElastic's)
    """The state of a group of workers."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return whether workers in this state have processes."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script within this interpreter: the function of a `--run-path` worker."""
    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


@lazy_dataclass
class WorkerSpec:
    """What the workers of a node run, and how many times they may restart.

    `entrypoint` is a program, with `args` as its arguments, or a function that is called with
    them. `monitor_interval` matters only if the agent polls: with a user's own rendezvous handler, or in
    a subclass of TorchElastic's agents that overrides `_monitor_workers`.
    """

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: object = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        if self.local_world_size < 1:
            raise UsageError(
                f"local_world_size: {self.local_world_size} is not a valid number of workers; "
                "accepted: a whole number from 1"
            )
        if self.monitor_interval <= 0:
            raise UsageError(
                f"monitor_interval: {self.monitor_interval} is not a valid interval in seconds; "
                "accepted: above 0"
            )
        if self.fn is not None:
            warnings.warn("WorkerSpec.fn is now called entrypoint", DeprecationWarning, 3)
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise UsageError("entrypoint: missing; accepted: a program or a function")

    def get_entrypoint_name(self) -> str:
        """Return the program's file name, or the function's qualified name."""
        if isinstance(self.entrypoint, str):
            return os.path.basename(self.entrypoint)
        name: str = getattr(self.entrypoint, "__qualname__", repr(self.entrypoint))
        return name


class Worker:
    """One worker and its ranks. `id` comes from the code that started it, and is usually a pid."""

    __slots__ = ("global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size")

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __str__(self) -> str:
        return (
            f"local_rank={self.local_rank},global_rank={self.global_rank},"
            f"role_rank={self.role_rank},world_size={self.world_size},"
            f"role_world_size={self.role_world_size}"
        )

    __repr__ = __str__


class WorkerGroup:
    """The workers of one agent, and their ranks in the last round."""

    __slots__ = (
        "group_rank",
        "group_world_size",
        "master_addr",
        "master_port",
        "spec",
        "state",
        "store",
        "workers",
    )

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank) for local_rank in range(spec.local_world_size)]
        self.store: RoundStore | None = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT


@lazy_dataclass
class RunResult:
    """How the workers of an agent ended, by global rank."""

    state: WorkerState
    return_values: dict[int, Any] = factory_field(default_factory=dict)
    failures: dict[int, ProcessFailure] = factory_field(default_factory=dict)

    def is_failed(self) -> bool:
        """Return whether the workers failed."""
        return self.state == WorkerState.FAILED
