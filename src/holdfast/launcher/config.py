"""`LaunchConfig`: everything one agent needs to know to run a job.

Making a config has no effects. No folder is created, no variable is set,
and the mappings of the caller are copied, not changed. It does not check what only the launch can
know, such as whether the rendezvous can be reached.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.defaults import EXIT_BARRIER_S, SHUTDOWN_S
from holdfast.errors import UsageError
from holdfast.lazy_dataclass import factory_field, keyword_field, lazy_dataclass
from holdfast.processes.signals import DEFAULT_SIGNALS, parse_signal, signal_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from holdfast.processes.logs.specs import LogsSpecs

RDZV_TIMEOUT_S = 900
"""How long a rendezvous may take when neither `rdzv_timeout` nor `rdzv_configs` gives a time."""

PRELOAD_AUTO = "auto"
"""Stands in `preload` for the modules that the workers' program imports first."""

STORY_ENV = "HOLDFAST_DEBUG"
SHUTDOWN_TIMEOUT_ENV = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@lazy_dataclass
class LaunchConfig:
    """How to run a job: its size, its rendezvous, its failures and its output.

    The fields up to `shutdown_timeout` are those of TorchElastic, in the same order. The others
    are Holdfast's own and are given by keyword:

    stop_signal
        What workers are stopped with before they are killed, by name.
    capture_stderr
        Whether the last lines of each worker's stderr are kept for the failure report. Without
        it workers inherit stderr untouched, and the report has no tail of it.
    omp_num_threads
        The `OMP_NUM_THREADS` that workers get, or `None` to leave their environment alone.
    exit_barrier_timeout
        Seconds to wait at the end for the agents of other nodes.
    preload
        Modules that each node imports once, in a process that all its workers are then forked
        from. `"auto"` stands for those that the script, or the function's module, imports at its
        top level and that are installed. Text is taken as names between commas.
    worker_store
        Whether the worker of rank 0 hosts the workers' store at `MASTER_PORT`, instead of the
        agent.
    metrics_port, metrics_addr
        Where Prometheus finds the figures of the job on this node; any free port for 0, and
        loopback unless an address is given. `None` for nowhere.
    dashboard_port
        Where the agent of the first node serves the dashboard of the job, on loopback; any free
        port for 0, `None` for nowhere.
    standalone
        Whether no other machine has any business with this job on one node. Otherwise, if a
        rendezvous endpoint is named, its workers' store is at this host's name, as with torchrun.
    story
        The file that every step of this node's agent is appended to, with its cause; `-` for
        standard error. Without it the variable `HOLDFAST_DEBUG` may name one.

    Times are in seconds; `shutdown_timeout` may be fractional.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = factory_field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = factory_field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any | None = None
    signals_to_handle: str = DEFAULT_SIGNALS
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | float | None = None
    stop_signal: str = keyword_field(default="SIGTERM", kw_only=True)
    capture_stderr: bool = keyword_field(default=True, kw_only=True)
    omp_num_threads: int | None = keyword_field(default=None, kw_only=True)
    exit_barrier_timeout: float = keyword_field(default=EXIT_BARRIER_S, kw_only=True)
    preload: Sequence[str] = keyword_field(default=(), kw_only=True)
    worker_store: bool = keyword_field(default=False, kw_only=True)
    metrics_port: int | None = keyword_field(default=None, kw_only=True)
    metrics_addr: str = keyword_field(default="", kw_only=True)
    dashboard_port: int | None = keyword_field(default=None, kw_only=True)
    standalone: bool = keyword_field(default=False, kw_only=True)
    story: str = keyword_field(default="", kw_only=True)

    def __post_init__(self) -> None:
        self.rdzv_configs = dict(self.rdzv_configs)
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", RDZV_TIMEOUT_S)
        if self.logs_specs is None:
            from holdfast.processes.logs.specs import DefaultLogsSpecs

            self.logs_specs = DefaultLogsSpecs()
        if self.shutdown_timeout is None:
            self.shutdown_timeout = _shutdown_timeout_of_environment()
        check_seconds(self.shutdown_timeout, source="shutdown_timeout")
        check_seconds(self.exit_barrier_timeout, source="exit_barrier_timeout")
        self.stop_signal = signal_name(parse_signal(self.stop_signal, flag="stop_signal"))
        self.preload = parse_modules(self.preload, source="preload")


def check_seconds(value: float, *, source: str, given: object = None) -> None:
    """Refuse a time that no deadline can be made of; `source` names the setting it came from.

    `given` is the text as it was written, if that differs.
    """
    if not 0 <= value < float("inf"):  # What is not a number is not in between either.
        shown = value if given is None else given
        raise UsageError(
            f"{source}: {shown!r} is not a number of seconds; accepted: from 0, e.g. 30 or 2.5"
        )


def parse_seconds(text: str, *, source: str) -> int | float:
    """Turn `30` or `2.5` into seconds; `source` names the flag or variable in the message."""
    try:
        value: int | float = int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
    check_seconds(value, source=source, given=text)
    return value


def parse_modules(names: Sequence[str], *, source: str) -> tuple[str, ...]:
    """Return names of modules, each once; text is taken apart at its commas, if it has any."""
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")] if names.strip() else ()
    for name in names:
        if not all(part.isidentifier() for part in str(name).split(".")):
            raise UsageError(
                f"{source}: {name!r} is not the name of a module; accepted: names as in "
                f"torch,my.module, and {PRELOAD_AUTO}"
            )
    return tuple(dict.fromkeys(names))


def _shutdown_timeout_of_environment() -> int | float:
    text = os.environ.get(SHUTDOWN_TIMEOUT_ENV)
    if text is None:
        return SHUTDOWN_S
    return parse_seconds(text, source=SHUTDOWN_TIMEOUT_ENV)
