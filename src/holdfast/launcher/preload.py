"""The modules that a node imports before it forks its workers: the named ones, and those of `auto`.

`auto` reads the source that workers run, and imports none of it. It takes the modules that the source
imports at its top level and that are installed. Without a source it prints one line, and the job runs
without preloading; only speed is lost.

An import counts if a worker certainly or probably runs it: a statement of the module, or one below `try`,
`else`, `finally`, `with` or `if`. Imports for type checkers (`if TYPE_CHECKING`), fallbacks (`except`) and
imports inside a function or a class do not count. Below `if __name__ == "__main__"` an import counts if the
source is a worker's program, not if it is the module of a function.

A script may set a variable that modules read at import (`HF_HOME`, `OMP_NUM_THREADS`, `TORCH_LOGS`, ...). Of
the imports that follow, `auto` preloads only modules of the standard library, because any other module may
import the one that reads the variable.

A module is installed if the directory where Python finds it first has the standard library or is named
`site-packages` (`dist-packages` on Debian). Everything else (beside the script, in the working directory,
on PYTHONPATH, an editable install) is under development: it may change between two starts of the workers,
and may read its worker's rank at import.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from functools import partial
from pkgutil import get_importer
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.agent.spec import run_script_path
from holdfast.core.values import Value
from holdfast.launcher.flag_values import PRELOAD_AUTO
from holdfast.processes.zygote.warm_start import parse_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    Import = tuple[str, tuple[str, ...]]
    """A module, and the names that `from` imports from it."""


class VariableSetting(Value):
    """A statement that sets an environment variable; `value` is None if it is computed."""

    variable: str
    value: str | None
    line: int


def top_level_steps(source: bytes | str, *, as_main: bool) -> list[Import | VariableSetting]:
    """Return the absolute imports of a source and the variables it sets between them, in order.

    Raises `ValueError` if it is not Python. `as_main`: the source runs as `__main__`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The worker that runs it shows them.
            tree = ast.parse(source)
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        raise ValueError(f"{error.msg}{where}") from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None
    return list(_steps_of(tree.body, as_main=as_main))


def _steps_of(
    statements: Sequence[ast.stmt], *, as_main: bool
) -> Iterator[Import | VariableSetting]:
    for statement in statements:
        run: list[ast.stmt] = []
        match statement:
            case ast.Import(names=names):
                yield from ((alias.name, ()) for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield module, tuple(alias.name for alias in names)
            case ast.If(test=test, body=body, orelse=orelse):
                known = _condition_value(test, as_main=as_main)
                run = [*([] if known is False else body), *([] if known is True else orelse)]
            case ast.Try() | ast.TryStar():
                run = [*statement.body, *statement.orelse, *statement.finalbody]
            case ast.With(body=body):
                run = body
            case ast.Assign() | ast.Expr():
                yield from _settings_of(statement)
        yield from _steps_of(run, as_main=as_main)


def _settings_of(statement: ast.Assign | ast.Expr) -> Iterator[VariableSetting]:
    """Return the variables that `os.environ[...] = ...`, `setdefault` or `update` sets, if they are literals."""
    given: list[tuple[ast.expr | None, ast.expr]] = []
    match statement:
        case ast.Assign(targets=targets, value=value):
            given = [
                (target.slice, value)
                for target in targets
                if isinstance(target, ast.Subscript) and _is_environ(target.value)
            ]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=environ, attr=method)) as call):
            match method, call.args:
                case "setdefault", [name, value] if _is_environ(environ):
                    given = [(name, value)]
                case "update", [ast.Dict(keys=names, values=values)] if _is_environ(environ):
                    given = [*zip(names, values, strict=True)]
            if method == "update" and _is_environ(environ):
                given += [(ast.Constant(word.arg), word.value) for word in call.keywords]
    for one in given:
        match one:
            case ast.Constant(value=str(variable)), ast.Constant(value=str(text)):
                yield VariableSetting(variable, text, statement.lineno)
            case ast.Constant(value=str(variable)), _:
                yield VariableSetting(variable, None, statement.lineno)


def _is_environ(value: ast.expr) -> bool:
    match value:
        case ast.Name(id="environ") | ast.Attribute(value=ast.Name(id="os"), attr="environ"):
            return True
    return False


def _condition_value(test: ast.expr, *, as_main: bool) -> bool | None:
    """Return the value that a condition has in every worker; `None` if it is not known."""
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return False
        case ast.Constant(value=value):
            return bool(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            known = _condition_value(operand, as_main=as_main)
            return None if known is None else not known
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[right]):
            for one, other in ((left, right), (right, left)):
                match one, other:
                    case ast.Name(id="__name__"), ast.Constant(value="__main__"):
                        return as_main is isinstance(op, ast.Eq)
    return None


INSTALLED_FOLDERS = ("site-packages", "dist-packages")
# Part of the interpreter, or of Holdfast. And mpi4py joins its job at import as one process, which a fork
# would duplicate.
SKIPPED = frozenset({"__future__", "__main__", "holdfast", "mpi4py", *sys.builtin_module_names})


class PathEntry(Value):
    """A directory of a search path for modules."""

    folder: str
    installed: bool


class FoundModule(Value):
    """A module: the file it is loaded from, if any, and where its submodules are."""

    origin: str | None
    installed: bool
    below: tuple[PathEntry, ...]


def path_entries(folders: Iterable[str]) -> list[PathEntry]:
    """Return the entries of a search path; an empty one is the working directory."""
    standard = os.path.dirname(os.path.abspath(os.__file__))
    places = []
    for folder in folders:
        try:
            path = os.path.abspath(folder)
        except OSError:
            continue  # The working directory was removed.
        standard_library = path in (standard, os.path.join(standard, "lib-dynload"))
        installed = standard_library or os.path.basename(path) in INSTALLED_FOLDERS
        places.append(PathEntry(path, installed))
    return places


def find_module(name: str, places: Sequence[PathEntry]) -> FoundModule | None:
    """Find a module by its full name, one step for each part, as Python would."""
    found: FoundModule | None = None
    parts = name.split(".")
    for at in range(len(parts)):
        found = _step(".".join(parts[: at + 1]), places)
        if found is None:
            return None
        places = found.below
    return found


def _step(full_name: str, places: Sequence[PathEntry]) -> FoundModule | None:
    """Find a module in the first place that has it.

    Directories without an `__init__.py` form one package, unless a later place has a module of that name.
    """
    # `PathFinder` does not work here: the parent package would have to be imported.
    portions: list[PathEntry] = []
    for place in places:
        finder = get_importer(place.folder)
        spec = finder.find_spec(full_name) if finder is not None else None
        if spec is None:
            continue
        folders = spec.submodule_search_locations or ()
        below = tuple(PathEntry(folder, place.installed) for folder in folders)
        if spec.loader is not None:
            return FoundModule(spec.origin, place.installed, below)
        portions.extend(below)
    if not portions:
        return None
    return FoundModule(None, all(portion.installed for portion in portions), tuple(portions))


def installed_among(
    imports: Iterable[Import], places: Sequence[PathEntry], *, missing_counts: bool = False
) -> list[str]:
    """Return the modules that imports bring in and that are installed, each once, in order.

    `from a import b` brings in `a`, and `a.b` if that is a module. With `missing_counts`, a module
    whose package is in none of the places also counts as installed.
    """
    names: dict[str, None] = {}
    for module, members in imports:
        top = module.partition(".")[0]
        if top in SKIPPED:
            continue
        found = find_module(module, places)
        if found is None:
            if missing_counts and find_module(top, places) is None:
                names[module] = None
            continue
        if not found.installed:
            continue
        names[module] = None
        for member in members:
            below = find_module(member, found.below)
            if below is not None and below.installed:
                names[f"{module}.{member}"] = None
    return list(names)


# torch imports this when the script creates the first optimizer. It takes as long as importing torch.
TORCH_LATE_IMPORT, TORCH_LATE_WORD = "torch._dynamo", b"optim"

# A script has a few kilobytes. A larger source was generated, and would take seconds to parse.
SOURCE_BYTES_MAX = 4 << 20


class SourceUnavailable(Exception):
    """No source can be read; the message gives the reason."""


class Source(Value):
    """The source that workers run, and the search path of its imports."""

    name: str
    text: bytes
    places: Sequence[PathEntry]
    as_main: bool = True


def modules_to_preload(
    wanted: Sequence[str], entrypoint: Callable[..., Any] | str, args: Sequence[Any]
) -> tuple[str, ...]:
    """Return the modules to preload, with `auto` replaced by the modules it finds."""
    if PRELOAD_AUTO not in wanted:
        return tuple(wanted)
    at = wanted.index(PRELOAD_AUTO)
    found = modules_of_auto(entrypoint, args)
    return tuple(dict.fromkeys([*wanted[:at], *found, *wanted[at + 1 :]]))


def modules_of_auto(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> list[str]:
    """Return and print the installed modules that workers import at the top level."""
    foreign = isinstance(entrypoint, str) and not is_this_python(entrypoint)
    try:
        source = source_of(entrypoint, [str(arg) for arg in args], foreign=foreign)
        imports, left_out = _read_imports(source, foreign=foreign)
    except SourceUnavailable as reason:
        console.notice(f"--preload auto finds no modules: {reason}")
        return []
    # This process does not know what another interpreter has installed.
    found = installed_among(imports, source.places, missing_counts=foreign)
    if found:
        console.info(f"--preload auto finds in {source.name}: {', '.join(found)}")
    elif not left_out:
        console.notice(
            f"--preload auto finds no modules: {source.name} imports no installed module at its top level"
        )
    return found


# Prefixes of variables that well-known packages, and the libraries below them, read at import.
READ_AT_IMPORT = (
    "DATASETS_", "GOMP_", "HF_", "HUGGINGFACE_", "JAX_", "KMP_", "MKL_", "NUMEXPR_", "OMP_",
    "OPENBLAS_", "PYTORCH_", "TF_", "TORCH", "TRANSFORMERS_", "XLA_",
)  # fmt: skip


def prepares_imports(
    setting: VariableSetting, later: Iterable[Import], environ: Mapping[str, str]
) -> bool:
    """Whether a statement changes a variable that a later module reads at import.

    The modules of a package are assumed to read the variables that begin with its name.
    """
    variable = setting.variable
    if variable in environ and setting.value in (None, environ[variable]):
        return False
    packages = {module.partition(".")[0].upper() for module, _ in later}
    return variable.startswith(READ_AT_IMPORT) or variable.partition("_")[0] in packages


def split_at_preparation(
    steps: Sequence[Import | VariableSetting], environ: Mapping[str, str]
) -> tuple[list[Import], list[Import], VariableSetting | None]:
    """Return the imports to preload, the imports that a setting precedes, and that setting."""
    imports: list[Import] = []
    for at, step in enumerate(steps):
        if not isinstance(step, VariableSetting):
            imports.append(step)
            continue
        later = [one for one in steps[at + 1 :] if not isinstance(one, VariableSetting)]
        if not prepares_imports(step, later, environ):
            continue
        standard = [one for one in later if one[0].partition(".")[0] in sys.stdlib_module_names]
        return imports + standard, [one for one in later if one not in standard], step
    return imports, [], None


def _read_imports(source: Source, *, foreign: bool) -> tuple[list[Import], list[str]]:
    """Return the imports to preload, and the modules that are left out."""
    try:
        steps = top_level_steps(source.text, as_main=source.as_main)
    except ValueError as problem:
        raise SourceUnavailable(f"{source.name} is not Python source: {problem}") from None
    imports, prepared, by = split_at_preparation(steps, os.environ)
    left_out = installed_among(prepared, source.places, missing_counts=foreign)
    if by is not None and left_out:
        console.notice(
            f"--preload auto leaves out {', '.join(left_out)}: {source.name} sets {by.variable} in "
            f"line {by.line}, before it imports them; export {by.variable} to have them preloaded"
        )
    if TORCH_LATE_WORD in source.text and any(
        name.partition(".")[0] == "torch" for name, _ in imports
    ):
        imports.append((TORCH_LATE_IMPORT, ()))
    return imports, left_out


def is_this_python(program: str) -> bool:
    """Whether a program is the interpreter of this process, so that it has the same modules.

    The directory must be the same too: two virtual environments can link to one interpreter.
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
    """Return the source that workers run, or raise `SourceUnavailable`."""
    if not isinstance(entrypoint, str):
        if entrypoint is run_script_path and args:
            return _script(args[0], foreign=False)
        return _module_of_function(entrypoint)
    command = parse_command([entrypoint, *args])
    if command is None:
        name = os.path.basename(entrypoint)
        raise SourceUnavailable(f"{name} has no Python script, module or command to run")
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
    found = find_module(name, places)
    if found is not None and found.below:
        found = find_module("__main__", found.below)
    if found is None or found.origin is None:
        raise SourceUnavailable(f"no source found for -m {name} here")
    return Source(f"-m {name}", _read(found.origin), places)


def _module_of_function(function: Callable[..., Any]) -> Source:
    """Return the module that workers import to call a function, which is not `__main__` there."""
    while isinstance(function, partial):
        function = function.func
    home = str(getattr(function, "__module__", None))
    path = getattr(sys.modules.get(home), "__file__", None)
    if path is None:
        raise SourceUnavailable(f"the function's module {home} has no file")
    return Source(f"module {home}", _read(path), path_entries(sys.path), as_main=False)


def _search_path(first: str, *, foreign: bool) -> list[PathEntry]:
    """Return a worker's search path for modules; for another interpreter, the part that is known."""
    if not foreign:
        return path_entries([first, *sys.path])
    given = os.environ.get("PYTHONPATH", "")
    return path_entries([first, *(given.split(os.pathsep) if given else ())])


def _read(path: str) -> bytes:
    # A pipe can be read only once, by the worker.
    if not os.path.isfile(path):
        raise SourceUnavailable(
            f"{path} is {'a directory' if os.path.isdir(path) else 'not a file'}"
        )
    try:
        with open(path, "rb") as file:
            text = file.read(SOURCE_BYTES_MAX + 1)
    except OSError as problem:
        raise SourceUnavailable(f"cannot read {path}: {problem.strerror}") from None
    if len(text) > SOURCE_BYTES_MAX:
        raise SourceUnavailable(f"{path} is larger than {SOURCE_BYTES_MAX >> 20} MiB")
    return text
