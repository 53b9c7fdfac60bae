"""The grammars of flag values: text in, checked values out, one clear line for what is wrong.

The one thing to know: a value that came from a `PET_` variable is a `FromEnvironment`, so the
same grammar names the variable instead of the flag when it has to refuse the value. Nothing here
knows about argparse, and nothing here starts or creates anything (counting accelerators may ask
PyTorch in a process of its own: see `holdfast.cli.devices`).
"""

from __future__ import annotations

import os

from holdfast.errors import UsageError
from holdfast.launcher.config import parse_modules, parse_seconds
from holdfast.processes.signals import parse_signal, parse_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn, Self

    from holdfast.processes.logs import LogsSpecs
    from holdfast.processes.std import Std

RDZV_CONF_RESERVED = frozenset(
    {"backend", "endpoint", "local_addr", "max_nodes", "min_nodes", "run_id"}
)
"""Settings that have flags of their own, so that `--rdzv-conf` cannot give them a second value."""

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
    """Return where the person wrote this value: the flag, or the variable behind its default."""
    return value.variable if isinstance(value, FromEnvironment) else flag


def refuse(value: str, flag: str, problem: str, accepted: str) -> NoReturn:
    """Raise the one-line error about `value`: where it was written, and what would do."""
    raise UsageError(f"{source_of(value, flag)}: {value!r} {problem}; accepted: {accepted}")


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Turn `2` or `1:4` into the least and the greatest number of nodes."""
    least, colon, most = nnodes.partition(":")
    try:
        bounds = (int(least), int(most if colon else least))
    except ValueError:
        bounds = (0, 0)
    if not 0 < bounds[0] <= bounds[1]:
        refuse(nnodes, "--nnodes", "is not a number of nodes", "N or MIN:MAX, from 1, MIN <= MAX")
    return bounds


# A slip of the finger beyond this would take all memory before the first worker is refused.
WORKERS_MAX = 1 << 16


def determine_local_world_size(nproc_per_node: str) -> int:
    """Turn the value of `--nproc-per-node` into the number of workers on this node.

    A number is itself. `cpu` is the CPUs this process may use; `gpu` and `xpu` are the devices of
    that kind; `auto` is the devices of any accelerator found, else as `cpu`; the name of a
    backend that a package adds to PyTorch (such as `npu`) is its devices. PyTorch is never
    imported by the agent: `holdfast.cli.devices` says when it is asked in another process.
    """
    from holdfast.cli import devices

    flag = "--nproc-per-node"
    word = nproc_per_node.strip()
    if word == "cpu":
        return devices.cpu_count()
    if word == "auto":
        return devices.accelerator_count() or devices.cpu_count()
    if word in ("gpu", "xpu"):
        found = devices.gpu_count() if word == "gpu" else devices.xpu_count()
        if found == 0:
            refuse(nproc_per_node, flag, "finds no such device here", "a whole number, cpu or auto")
        return found
    try:
        count = int(word)
    except ValueError:
        count = devices.named_backend_count(word) if word.isidentifier() else 0
    if not 1 <= count <= WORKERS_MAX:
        accepted = "a whole number from 1, or cpu, gpu, xpu, auto"
        what = "is not a worker count" if count < 1 else "is more than any machine has room for"
        refuse(nproc_per_node, flag, what, accepted)
    return count


def parse_rdzv_conf(text: str) -> dict[str, str]:
    """Turn `key=value,key=value` into a mapping; a later key wins, values stay text."""
    flag = "--rdzv-conf"
    conf: dict[str, str] = {}
    if not text.strip():
        return conf
    for item in text.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if not key or not value:
            refuse(text, flag, f"has the item {item.strip()!r}", "key=value,key=value")
        if key in RDZV_CONF_RESERVED:
            refuse(text, flag, f"sets {key!r}, which has a flag of its own", "other keys")
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
    """Turn `0,2` into a set of local ranks; empty text is `None`, every rank."""
    if not text:
        return None
    try:
        ranks = {int(item) for item in text.split(",")}
    except ValueError:
        ranks = {-1}
    if min(ranks) < 0:
        refuse(text, "--local-ranks-filter", "is not a list of local ranks", "numbers as in 0,2")
    return ranks


def parse_streams(text: str, flag: str) -> Std | dict[int, Std]:
    """Turn the value of `--redirects` or `--tee` into streams, for all ranks or by local rank."""
    from holdfast.processes.std import Std

    try:
        return Std.from_str(str(text))
    except ValueError:
        accepted = "0 (none), 1 (stdout), 2 (stderr), 3 (both), or by local rank as in 0:3,1:2"
        refuse(text, flag, "does not select streams", accepted)


def parse_module_names(text: str, flag: str) -> tuple[str, ...]:
    """Turn `torch,my.module` into names of modules; empty text is none."""
    return parse_modules(text, source=source_of(text, flag))


def parse_signal_names(text: str) -> str:
    """Return the signals of `--signals-to-handle` by their full names, comma-separated."""
    flag = source_of(text, "--signals-to-handle")
    return ",".join(one.name for one in parse_signals(text, flag=flag))


def parse_stop_signal(text: str) -> str:
    """Return the full name of a signal that can end a worker."""
    name = parse_signal(text, flag=source_of(text, "--stop-signal")).name
    if name in ("SIGCHLD", "SIGCONT", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG"):
        accepted = "signals that do, such as SIGTERM or SIGINT"
        refuse(text, "--stop-signal", "does not end a process", accepted)
    return name


def whole_number(text: str, flag: str, *, least: int = 0, most: int | None = None) -> int:
    """Turn text into an integer within bounds."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        to = "" if most is None else f" to {most}"
        refuse(text, flag, "cannot be used", f"a whole number from {least}{to}")
    return number


def interval(text: str, flag: str) -> float:
    """Turn text into a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        refuse(text, flag, "is not an interval", "seconds above 0, such as 0.1")
    return number


def seconds(text: str, flag: str) -> int | float:
    """Turn text into a number of seconds from 0, fractions allowed."""
    return parse_seconds(str(text), source=source_of(text, flag))


def switch(text: str, flag: str) -> bool:
    """Turn the text of a variable into on or off."""
    word = text.strip().lower()
    if word in _ON or word in _OFF:
        return word in _ON
    try:
        return int(word) != 0
    except ValueError:
        refuse(text, flag, "is neither on nor off", "1 or 0, true or false")


def one_of(text: str, flag: str, choices: Iterable[str]) -> str:
    """Return the text if it is one of the choices."""
    if text not in choices:
        refuse(text, flag, "cannot be used", ", ".join(choices))
    return str(text)


def parse_log_dir(text: str | None) -> str | None:
    """Return the log folder as an absolute path; it need not exist. `/dev/null` means no files.

    Workers get paths below it in their environment, and must find them after a change of folder.
    """
    if not text:
        return None
    from holdfast.processes.logs import absolute

    path = absolute(text)
    if path != os.devnull and os.path.exists(path) and not os.path.isdir(path):
        refuse(text, "--log-dir", "is not a folder", "a folder, made if missing, or /dev/null")
    return path


def load_logs_specs(name: str) -> type[LogsSpecs]:
    """Return the class behind `--logs-specs`: ours for `default`, else an installed plug-in."""
    if name == "default":
        from holdfast.processes.logs import DefaultLogsSpecs

        return DefaultLogsSpecs
    from importlib.metadata import entry_points

    installed = {plugin.name: plugin for plugin in entry_points(group=LOGS_SPECS_GROUP)}
    if name not in installed:
        accepted = ", ".join(sorted({"default", *installed}))
        refuse(name, "--logs-specs", f"is not installed under {LOGS_SPECS_GROUP}", accepted)
    try:
        loaded: type[LogsSpecs] = installed[name].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--logs-specs: {name!r} cannot be loaded: {error}") from error
    return loaded
