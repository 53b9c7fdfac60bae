"""Which modules a node imports ahead for its workers: those that are named, and those of `auto`.

The one thing to know: `auto` reads what the workers will run and imports nothing of it. It takes
the modules that this source imports at its top level, as `top_level_imports` tells, and that are
installed, as `installed_modules` tells. Where there is no source to read it says so in one line,
and the job runs without; only speed is lost.
"""

from __future__ import annotations

import os
import sys

from holdfast import messages
from holdfast.core.facts import Fact
from holdfast.launcher.config import PRELOAD_AUTO
from holdfast.launcher.installed_modules import installed_among, locate, places_of
from holdfast.launcher.top_level_imports import top_level_imports
from holdfast.processes.python_command import parse_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from holdfast.launcher.installed_modules import Place
    from holdfast.launcher.top_level_imports import Import

# torch imports this, which takes as long as torch itself, when the first optimizer is made.
LATE_IMPORT, OF_TORCH, ITS_WORD = "torch._dynamo", "torch", b"optim"

# A script is a few kilobytes. More than this was generated, and would take seconds to parse.
SOURCE_BYTES_MAX = 4 << 20


class NoSource(Exception):
    """There is nothing that could be read; the message says why."""


class Source(Fact):
    """What workers run: its text, and where its imports are looked for."""

    name: str
    text: bytes
    places: Sequence[Place]
    as_main: bool = True


def modules_to_preload(
    wanted: Sequence[str], entrypoint: Callable[..., Any] | str, args: Sequence[Any]
) -> tuple[str, ...]:
    """Return the modules to import ahead, with those that `auto` finds in its place."""
    if PRELOAD_AUTO not in wanted:
        return tuple(wanted)
    at = wanted.index(PRELOAD_AUTO)
    found = modules_of_auto(entrypoint, args)
    return tuple(dict.fromkeys([*wanted[:at], *found, *wanted[at + 1 :]]))


def modules_of_auto(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> list[str]:
    """Return the installed modules that workers import first, and tell the person of them."""
    foreign = isinstance(entrypoint, str) and not is_this_python(entrypoint)
    try:
        source = source_of(entrypoint, [str(arg) for arg in args], foreign=foreign)
        imports = _imports_of(source)
    except NoSource as reason:
        messages.notice(f"--preload auto finds no modules: {reason}")
        return []
    # What another interpreter has installed is not known here.
    found = installed_among(imports, source.places, missing_counts=foreign)
    if found:
        messages.info(f"--preload auto finds in {source.name}: {', '.join(found)}")
    else:
        messages.notice(
            f"--preload auto finds no modules: {source.name} imports none at its top level that "
            "are installed"
        )
    return found


def _imports_of(source: Source) -> list[Import]:
    try:
        imports = top_level_imports(source.text, as_main=source.as_main)
    except ValueError as problem:
        raise NoSource(f"{source.name} is not Python source: {problem}") from None
    if ITS_WORD in source.text and any(name.partition(".")[0] == OF_TORCH for name, _ in imports):
        imports.append((LATE_IMPORT, ()))
    return imports


def is_this_python(program: str) -> bool:
    """Whether a program is the interpreter that runs this, and so has the same modules.

    The folder must be the same too: those of two virtual environments lead to one interpreter.
    """
    if os.sep not in program:
        candidates = (os.path.join(folder, program) for folder in os.get_exec_path())
        program = next((path for path in candidates if os.access(path, os.X_OK)), program)
    if os.path.dirname(program) != os.path.dirname(sys.executable):
        return False
    return os.path.realpath(program) == os.path.realpath(sys.executable)


def source_of(
    entrypoint: Callable[..., Any] | str, args: Sequence[str], *, foreign: bool = False
) -> Source:
    """Return what workers run first, or raise `NoSource`."""
    if not isinstance(entrypoint, str):
        if getattr(entrypoint, "__name__", "") == "run_script_path" and args:
            return _script(args[0], foreign=False)
        return _module_of_function(entrypoint)
    command = parse_command([entrypoint, *args])
    if command is None:
        name = os.path.basename(entrypoint)
        raise NoSource(f"{name} is not given a Python script, module or command to run")
    if command.kind == "c":
        code = os.fsencode(command.what)
        return Source("the code of -c", code, _search_path("", foreign=foreign))
    if command.kind == "m":
        return _module(command.what, foreign=foreign)
    return _script(command.what, foreign=foreign)


def _script(path: str, *, foreign: bool) -> Source:
    folder = os.path.dirname(os.path.realpath(path))
    return Source(path, _read(path), _search_path(folder, foreign=foreign))


def _module(name: str, *, foreign: bool) -> Source:
    places = _search_path("", foreign=foreign)
    found = locate(name, places)
    if found is not None and found.below:
        found = locate("__main__", found.below)
    if found is None or found.origin is None:
        raise NoSource(f"there is no source of -m {name} here")
    return Source(f"-m {name}", _read(found.origin), places)


def _module_of_function(function: Callable[..., Any]) -> Source:
    """Return the module that workers import to call a function; there it is not `__main__`."""
    from functools import partial

    while isinstance(function, partial):
        function = function.func
    home = str(getattr(function, "__module__", None))
    path = getattr(sys.modules.get(home), "__file__", None)
    if path is None:
        raise NoSource(f"the function's module {home} has no file")
    return Source(f"module {home}", _read(path), places_of(sys.path), as_main=False)


def _search_path(first: str, *, foreign: bool) -> list[Place]:
    """Return where a worker looks for modules: as far as known here, if by another interpreter."""
    if not foreign:
        return places_of([first, *sys.path])
    given = os.environ.get("PYTHONPATH", "")
    return places_of([first, *(given.split(os.pathsep) if given else ())])


def _read(path: str) -> bytes:
    # Only what can be read twice: a pipe is the worker's.
    if not os.path.isfile(path):
        raise NoSource(f"{path} is {'a folder' if os.path.isdir(path) else 'no file'}")
    try:
        with open(path, "rb") as file:
            text = file.read(SOURCE_BYTES_MAX + 1)
    except OSError as problem:
        raise NoSource(f"{path} cannot be read: {problem.strerror}") from None
    if len(text) > SOURCE_BYTES_MAX:
        raise NoSource(f"{path} is larger than {SOURCE_BYTES_MAX >> 20} MiB")
    return text
