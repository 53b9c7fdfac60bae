"""Every flag of `holdfast run`, in one table, and the parser that is built from it.

The one thing to know: a flag's default may come from the variable `PET_<FLAG>`; its text is read
when the parser is built but checked only when the command line does not give the flag, so a bad
variable never stands in the way of `--help`. Values that need more than a number or a word are
checked by `cli/run.py` with the grammars of `cli/values.py`.
"""

from __future__ import annotations

import argparse
import os

from holdfast.cli import values
from holdfast.cli.parser import Help, Refused, ScriptParser
from holdfast.core.facts import Fact
from holdfast.defaults import EXIT_BARRIER_S, SHUTDOWN_S, START_METHODS
from holdfast.errors import UsageError
from holdfast.launcher.config import (
    SHUTDOWN_TIMEOUT_ENV,
)
from holdfast.processes.signals import DEFAULT_SIGNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
DEFAULT_MASTER_PORT = 29500

WORKERS = "Workers"
PROGRAM = "What workers run"
FAILURES = "Failures and stopping"
OUTPUT = "Output and logs"
RENDEZVOUS = "Nodes and rendezvous"
OTHER = "Other"


def _as_is(text: str, _flag: str) -> str:
    return text


class Flag(Fact):
    """One flag: `metavar` is empty for a switch, `convert` turns (text, flag) into the value."""

    group: str
    name: str
    default: object
    metavar: str
    meaning: str
    convert: Callable[[str, str], object] = _as_is
    short: str = ""
    choices: tuple[str, ...] | None = None
    from_environment: bool = True

    @property
    def dest(self) -> str:
        """Return the attribute of the namespace that holds the value."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        """Return the environment variable that holds the default."""
        return f"PET_{self.dest.upper()}"

    @property
    def spellings(self) -> list[str]:
        """Return every way to write the flag: short, with dashes, with underscores."""
        underscored = f"--{self.dest}"
        return [
            *([self.short] if self.short else []),
            self.name,
            *([underscored] if underscored != self.name else []),
        ]


def _switch(group: str, name: str, meaning: str, short: str = "") -> Flag:
    return Flag(group, name, default=False, metavar="", meaning=meaning, short=short)


def _count(text: str, flag: str) -> int:
    return values.whole_number(text, flag)


def _port(text: str, flag: str) -> int:
    return values.whole_number(text, flag, most=values.PORT_MAX)


def _start_method(text: str, flag: str) -> str:
    return values.one_of(text, flag, START_METHODS)


def _numa_binding(text: str, flag: str) -> str:
    return values.one_of(text, flag, NUMA_BINDINGS)


def _filters(text: str, _flag: str) -> list[str]:
    return values.split_filters(text)


FLAGS = (
    Flag(
        WORKERS, "--nproc-per-node", "1", "N",
        "workers on this node: a number, or cpu, gpu, xpu or auto to count devices (1)",
    ),
    _switch(
        WORKERS, "--virtual-local-rank",
        "show each worker one GPU of its own, as device 0, with LOCAL_RANK=0",
    ),
    Flag(WORKERS, "--role", "default", "NAME", "name of these workers in logs and ranks (default)"),
    Flag(
        WORKERS, "--start-method", "spawn", "HOW",
        "how Python function workers start: spawn, fork or forkserver (spawn)",
        _start_method, choices=START_METHODS,
    ),
    Flag(
        WORKERS, "--preload", "", "MODULES",
        "import these once on each node and fork every worker from there, as in torch,my.module; "
        "auto: what SCRIPT imports. Faster first start and restarts",
    ),
    _switch(
        WORKERS, "--worker-store",
        "let the worker of rank 0 host the workers' store at MASTER_PORT, not the agent",
    ),
    Flag(
        WORKERS, "--numa-binding", None, "MODE",
        "bind workers to CPUs: node, socket, exclusive or core-complex",
        _numa_binding, choices=NUMA_BINDINGS, from_environment=False,
    ),
    _switch(PROGRAM, "--module", "SCRIPT is a module name, as for python -m", short="-m"),
    _switch(PROGRAM, "--no-python", "SCRIPT is a program: start it without Python"),
    _switch(
        PROGRAM, "--run-path",
        "run SCRIPT as a function worker, in an interpreter that Holdfast started",
    ),
    Flag(
        FAILURES, "--max-restarts", 0, "N",
        "restart all workers up to N times when one fails (0)", _count,
    ),
    Flag(
        FAILURES, "--monitor-interval", 0.1, "SECONDS",
        "kept for compatibility: exits are noticed at once, without polling (0.1)",
        values.interval,
    ),
    Flag(
        FAILURES, "--shutdown-timeout", None, "SECONDS",
        "time between the stop signal and SIGKILL "
        f"(${SHUTDOWN_TIMEOUT_ENV} or {SHUTDOWN_S})",
        values.seconds,
    ),
    Flag(
        FAILURES, "--stop-signal", "SIGTERM", "NAME",
        "the signal that asks workers to stop (SIGTERM)",
    ),
    Flag(
        FAILURES, "--signals-to-handle", DEFAULT_SIGNALS, "NAMES",
        f"signals to this command that stop the job ({DEFAULT_SIGNALS})",
    ),
    Flag(
        FAILURES, "--exit-barrier-timeout", EXIT_BARRIER_S, "SECONDS",
        f"how long a node that is done waits for the others ({EXIT_BARRIER_S})",
        values.seconds,
    ),
    _switch(
        FAILURES, "--exit-code-compat",
        "exit with 1 for every failure, as torchrun does, not with the worker's own code",
    ),
    Flag(
        OUTPUT, "--log-dir", None, "FOLDER",
        "where log files go (a temporary folder); /dev/null for no files",
    ),
    Flag(
        OUTPUT, "--redirects", "0", "WHICH",
        "send to files: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank: 0:3,1:2 (0)",
        short="-r",
    ),
    Flag(
        OUTPUT, "--tee", "0", "WHICH",
        "send to files and to the console, written as for --redirects (0)", short="-t",
    ),
    Flag(
        OUTPUT, "--local-ranks-filter", "", "RANKS",
        "show the output of these local ranks only, as in 0,2 (all)",
    ),
    Flag(
        OUTPUT, "--duplicate-stdout-filters", [], "TEXTS",
        "also copy stdout lines with one of these texts to one shared file", _filters,
    ),
    Flag(
        OUTPUT, "--duplicate-stderr-filters", [], "TEXTS",
        "the same for stderr; two commas stand for a comma", _filters,
    ),
    _switch(
        OUTPUT, "--no-capture-stderr",
        "let workers inherit stderr untouched; failure reports then lack its last lines",
    ),
    Flag(
        OUTPUT, "--logs-specs", None, "NAME",
        "plug-in that decides where output goes, from the entry points torchrun.logs_specs",
        from_environment=False,
    ),
    Flag(
        OUTPUT, "--event-log-handler", "null", "NAME",
        "who gets the events of the job, besides the log directory: console, logging, otel, a "
        "plug-in, or nobody for null, jsonl and dynamic_rendezvous (null)",
    ),
    Flag(
        OUTPUT, "--metrics-port", None, "PORT",
        "serve metrics for Prometheus at this port, any free one for 0 (none)", _port,
    ),
    Flag(
        OUTPUT, "--metrics-addr", "", "ADDR",
        "the address for --metrics-port; whoever reaches it can read them (127.0.0.1)",
    ),
    Flag(
        RENDEZVOUS, "--nnodes", "1:1", "N|MIN:MAX",
        "nodes of the job; further ones stand by to replace a lost one (1)",
    ),
    Flag(
        RENDEZVOUS, "--spares", 0, "K",
        "keep K of the nodes back as standbys, as long as MIN are left to run (0)", _count,
    ),
    _switch(RENDEZVOUS, "--standalone", "one node, with nothing shared with other jobs"),
    Flag(
        RENDEZVOUS, "--rdzv-backend", "static", "NAME",
        "how nodes find each other: c10d, static, file, etcd, or the name of a plug-in (static)",
    ),
    Flag(
        RENDEZVOUS, "--rdzv-endpoint", "", "HOST[:PORT]",
        "where nodes meet: the agent that can bind it coordinates the job; the members of etcd",
    ),
    Flag(RENDEZVOUS, "--rdzv-id", "none", "ID", "name of the job, the same on every node (none)"),
    Flag(RENDEZVOUS, "--rdzv-conf", "", "K=V,...", "settings of the rendezvous"),
    Flag(RENDEZVOUS, "--node-rank", 0, "N", "number of this node; static only (0)", _count),
    Flag(
        RENDEZVOUS, "--master-addr", "127.0.0.1", "HOST",
        "address of node 0; static only (127.0.0.1)",
    ),
    Flag(
        RENDEZVOUS, "--master-port", None, "PORT",
        f"port of node 0; static only ({DEFAULT_MASTER_PORT})", _port,
    ),
    Flag(
        RENDEZVOUS, "--local-addr", None, "HOST",
        "address of this node that others are told (as the coordinator sees it)",
    ),
)  # fmt: skip

USAGE = "holdfast run [flags] SCRIPT [arguments of the script]"

DESCRIPTION = """\
Start a script several times over, as the workers of one job, and watch over
them: if one fails, all are stopped, started anew if restarts are left, and the
failure is explained. What follows SCRIPT is passed on to it untouched."""

EPILOG = """\
Words may be joined by - or _ (--max-restarts, --max_restarts), and a flag may be
shortened as long as it stays unambiguous. The variable PET_<FLAG>, such as
PET_MAX_RESTARTS, sets its default (except --logs-specs and --numa-binding).

Exit codes: 0 if every worker succeeded; else the code of the worker that failed
first on any node, or 128+N if signal N ended it or this command; 2 for a wrong
command line; 78 if the nodes cannot meet; 126 or 127 if SCRIPT cannot be started.

Examples:
  One worker:
    holdfast run train.py --epochs 3
  One worker per GPU, restarted up to three times:
    holdfast run --nproc-per-node gpu --max-restarts 3 -m my.training
  PyTorch imported once on the node, for all workers and all restarts:
    holdfast run --nproc-per-node 8 --preload torch --max-restarts 3 train.py
  Output on the console, with the rank in front, and in files:
    holdfast run --nproc-per-node 4 --tee 3 --log-dir logs train.py
  Two to four nodes, which may come and go; the same line on each of them:
    holdfast run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint node0:29400 \\
        --rdzv-id my-job --max-restarts 3 train.py
  The same on etcd, so that no machine of the job is needed for it to go on:
    holdfast run --nnodes 2:4 --rdzv-backend etcd --rdzv-endpoint db0,db1,db2 \\
        --rdzv-id my-job --max-restarts 3 train.py
  A program that is not Python:
    holdfast run --nproc-per-node 2 --no-python ./simulate --steps 10
"""


def build_parser() -> ScriptParser:
    """Return a parser for `holdfast run`, with the defaults of the environment as it is now."""
    parser = ScriptParser(
        prog="holdfast run",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        add_help=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in FLAGS:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        _add(groups[flag.group], flag)
    other = parser.add_argument_group(OTHER)
    other.add_argument("-h", "--help", action="help", help="show this and exit")
    parser.add_argument("training_script", help=argparse.SUPPRESS)
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    text = os.environ.get(flag.variable) if flag.from_environment else None
    # argparse converts a default that is text, but only where the command line gave no value.
    default = flag.default if text is None else values.FromEnvironment(text, flag.variable)
    if isinstance(default, list):
        default = list(default)
    if flag.metavar:
        group.add_argument(
            *flag.spellings,
            dest=flag.dest,
            default=default,
            metavar=flag.metavar,
            choices=flag.choices,
            type=_converter(flag, flag.convert),
            help=flag.meaning,
        )
    else:
        switch = group.add_argument(
            *flag.spellings, dest=flag.dest, action="store_true", default=default, help=flag.meaning
        )
        switch.type = _converter(flag, values.switch)


def _converter(flag: Flag, convert: Callable[[str, str], object]) -> Callable[[str], object]:
    def converted(text: str) -> object:
        try:
            return convert(text, flag.name)
        except UsageError as error:
            raise Refused(str(error)) from None

    return converted
