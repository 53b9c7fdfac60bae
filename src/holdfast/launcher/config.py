"""`LaunchConfig` has everything that one agent needs to run a job; `FLAGS` are the flags that set it.

A flag has a row in `FLAGS` and usually a field in `LaunchConfig`. `cli.run_command` copies the value.
`core.job_settings` declares the settings that all nodes share; the row of such a flag names its setting.

Creating a config has no effects: it creates no directory, sets no variable, and copies the mappings of the
caller. Some problems, such as an unreachable coordinator, are found only at launch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.core import job_settings
from holdfast.core.values import Value
from holdfast.defaults import (
    EXIT_BARRIER_S,
    FAILURE_GRACE_S,
    LOG_TAIL_BYTES,
    SHUTDOWN_S,
    START_METHODS,
)
from holdfast.errors import UsageError
from holdfast.launcher import flag_values as values
from holdfast.lazy_dataclass import factory_field, keyword_field, lazy_dataclass
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.signals import DEFAULT_SIGNALS, parse_signal, signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from holdfast.processes.logs.specs import LogsSpecs

RDZV_TIMEOUT_S = 900
"""How long a rendezvous may take when neither `rdzv_timeout` nor `rdzv_configs` gives a time."""
SHUTDOWN_TIMEOUT_ENV = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
LOG_LINE_PREFIX_ENV = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
DEFAULT_MASTER_PORT = 29500
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")


@lazy_dataclass
class LaunchConfig:
    """How to run a job: its size, its rendezvous, its failures and its output.

    The fields up to `shutdown_timeout` are TorchElastic's, in the same order. The others are Holdfast's own
    and keyword-only:

    failure_grace
        How long workers may take to exit after a failure or the loss of a node. `None` stands for 10
        seconds, or for `shutdown_timeout` if that is shorter.
    stop_signal
        The name of the signal that workers get before SIGKILL.
    capture_stderr
        Whether to keep the last lines of each worker's stderr for the failure report. If not, workers
        inherit stderr, and the report does not have these lines.
    log_tail
        How many bytes of each worker's output to keep on disk for `holdfast logs` and the views, if it has
        no file. With 0 there is no tail, and workers inherit stdout.
    omp_num_threads
        The `OMP_NUM_THREADS` of the workers; `None` does not set it.
    exit_barrier_timeout
        How long a finished node waits for the agents of other nodes.
    preload
        Modules that each node imports once, in a process that then forks all its workers. `"auto"`
        stands for the installed modules that the script, or the function's module, imports at its top
        level. Text is split at its commas.
    worker_store
        Whether the worker of rank 0, not the agent, hosts the workers' store at `MASTER_PORT`.
    metrics_port, metrics_addr
        Where this node serves Prometheus metrics. Port 0 selects a free port, `None` turns this off; the
        default address is loopback.
    dashboard_port
        The port on which the agent of the first node serves the dashboard of the job, on loopback. 0 selects
        a free port, `None` turns this off.
    standalone
        Whether the job is independent of other machines. If this is false and a one-node job has an
        endpoint, its workers' store gets this host's address, as with torchrun.
    story
        The file to which this node's agent appends every step, with its cause; `-` for standard error.
        The variable `HOLDFAST_DEBUG` is the default.

    Times are in seconds; `shutdown_timeout` and `failure_grace` may be fractional.
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
    failure_grace: float | None = keyword_field(default=None, kw_only=True)
    stop_signal: str = keyword_field(default="SIGTERM", kw_only=True)
    capture_stderr: bool = keyword_field(default=True, kw_only=True)
    log_tail: int = keyword_field(default=LOG_TAIL_BYTES, kw_only=True)
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
            self.logs_specs = DefaultLogsSpecs()
        if self.shutdown_timeout is None:
            text = os.environ.get(SHUTDOWN_TIMEOUT_ENV)
            if text is None:
                self.shutdown_timeout = SHUTDOWN_S
            else:
                self.shutdown_timeout = values.seconds(text, SHUTDOWN_TIMEOUT_ENV)
        values.check_seconds(self.shutdown_timeout, source="shutdown_timeout")
        if self.failure_grace is None:
            self.failure_grace = min(self.shutdown_timeout, FAILURE_GRACE_S)
        values.check_seconds(self.failure_grace, source="failure_grace")
        values.check_seconds(self.exit_barrier_timeout, source="exit_barrier_timeout")
        if self.log_tail < 0:
            raise UsageError(f"log_tail: {self.log_tail!r} is not a size; accepted: from 0 bytes")
        self.stop_signal = signal_name(parse_signal(self.stop_signal, flag="stop_signal"))
        self.preload = values.parse_modules(self.preload, source="preload")


WORKERS = "Workers"
PROGRAM = "What workers run"
FAILURES = "Failures and stopping"
OUTPUT = "Output and logs"
RENDEZVOUS = "Nodes and rendezvous"
OTHER = "Other"


class Flag(Value):
    """One flag of `holdfast run`."""

    group: str
    name: str
    default: object
    metavar: str
    """Empty for a switch."""
    meaning: str
    """Empty if a setting declares it; see `help`."""
    convert: Callable[[str, str], object] = values.unparsed
    """Turns (text, flag) into the value."""
    field: str = ""
    """The field of `LaunchConfig` that has the value. Empty: `cli.run_command` uses the value itself."""
    setting: str = ""
    """The setting of `core.job_settings` that the flag sets; its declaration has the meaning."""
    short: str = ""
    choices: tuple[str, ...] | None = None
    from_environment: bool = True

    @property
    def help(self) -> str:
        """The meaning, as `--help` shows it."""
        if not self.setting:
            return self.meaning
        return f"{job_settings.SETTINGS[self.setting].meaning} ({self.default})"

    @property
    def nargs(self) -> int | None:
        """The number of values, as argparse counts: 0 for a switch, None for one value."""
        return None if self.metavar else 0

    @property
    def dest(self) -> str:
        """The attribute of the namespace that holds the value."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable that holds the default."""
        return f"PET_{self.dest.upper()}"

    @property
    def spellings(self) -> list[str]:
        """Every way to write the flag: short, with dashes, with underscores."""
        underscored = f"--{self.dest}"
        return [
            *([self.short] if self.short else []),
            self.name,
            *([underscored] if underscored != self.name else []),
        ]

    def default_now(self) -> object:
        """Return the default. A default from a variable is text, which is not converted yet."""
        text = os.environ.get(self.variable) if self.from_environment else None
        if text is not None:
            return values.FromEnvironment(text, self.variable)
        return list(self.default) if isinstance(self.default, list) else self.default


def _switch(
    group: str,
    name: str,
    meaning: str,
    field: str = "",
    short: str = "",
    *,
    from_environment: bool = True,
) -> Flag:
    return Flag(
        group, name, default=False, metavar="", meaning=meaning,
        convert=values.parse_switch, field=field, short=short, from_environment=from_environment,
    )  # fmt: skip


def _shared(
    group: str, name: str, default: int, metavar: str, setting: str, field: str = ""
) -> Flag:
    return Flag(group, name, default, metavar, "", values.count, field=field, setting=setting)


FLAGS = (
    Flag(
        WORKERS, "--nproc-per-node", "1", "N",
        "workers on this node: a number, or cpu, gpu, xpu or auto to count devices (1)",
    ),
    _switch(
        WORKERS, "--virtual-local-rank",
        "show each worker only its own GPU, as device 0, with LOCAL_RANK=0",
        field="virtual_local_rank",
    ),
    Flag(
        WORKERS, "--role", "default", "NAME", "role of these workers in logs and ranks (default)",
        field="role",
    ),
    Flag(
        WORKERS, "--start-method", "spawn", "HOW",
        "how workers that are Python functions start: spawn, fork or forkserver (spawn)",
        values.one_of(START_METHODS), field="start_method", choices=START_METHODS,
    ),
    Flag(
        WORKERS, "--preload", "", "MODULES",
        "import these modules once per node and fork workers from there, e.g. torch,my.module; "
        "auto: the modules that SCRIPT imports. Makes starts and restarts faster",
    ),
    _switch(
        WORKERS, "--worker-store",
        "let the rank 0 worker, not the agent, host the workers' store at MASTER_PORT",
        field="worker_store",
    ),
    Flag(
        WORKERS, "--numa-binding", None, "MODE",
        "bind workers to CPUs: node, socket, exclusive or core-complex",
        values.one_of(NUMA_BINDINGS), choices=NUMA_BINDINGS, from_environment=False,
    ),
    _switch(PROGRAM, "--module", "SCRIPT is a module name, as for python -m", short="-m"),
    _switch(PROGRAM, "--no-python", "SCRIPT is a program; run it without Python"),
    _switch(
        PROGRAM, "--run-path",
        "run SCRIPT inside a Python interpreter that Holdfast has started",
    ),
    _shared(FAILURES, "--max-restarts", 0, "N", "max_restarts", field="max_restarts"),
    Flag(
        FAILURES, "--monitor-interval", 0.1, "SECONDS",
        "how often your own agents and rendezvous handlers are polled; exits are detected at once (0.1)",
        values.interval, field="monitor_interval",
    ),
    Flag(
        FAILURES, "--shutdown-timeout", None, "SECONDS",
        "time between the stop signal and SIGKILL "
        f"(${SHUTDOWN_TIMEOUT_ENV} or {SHUTDOWN_S})",
        values.seconds, field="shutdown_timeout",
    ),
    Flag(
        FAILURES, "--failure-grace", None, "SECONDS",
        "the same after a failure or the loss of a node "
        f"({FAILURE_GRACE_S}, or --shutdown-timeout if that is shorter)",
        values.seconds, field="failure_grace",
    ),
    Flag(
        FAILURES, "--stop-signal", "SIGTERM", "NAME",
        "signal that stops workers before SIGKILL (SIGTERM)", values.stop_signal, field="stop_signal",
    ),
    Flag(
        FAILURES, "--signals-to-handle", DEFAULT_SIGNALS, "NAMES",
        f"signals that stop the job when this command receives them ({DEFAULT_SIGNALS})",
        values.signals, field="signals_to_handle",
    ),
    Flag(
        FAILURES, "--exit-barrier-timeout", EXIT_BARRIER_S, "SECONDS",
        f"how long a finished node waits for the others ({EXIT_BARRIER_S})",
        values.seconds, field="exit_barrier_timeout",
    ),
    _switch(
        FAILURES, "--exit-code-compat",
        "exit with 1 on any failure, like torchrun, instead of the worker's exit code",
    ),
    Flag(
        OUTPUT, "--log-dir", None, "DIR",
        "directory for log files (a temporary one); /dev/null for no files",
    ),
    Flag(
        OUTPUT, "--redirects", "0", "WHICH",
        "redirect to files: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank: 0:3,1:2 (0)",
        short="-r",
    ),
    Flag(
        OUTPUT, "--tee", "0", "WHICH",
        "write to files and to the console; values as for --redirects (0)", short="-t",
    ),
    Flag(
        OUTPUT, "--log-tail", LOG_TAIL_BYTES, "SIZE",
        "how much of each worker's output to keep on disk for holdfast logs and the views while it has no "
        "file, e.g. 512K; 0 for none (16M)", values.byte_size, field="log_tail",
    ),
    Flag(
        OUTPUT, "--log-line-prefix-template", "", "TEMPLATE",
        "prefix of each line of --tee, with ${role_name}, ${local_rank}, ${rank} and ${hostname} "
        f"(${LOG_LINE_PREFIX_ENV} or \"[${{role_name}}${{local_rank}}]:\")",
    ),
    Flag(
        OUTPUT, "--local-ranks-filter", "", "RANKS",
        "show the output of these local ranks only, e.g. 0,2 (all)",
    ),
    Flag(
        OUTPUT, "--duplicate-stdout-filters", [], "TEXTS",
        "also copy stdout lines that contain one of these texts to a shared file",
        values.filters, field="duplicate_stdout_filters",
    ),
    Flag(
        OUTPUT, "--duplicate-stderr-filters", [], "TEXTS",
        "the same for stderr; write a comma within a text as two commas",
        values.filters, field="duplicate_stderr_filters",
    ),
    _switch(
        OUTPUT, "--no-capture-stderr",
        "let workers inherit stderr; failure reports then lack its last lines",
    ),
    Flag(
        OUTPUT, "--logs-specs", None, "NAME",
        "plug-in that decides where output goes (entry point group torchrun.logs_specs)",
        from_environment=False,
    ),
    Flag(
        OUTPUT, "--event-log-handler", "null", "NAME",
        "destination of job events besides the log directory: console, logging, otel or a plug-in; "
        "null, jsonl and dynamic_rendezvous add none (null)", field="event_log_handler",
    ),
    Flag(
        OUTPUT, "--metrics-port", None, "PORT",
        "serve Prometheus metrics on this port; 0 for any free one (none)",
        values.port, field="metrics_port",
    ),
    Flag(
        OUTPUT, "--metrics-addr", "", "ADDR",
        "address for --metrics-port; anyone who can reach it can read the metrics (127.0.0.1)",
        field="metrics_addr",
    ),
    Flag(
        OUTPUT, "--dashboard", None, "PORT",
        "serve a web page of the job on this port of the first node, as holdfast dashboard does; "
        "0 for any free one (none)", values.port, field="dashboard_port",
    ),
    Flag(
        OUTPUT, "--story", "", "FILE",
        "append every step of this agent to FILE, with its cause, for holdfast story (none)",
        field="story",
    ),
    Flag(
        RENDEZVOUS, "--nnodes", "1:1", "N|MIN:MAX",
        "number of nodes; additional nodes are standbys, ready to replace a lost node (1)",
    ),
    _shared(RENDEZVOUS, "--spares", 0, "K", "spares"),
    _switch(
        RENDEZVOUS, "--standalone", "run on one node, independent of other jobs",
        field="standalone",
    ),
    Flag(
        RENDEZVOUS, "--rdzv-backend", "static", "NAME",
        "how nodes find each other: c10d, static, file, etcd, or the name of a plug-in (static)",
        field="rdzv_backend",
    ),
    Flag(
        RENDEZVOUS, "--rdzv-endpoint", "", "HOST[:PORT]",
        "address of the coordinator, which the agent on that host runs; or several addresses in order, so "
        "that a later host can take over (holdfast coordinator --take-over); or the etcd endpoints; or the "
        "shared folder",
    ),
    Flag(
        RENDEZVOUS, "--ha", None, "HOST[:PORT],...",
        "survive the loss of any machine: these hosts, preferably three, run an etcd for the job; give the "
        "same list on every node (none)",
    ),
    Flag(
        RENDEZVOUS, "--rdzv-id", "none", "ID",
        "run id of the job, the same on every node (none; on one node without an endpoint, program and time: train-1142)", field="run_id",
    ),
    Flag(RENDEZVOUS, "--rdzv-conf", "", "K=V,...", "rendezvous settings"),
    Flag(
        RENDEZVOUS, "--node-rank", 0, "N", "rank of this node; static only (0)", values.count
    ),
    Flag(
        RENDEZVOUS, "--master-addr", "127.0.0.1", "HOST",
        "address of node 0; static only (127.0.0.1)",
    ),
    Flag(
        RENDEZVOUS, "--master-port", None, "PORT",
        f"port of node 0; static only ({DEFAULT_MASTER_PORT})", values.port,
    ),
    Flag(
        RENDEZVOUS, "--local-addr", None, "HOST",
        "address of this node to announce to the others (as the coordinator sees it)",
        values.address, field="local_addr",
    ),
    _switch(
        OTHER, "--dry-run",
        "check the command line, print what it would run, and exit; start nothing",
        from_environment=False,
    ),
    _switch(OTHER, "--json", "with --dry-run: print JSON", from_environment=False),
)  # fmt: skip
