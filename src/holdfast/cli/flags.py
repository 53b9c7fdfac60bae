"""Every flag of `holdfast run`: what its value may be, the table of flags, and the parsers.

The default of a flag may come from the variable `PET_<FLAG>`; it is read when the parser is built,
but checked only if the command line does not give the flag, so a bad variable never gets in the way
of `--help`. Such a value is a `FromEnvironment`, so that an error names the variable and not the
flag. Values that need more than a number or a word are parsed by `cli/run.py` with the functions
here. Nothing here starts or creates anything.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from holdfast.core.values import Value
from holdfast.defaults import EXIT_BARRIER_S, SHUTDOWN_S, START_METHODS
from holdfast.errors import UsageError
from holdfast.launcher.config import (
    SHUTDOWN_TIMEOUT_ENV,
    parse_modules,
    parse_seconds,
)
from holdfast.processes.signals import (
    DEFAULT_SIGNALS,
    parse_signal,
    parse_signals,
    signal_name,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence
    from types import SimpleNamespace
    from typing import Any, NoReturn, Self

    from holdfast.cli.parser import ScriptParser
    from holdfast.processes.logs.specs import LogsSpecs

    Arguments = argparse.Namespace | SimpleNamespace
    """A parsed command line."""


RDZV_CONF_RESERVED = frozenset(
    {"backend", "endpoint", "local_addr", "max_nodes", "min_nodes", "run_id"}
)
"""Settings that have flags of their own; `--rdzv-conf` cannot set them again."""

LOGS_SPECS_GROUP = "torchrun.logs_specs"
PORT_MAX = 65535

_ON = frozenset({"true", "yes", "on"})
_OFF = frozenset({"false", "no", "off", ""})


class FromEnvironment(str):
    """The text of a `PET_` variable, which remembers the variable's name."""

    __slots__ = ("variable",)
    variable: str

    def __new__(cls, text: str, variable: str) -> Self:
        """Wrap the `text` that `variable` holds."""
        made = super().__new__(cls, text)
        made.variable = variable
        return made

    def __reduce__(self) -> tuple[type[FromEnvironment], tuple[str, str]]:
        return (FromEnvironment, (str(self), self.variable))


def source_of(value: str, flag: str) -> str:
    """Return where the value was written: the flag, or the variable of its default."""
    return value.variable if isinstance(value, FromEnvironment) else flag


def reject(value: str, flag: str, problem: str, accepted: str) -> NoReturn:
    """Raise the one-line error about `value`: where it was written, and what is accepted."""
    raise UsageError(f"{source_of(value, flag)}: {value!r} {problem}; accepted: {accepted}")


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Parse `2` or `1:4` into the minimum and maximum number of nodes."""
    least, colon, most = nnodes.partition(":")
    try:
        bounds = (int(least), int(most if colon else least))
    except ValueError:
        bounds = (0, 0)
    if not 0 < bounds[0] <= bounds[1]:
        raise InvalidNodeRange(
            f"{source_of(nnodes, '--nnodes')}: {nnodes!r} is not a number of nodes; accepted: "
            "N or MIN:MAX, from 1, MIN <= MAX"
        )
    return bounds


class InvalidNodeRange(UsageError, RuntimeError):
    """`--nnodes` is no range; TorchElastic's callers catch it as a `RuntimeError`."""


# A typo above this would exhaust the memory before the first worker is refused.
WORKERS_MAX = 1 << 16


def determine_local_world_size(nproc_per_node: str) -> int:
    """Return the number of workers on this node for a value of `--nproc-per-node`.

    A number is itself. `cpu` is the CPUs this process may use; `gpu` and `xpu` are the devices of
    that kind; `auto` is the devices of any accelerator found, else as `cpu`; the name of a
    backend that a package adds to PyTorch (such as `npu`) is its devices. PyTorch is never
    imported by the agent: see `holdfast.cli.devices`.
    """
    flag = "--nproc-per-node"
    word = nproc_per_node.strip()
    try:
        count = int(word)
    except ValueError:
        count = _device_count(nproc_per_node, flag, word)
    if not 1 <= count <= WORKERS_MAX:
        accepted = "a whole number from 1, or cpu, gpu, xpu, auto"
        what = "is not a number of workers" if count < 1 else "is too large"
        reject(nproc_per_node, flag, what, accepted)
    return count


def _device_count(nproc_per_node: str, flag: str, word: str) -> int:
    from holdfast.cli import devices

    if word == "cpu":
        return devices.cpu_count()
    if word == "auto":
        return devices.accelerator_count() or devices.cpu_count()
    if word in ("gpu", "xpu"):
        found = devices.gpu_count() if word == "gpu" else devices.xpu_count()
        if found == 0:
            reject(
                nproc_per_node,
                flag,
                "found no such device on this machine",
                "a whole number, cpu or auto",
            )
        return found
    return devices.named_backend_count(word) if word.isidentifier() else 0


def parse_rdzv_conf(text: str) -> dict[str, str]:
    """Parse `key=value,key=value`; a later key wins, values stay text."""
    flag = "--rdzv-conf"
    conf: dict[str, str] = {}
    if not text.strip():
        return conf
    for item in text.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if not key or not value:
            reject(text, flag, f"has the item {item.strip()!r}", "key=value,key=value")
        if key in RDZV_CONF_RESERVED:
            reject(text, flag, f"sets {key!r}, which has its own flag", "other keys")
        conf[key] = value
    return conf


def split_filters(text: str) -> list[str]:
    """Split at commas, where two commas in a row stand for one comma within an item."""
    items = [""]
    rest = text
    while rest:
        plain, comma, rest = rest.partition(",")
        items[-1] += plain
        if comma and rest.startswith(","):
            items[-1] += ","
            rest = rest[1:]
        elif comma:
            items.append("")
    return items


def parse_local_ranks(text: str) -> set[int] | None:
    """Parse `0,2` into a set of local ranks; empty text is `None`, every rank."""
    if not text:
        return None
    try:
        ranks = {int(item) for item in text.split(",")}
    except ValueError:
        ranks = {-1}
    if min(ranks) < 0:
        reject(text, "--local-ranks-filter", "is not a list of local ranks", "numbers, e.g. 0,2")
    return ranks


def parse_streams(text: str, flag: str) -> int | dict[int, int]:
    """Parse a value of `--redirects` or `--tee`: streams for all ranks, or by local rank."""
    from holdfast.processes.logs import specs

    try:
        return specs.parse_streams(str(text))
    except ValueError:
        accepted = "0 (none), 1 (stdout), 2 (stderr), 3 (both), or by local rank, e.g. 0:3,1:2"
        reject(text, flag, "does not select streams", accepted)


def parse_module_names(text: str, flag: str) -> tuple[str, ...]:
    """Parse `torch,my.module` into names of modules; empty text is none."""
    return parse_modules(text, source=source_of(text, flag))


def parse_signal_names(text: str) -> str:
    """Return the signals of `--signals-to-handle` by their full names, comma-separated."""
    flag = source_of(text, "--signals-to-handle")
    return ",".join(map(signal_name, parse_signals(text, flag=flag)))


def parse_stop_signal(text: str) -> str:
    """Return the full name of a signal that can end a worker."""
    name = signal_name(parse_signal(text, flag=source_of(text, "--stop-signal")))
    if name in ("SIGCHLD", "SIGCONT", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG"):
        accepted = "a signal that does, such as SIGTERM or SIGINT"
        reject(text, "--stop-signal", "does not terminate a process", accepted)
    return name


def whole_number(text: str, flag: str, *, least: int = 0, most: int | None = None) -> int:
    """Parse an integer within bounds."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        to = "" if most is None else f" to {most}"
        reject(text, flag, "is invalid", f"a whole number from {least}{to}")
    return number


def interval(text: str, flag: str) -> float:
    """Parse a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        reject(text, flag, "is not a number of seconds", "above 0, e.g. 0.1")
    return number


def seconds(text: str, flag: str) -> int | float:
    """Parse a number of seconds from 0, fractions allowed."""
    return parse_seconds(str(text), source=source_of(text, flag))


def on_or_off(text: str, flag: str) -> bool:
    """Parse the text of a variable as on or off."""
    word = text.strip().lower()
    if word in _ON or word in _OFF:
        return word in _ON
    try:
        return int(word) != 0
    except ValueError:
        reject(text, flag, "is neither on nor off", "1 or 0, true or false")


def one_of(text: str, flag: str, choices: Iterable[str]) -> str:
    """Return the text if it is one of the choices."""
    if text not in choices:
        reject(text, flag, "is invalid", ", ".join(choices))
    return str(text)


def parse_log_dir(text: str | None) -> str | None:
    """Return the log folder as an absolute path; it need not exist. `/dev/null` means no files.

    Workers get paths below it in their environment, and must find them after a change of folder.
    """
    if not text:
        return None
    from holdfast.processes.logs.specs import absolute

    path = absolute(text)
    if path != os.devnull and os.path.exists(path) and not os.path.isdir(path):
        reject(
            text, "--log-dir", "is not a directory", "a directory, created if missing, or /dev/null"
        )
    return path


def load_logs_specs(name: str) -> type[LogsSpecs]:
    """Return the class behind `--logs-specs`: ours for `default`, else an installed plug-in."""
    if name == "default":
        from holdfast.processes.logs.specs import DefaultLogsSpecs

        return DefaultLogsSpecs
    from importlib.metadata import entry_points

    installed = {plugin.name: plugin for plugin in entry_points(group=LOGS_SPECS_GROUP)}
    if name not in installed:
        accepted = ", ".join(sorted({"default", *installed}))
        reject(name, "--logs-specs", f"is not installed under {LOGS_SPECS_GROUP}", accepted)
    try:
        loaded: type[LogsSpecs] = installed[name].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--logs-specs: cannot load {name!r}: {error}") from error
    return loaded


# The table of flags.

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


class Flag(Value):
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

    def default_now(self) -> object:
        """Return the default, which is text still to be converted if a variable holds it."""
        text = os.environ.get(self.variable) if self.from_environment else None
        if text is not None:
            return FromEnvironment(text, self.variable)
        return list(self.default) if isinstance(self.default, list) else self.default


def _switch(group: str, name: str, meaning: str, short: str = "") -> Flag:
    return Flag(group, name, default=False, metavar="", meaning=meaning, short=short)


def _count(text: str, flag: str) -> int:
    return whole_number(text, flag)


def _port(text: str, flag: str) -> int:
    return whole_number(text, flag, most=PORT_MAX)


def _address(text: str, flag: str) -> str:
    from holdfast.core.limits import ADDRESS_CHARS

    if text.strip(ADDRESS_CHARS):
        reject(text, flag, "is not an address", "a host name or an IP address, without brackets")
    return text


def _start_method(text: str, flag: str) -> str:
    return one_of(text, flag, START_METHODS)


def _numa_binding(text: str, flag: str) -> str:
    return one_of(text, flag, NUMA_BINDINGS)


def _filters(text: str, _flag: str) -> list[str]:
    return split_filters(text)


FLAGS = (
    Flag(
        WORKERS, "--nproc-per-node", "1", "N",
        "workers on this node: a number, or cpu, gpu, xpu or auto to count devices (1)",
    ),
    _switch(
        WORKERS, "--virtual-local-rank",
        "show each worker only its own GPU, as device 0, with LOCAL_RANK=0",
    ),
    Flag(WORKERS, "--role", "default", "NAME", "role of these workers in logs and ranks (default)"),
    Flag(
        WORKERS, "--start-method", "spawn", "HOW",
        "how Python function workers start: spawn, fork or forkserver (spawn)",
        _start_method, choices=START_METHODS,
    ),
    Flag(
        WORKERS, "--preload", "", "MODULES",
        "import these modules once per node and fork workers from there, e.g. torch,my.module; "
        "auto: those that SCRIPT imports. Makes starts and restarts faster",
    ),
    _switch(
        WORKERS, "--worker-store",
        "let the rank 0 worker, not the agent, host the workers' store at MASTER_PORT",
    ),
    Flag(
        WORKERS, "--numa-binding", None, "MODE",
        "bind workers to CPUs: node, socket, exclusive or core-complex",
        _numa_binding, choices=NUMA_BINDINGS, from_environment=False,
    ),
    _switch(PROGRAM, "--module", "SCRIPT is a module name, as for python -m", short="-m"),
    _switch(PROGRAM, "--no-python", "SCRIPT is a program; run it without Python"),
    _switch(
        PROGRAM, "--run-path",
        "run SCRIPT inside a Python interpreter that Holdfast has started",
    ),
    Flag(
        FAILURES, "--max-restarts", 0, "N",
        "restart all workers up to N times when one fails (0)", _count,
    ),
    Flag(
        FAILURES, "--monitor-interval", 0.1, "SECONDS",
        "accepted for compatibility; exits are noticed at once, without polling (0.1)",
        interval,
    ),
    Flag(
        FAILURES, "--shutdown-timeout", None, "SECONDS",
        "time between the stop signal and SIGKILL "
        f"(${SHUTDOWN_TIMEOUT_ENV} or {SHUTDOWN_S})",
        seconds,
    ),
    Flag(
        FAILURES, "--stop-signal", "SIGTERM", "NAME",
        "signal that asks workers to stop (SIGTERM)",
    ),
    Flag(
        FAILURES, "--signals-to-handle", DEFAULT_SIGNALS, "NAMES",
        f"signals to this command that stop the job ({DEFAULT_SIGNALS})",
    ),
    Flag(
        FAILURES, "--exit-barrier-timeout", EXIT_BARRIER_S, "SECONDS",
        f"how long a finished node waits for the others ({EXIT_BARRIER_S})",
        seconds,
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
        OUTPUT, "--local-ranks-filter", "", "RANKS",
        "show the output of these local ranks only, e.g. 0,2 (all)",
    ),
    Flag(
        OUTPUT, "--duplicate-stdout-filters", [], "TEXTS",
        "also copy stdout lines that contain one of these texts to a shared file", _filters,
    ),
    Flag(
        OUTPUT, "--duplicate-stderr-filters", [], "TEXTS",
        "the same for stderr; write a comma within a text as two", _filters,
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
        "where job events go besides the log directory: console, logging, otel or a plug-in; "
        "nowhere else for null, jsonl and dynamic_rendezvous (null)",
    ),
    Flag(
        OUTPUT, "--metrics-port", None, "PORT",
        "serve Prometheus metrics on this port; 0 for any free one (none)", _port,
    ),
    Flag(
        OUTPUT, "--metrics-addr", "", "ADDR",
        "address for --metrics-port; anyone who can reach it can read them (127.0.0.1)",
    ),
    Flag(
        OUTPUT, "--dashboard", None, "PORT",
        "serve a web page of the job on this port of the first node, as holdfast dashboard does; "
        "0 for any free one (none)", _port,
    ),
    Flag(
        OUTPUT, "--story", "", "FILE",
        "append every step of this agent to FILE, with its cause, for holdfast story (none)",
    ),
    Flag(
        RENDEZVOUS, "--nnodes", "1:1", "N|MIN:MAX",
        "number of nodes; additional ones stand by to replace a lost one (1)",
    ),
    Flag(
        RENDEZVOUS, "--spares", 0, "K",
        "keep K nodes as standbys, as long as at least MIN are left to run (0)", _count,
    ),
    _switch(RENDEZVOUS, "--standalone", "run on one node, independent of other jobs"),
    Flag(
        RENDEZVOUS, "--rdzv-backend", "static", "NAME",
        "how nodes find each other: c10d, static, file, etcd, or the name of a plug-in (static)",
    ),
    Flag(
        RENDEZVOUS, "--rdzv-endpoint", "", "HOST[:PORT]",
        "address of the coordinator (the agent on that host runs it), or several in order, of which a later "
        "one can take over (holdfast coordinator --take-over); or the etcd endpoints",
    ),
    Flag(
        RENDEZVOUS, "--ha", None, "HOST[:PORT],...",
        "survive the loss of any machine: these, best three, run an etcd of the job's own; the same list "
        "on every node (none)",
    ),
    Flag(RENDEZVOUS, "--rdzv-id", "none", "ID", "run id of the job, the same on every node (none)"),
    Flag(RENDEZVOUS, "--rdzv-conf", "", "K=V,...", "rendezvous settings"),
    Flag(RENDEZVOUS, "--node-rank", 0, "N", "rank of this node; static only (0)", _count),
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
        "address of this node to announce to the others (as the coordinator sees it)", _address,
    ),
)  # fmt: skip

USAGE = "holdfast run [flags] SCRIPT [arguments of the script]"

DESCRIPTION = """\
Start a script several times, as the workers of one job, and supervise them: if
one fails, all are stopped, restarted if restarts are left, and the failure is
reported. Everything after SCRIPT is passed to it unchanged."""

EPILOG = """\
Flags can be written with - or _ (--max-restarts, --max_restarts), and abbreviated
as long as they stay unambiguous. The variable PET_<FLAG>, such as
PET_MAX_RESTARTS, sets a default (except for --logs-specs and --numa-binding).

Exit codes: 0 if every worker succeeded; otherwise the code of the worker that
failed first on any node, or 128+N if signal N ended it or this command; 2 for an
invalid command line; 78 if the rendezvous fails; 126 or 127 if SCRIPT cannot start.

Examples:
  One worker:
    holdfast run train.py --epochs 3
  One worker per GPU, restarted up to three times:
    holdfast run --nproc-per-node gpu --max-restarts 3 -m my.training
  PyTorch imported once on the node, for all workers and all restarts:
    holdfast run --nproc-per-node 8 --preload torch --max-restarts 3 train.py
  Output on the console, prefixed with the rank, and in files:
    holdfast run --nproc-per-node 4 --tee 3 --log-dir logs train.py
  Two to four nodes, which may come and go; the same command on each of them:
    holdfast run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint node0:29400 \\
        --rdzv-id my-job --max-restarts 3 train.py
  The same on etcd, so that the job survives the loss of any of its machines:
    holdfast run --nnodes 2:4 --rdzv-backend etcd --rdzv-endpoint db0,db1,db2 \\
        --rdzv-id my-job --max-restarts 3 train.py
  A program that is not Python:
    holdfast run --nproc-per-node 2 --no-python ./simulate --steps 10
"""


def parse_plain(words: Sequence[str]) -> SimpleNamespace | None:
    """Parse a command line that is right and written out in full; None for any other.

    It gives what `build_parser` gives for the same words, without importing argparse, which costs
    more than everything else the command line needs. Help, abbreviations, joined short flags and
    every error are left to that parser.
    """
    known = {spelling: flag for flag in FLAGS for spelling in flag.spellings}
    given: dict[str, object] = {}
    rest = list(words)
    try:
        while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
            name, equals, text = rest.pop(0).partition("=")
            flag = known.get(name)
            if flag is None or (equals and not (flag.metavar and name.startswith("--"))):
                return None
            if flag.metavar and not equals:
                if not rest or rest[0].startswith("-"):
                    return None
                text = rest.pop(0)
            given[flag.dest] = flag.convert(text, flag.name) if flag.metavar else True
        for flag in FLAGS:
            if flag.dest not in given:
                default = flag.default_now()
                if isinstance(default, str):
                    convert = flag.convert if flag.metavar else on_or_off
                    default = convert(default, flag.name)
                given[flag.dest] = default
    except UsageError:
        return None
    if rest[:1] == ["--"]:
        rest.pop(0)
    elif rest[1:2] == ["--"]:
        del rest[1]  # As `cli/parser.py` does.
    if not rest:
        return None
    namespace: Any = type(sys.implementation)  # `types.SimpleNamespace`, without the import.
    made: SimpleNamespace = namespace(
        **given, training_script=rest[0], training_script_args=rest[1:]
    )
    return made


def build_parser() -> ScriptParser:
    """Return a parser for `holdfast run`, with the defaults of the environment as it is now."""
    import argparse

    from holdfast.cli.parser import Help, ScriptParser

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
    # argparse converts a default that is text, but only where the command line gave no value.
    default = flag.default_now()
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
        switch.type = _converter(flag, on_or_off)


def _converter(flag: Flag, convert: Callable[[str, str], object]) -> Callable[[str], object]:
    from holdfast.cli.parser import InvalidFlag

    def converted(text: str) -> object:
        try:
            return convert(text, flag.name)
        except UsageError as error:
            raise InvalidFlag(str(error)) from None

    return converted
