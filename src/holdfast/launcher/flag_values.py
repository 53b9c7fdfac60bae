"""Converts the text of flags to values: numbers, signals, lists, ...

Each function raises a one-line `UsageError` for text that is not valid. The error names the flag, or the
`PET_` variable if the text is a `FromEnvironment`. Nothing here starts or creates anything.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING

from holdfast import plugins
from holdfast.core.limits import ADDRESS_CHARS, PORT_MAX, check_node_range
from holdfast.errors import PluginError, UsageError
from holdfast.launcher import devices
from holdfast.processes.logs import specs
from holdfast.processes.logs.std import Std
from holdfast.processes.signals import parse_signal, parse_signals, signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import NoReturn, Self

    from holdfast.processes.logs.specs import LogsSpecs

LOGS_SPECS_GROUP = "torchrun.logs_specs"
PRELOAD_AUTO = "auto"
"""In `preload`, this stands for the modules that the workers' program imports first."""
WORKERS_MAX = 1 << 16
"""The limit for `--nproc-per-node`. A typo above it would exhaust the memory before any worker fails."""

BYTE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SIZE_DIGITS_MAX = 12

_ON = frozenset({"true", "yes", "on"})
_OFF = frozenset({"false", "no", "off", ""})
_HARMLESS = ("SIGCHLD", "SIGCONT", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG")


class FromEnvironment(str):
    """The text of a `PET_` variable, with the name of the variable."""

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
    """Raise the error about `value`: where it was written, what is wrong, and what is accepted."""
    raise UsageError(f"{source_of(value, flag)}: {value!r} {problem}; accepted: {accepted}")


# Numbers and words: (text, flag) -> value.


def unparsed(text: str, _flag: str) -> str:
    """Return the text."""
    return text


def whole_number(text: str, flag: str, most: int | None = None) -> int:
    """Parse an integer from 0 up to `most`."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0 or (most is not None and number > most):
        to = "" if most is None else f" to {most}"
        reject(text, flag, "is invalid", f"a whole number from 0{to}")
    return number


def count(text: str, flag: str) -> int:
    """Parse a whole number from 0."""
    return whole_number(text, flag)


def port(text: str, flag: str) -> int:
    """Parse a port; 0 is any free one."""
    return whole_number(text, flag, PORT_MAX)


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
    """Parse a number of seconds from 0, such as `30` or `2.5`."""
    try:
        value: int | float = int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
    check_seconds(value, source=source_of(text, flag), given=str(text))
    return value


def check_seconds(value: float, *, source: str, given: object = None) -> None:
    """Reject a time that is negative, infinite or not a number; `given` is its text, if it was text."""
    if not 0 <= value < float("inf"):  # NaN fails both comparisons.
        shown = value if given is None else given
        raise UsageError(
            f"{source}: {shown!r} is not a number of seconds; accepted: from 0, e.g. 30 or 2.5"
        )


def byte_size(text: str, flag: str) -> int:
    """Parse a number of bytes, such as `65536`, `512K`, `16M` or `1G`."""
    number, unit = text.strip(), 1
    if number and number[-1].upper() in BYTE_UNITS:
        number, unit = number[:-1], BYTE_UNITS[number[-1].upper()]
    if not (number.isascii() and number.isdigit()) or len(number) > SIZE_DIGITS_MAX:
        reject(text, flag, "is not a size", "0, or a size such as 512K, 16M or 1G")
    return int(number) * unit


def parse_switch(text: str, flag: str) -> bool:
    """Parse the text of a variable as on or off."""
    word = text.strip().lower()
    if word in _ON or word in _OFF:
        return word in _ON
    try:
        return int(word) != 0
    except ValueError:
        reject(text, flag, "is neither on nor off", "1 or 0, true or false")


def one_of(choices: Iterable[str]) -> Callable[[str, str], str]:
    """Return a parser that accepts only these words."""

    def parse(text: str, flag: str) -> str:
        if text not in choices:
            reject(text, flag, "is invalid", ", ".join(choices))
        return str(text)

    return parse


def address(text: str, flag: str) -> str:
    """Parse a host name or an IP address."""
    if text.strip(ADDRESS_CHARS):
        reject(text, flag, "is not an address", "a host name or an IP address, without brackets")
    return text


def filters(text: str, _flag: str) -> list[str]:
    """Split at commas. Two commas in a row are one comma within an item."""
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


def signals(text: str, flag: str) -> str:
    """Return the signals by their full names, separated by commas."""
    return ",".join(map(signal_name, parse_signals(text, flag=source_of(text, flag))))


def stop_signal(text: str, flag: str) -> str:
    """Return the full name of a signal that can end a worker."""
    name = signal_name(parse_signal(text, flag=source_of(text, flag)))
    if name in _HARMLESS:
        accepted = "a signal that does, such as SIGTERM or SIGINT"
        reject(text, flag, "does not terminate a process", accepted)
    return name


# Values that need more than their text.


class InvalidNodeRange(UsageError, RuntimeError):
    """`--nnodes` is not a range; TorchElastic's callers catch it as a `RuntimeError`."""


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Parse `2` or `1:4` into the minimum and maximum number of nodes."""
    least, colon, most = nnodes.partition(":")
    try:
        bounds = (int(least), int(most if colon else least))
        check_node_range(*bounds)
    except ValueError:
        raise InvalidNodeRange(
            f"{source_of(nnodes, '--nnodes')}: {nnodes!r} is not a number of nodes; accepted: "
            "N or MIN:MAX, from 1, MIN <= MAX"
        ) from None
    return bounds


def determine_local_world_size(nproc_per_node: str) -> int:
    """Return the number of workers on this node for a value of `--nproc-per-node`.

    A number is returned as it is. `cpu` is the number of CPUs that this process may use. `gpu` and `xpu` are
    the numbers of these devices. `auto` is the number of accelerators of any kind, or that of CPUs if there
    are none. The name of a backend that a package adds to PyTorch, such as `npu`, is the number of its devices.
    The agent never imports PyTorch: see `holdfast.launcher.devices`.
    """
    flag = "--nproc-per-node"
    word = nproc_per_node.strip()
    try:
        found = int(word)
    except ValueError:
        found = _device_count(nproc_per_node, flag, word)
    if not 1 <= found <= WORKERS_MAX:
        accepted = "a whole number from 1, or cpu, gpu, xpu, auto"
        what = "is not a number of workers" if found < 1 else "is too large"
        reject(nproc_per_node, flag, what, accepted)
    return found


def _device_count(nproc_per_node: str, flag: str, word: str) -> int:
    if word == "cpu":
        return devices.cpu_count()
    if word == "auto":
        return devices.accelerator_count() or devices.cpu_count()
    if word not in ("gpu", "xpu"):
        return devices.named_backend_count(word) if word.isidentifier() else 0
    found = devices.gpu_count() if word == "gpu" else devices.xpu_count()
    if found == 0:
        accepted = "a whole number, cpu or auto"
        reject(nproc_per_node, flag, "matches no device on this machine", accepted)
    return found


def parse_local_ranks(text: str) -> set[int] | None:
    """Parse `0,2` into a set of local ranks; empty text gives `None`, which means every rank."""
    if not text:
        return None
    try:
        ranks = {int(item) for item in text.split(",")}
    except ValueError:
        ranks = {-1}
    if min(ranks) < 0:
        reject(text, "--local-ranks-filter", "is not a list of local ranks", "numbers, e.g. 0,2")
    return ranks


def parse_streams(text: str, flag: str) -> Std | dict[int, Std]:
    """Parse a value of `--redirects` or `--tee`: streams of all ranks, or by local rank."""
    try:
        return Std.from_str(str(text))
    except ValueError:
        accepted = "0 (none), 1 (stdout), 2 (stderr), 3 (both), or by local rank, e.g. 0:3,1:2"
        reject(text, flag, "does not select streams", accepted)


def parse_modules(names: Sequence[str], *, source: str) -> tuple[str, ...]:
    """Return names of modules, each once; text such as `torch,my.module` is split at its commas."""
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")] if names.strip() else ()
    for name in names:
        if not all(part.isidentifier() for part in str(name).split(".")):
            raise UsageError(
                f"{source}: {name!r} is not the name of a module; accepted: names as in "
                f"torch,my.module, and {PRELOAD_AUTO}"
            )
    return tuple(dict.fromkeys(names))


def parse_log_dir(text: str | None) -> str | None:
    """Return the log folder as an absolute path; it need not exist. `/dev/null` means no files.

    Workers get paths below it in their environment, and must find them after a change of directory.
    """
    if not text:
        return None
    path = specs.absolute(text)
    if path != os.devnull and os.path.exists(path) and not os.path.isdir(path):
        accepted = "a directory, created if missing, or /dev/null"
        reject(text, "--log-dir", "is not a directory", accepted)
    return path


def load_logs_specs(name: str) -> type[LogsSpecs]:
    """Return the class behind `--logs-specs`: ours for `default`, otherwise an installed plug-in."""
    if name == "default":
        return specs.DefaultLogsSpecs
    installed = {plugin.name: plugin for plugin in metadata.entry_points(group=LOGS_SPECS_GROUP)}
    if name not in installed:
        accepted = ", ".join(sorted({"default", *installed}))
        reject(name, "--logs-specs", f"is not installed under {LOGS_SPECS_GROUP}", accepted)
    source = plugins.note("logs specs", installed[name])
    try:
        with plugins.calling(source):
            loaded: type[LogsSpecs] = installed[name].load()
    except PluginError as error:
        if isinstance(error.__cause__, (ImportError, AttributeError)):
            raise UsageError(f"--logs-specs: cannot load {name!r}: {error.__cause__}") from error
        raise
    if not callable(loaded):
        raise PluginError(f"{source} is {loaded!r}, which is not a class")
    return loaded
