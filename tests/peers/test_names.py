"""Every public name of the implemented areas of TorchElastic exists and accepts the same calls.

The tests introspect the real torch, so a release that adds a name or a parameter fails here.
Intentional omissions are in the tables at the top, each with its reason; an entry that is no longer needed fails as
well.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import sys
import textwrap
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.torch

# The counterparts of torch's modules; the longest prefix applies.
HOMES = {
    "torch.distributed.elastic": "holdfast.elastic",
    "torch.distributed.launcher": "holdfast.launcher",
    "torch.distributed.launch": "holdfast.launch",
    "torch.distributed.run": "holdfast.run",
    "torch.numa": "holdfast.numa",
}

STILL_TO_COME: set[str] = set()

# Modules without a counterpart, each with its reason.
NOT_FOR_US = {
    "torch.distributed.elastic.rendezvous._etcd_stub": (
        "replaces the package python-etcd where it is not installed; Holdfast does not use that package"
    )
}

PLATFORM = "the result of the module's platform detection; nothing to call"
LOGGER = "the module's own logger"
ALIAS = "a type alias for the module's own annotations, not exported"
VARIABLE = "a type variable for the module's own annotations, not exported"
STACK = "names the calling function for the module's own log lines, not exported"
PAUSE = "the pause before its own next attempt to change a key, not exported"
STEP = "a step of its protocol, in which every node changes one state; here one node decides"
FOLDER = "the data of a version is on a lease that is renewed automatically"
TIME = "a time of its protocol; the lease here is keep_alive_interval x keep_alive_max_attempt"
HOOK = "a hook between PContext and its two kinds; exits are not polled here"

# Names in torch, as `module:Class.member` without `torch.distributed.`.
LEFT_OUT = {
    "elastic.agent.server.api:logger": LOGGER,
    "elastic.agent.server.health_check_server:log": LOGGER,
    "elastic.agent.server.local_elastic_agent:logger": LOGGER,
    "elastic.multiprocessing.api:IS_MACOS": PLATFORM,
    "elastic.multiprocessing.api:IS_WINDOWS": PLATFORM,
    "elastic.multiprocessing.api:PContext._poll": HOOK,
    "elastic.multiprocessing.api:logger": LOGGER,
    "elastic.multiprocessing.errors:GlobalRank": ALIAS,
    "elastic.multiprocessing.errors:JSON": ALIAS,
    "elastic.multiprocessing.errors:logger": LOGGER,
    "elastic.multiprocessing.errors.error_handler:logger": LOGGER,
    "elastic.multiprocessing.redirects:IS_MACOS": PLATFORM,
    "elastic.multiprocessing.redirects:IS_WINDOWS": PLATFORM,
    "elastic.multiprocessing.redirects:libc": PLATFORM,
    "elastic.multiprocessing.redirects:logger": LOGGER,
    "elastic.multiprocessing.subprocess_handler.subprocess_handler:IS_WINDOWS": PLATFORM,
    "elastic.multiprocessing.tail_log:logger": LOGGER,
    "elastic.rendezvous.c10d_rendezvous_backend:logger": LOGGER,
    "elastic.rendezvous.dynamic_rendezvous:get_method_name": STACK,
    "elastic.rendezvous.dynamic_rendezvous:logger": LOGGER,
    "elastic.rendezvous.etcd_rendezvous:CONST_ETCD_FROZEN_TTL": TIME,
    "elastic.rendezvous.etcd_rendezvous:CONST_ETCD_JOINABLE_EPHEMERAL_TTL": TIME,
    "elastic.rendezvous.etcd_rendezvous:CONST_ETCD_SETUP_TTL": TIME,
    "elastic.rendezvous.etcd_rendezvous:CONST_RUNID_SUBROOT_TTL": TIME,
    "elastic.rendezvous.etcd_rendezvous:CONST_WORKER_KEEPALIVE_TTL": TIME,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.announce_self_waiting": STEP,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.confirm_membership": STEP,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.confirm_phase": STEP,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.create_path_if_not_exists": FOLDER,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.handle_existing_rendezvous": STEP,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.handle_join_last_call": STEP,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.init_phase": STEP,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.join_phase": STEP,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.join_rendezvous": STEP,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.setup_lease_renewal": FOLDER,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.try_create_rendezvous": STEP,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.wait_for_final": STEP,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.wait_for_peers": STEP,
    "elastic.rendezvous.etcd_rendezvous:EtcdRendezvous.wait_for_rendezvous_to_free": STEP,
    "elastic.rendezvous.etcd_rendezvous:logger": LOGGER,
    "elastic.rendezvous.etcd_server:logger": LOGGER,
    "elastic.rendezvous.etcd_store:cas_delay": PAUSE,
    "elastic.rendezvous.registry:log": LOGGER,
    "elastic.rendezvous.static_tcp_rendezvous:logger": LOGGER,
    "elastic.timer.api:logger": LOGGER,
    "elastic.timer.debug_info_logging:logger": LOGGER,
    "elastic.timer.file_based_local_timer:logger": LOGGER,
    "elastic.timer.local_timer:logger": LOGGER,
    "elastic.utils.data.elastic_distributed_sampler:T": VARIABLE,
    "elastic.utils.distributed:logger": LOGGER,
    "launcher.api:logger": LOGGER,
    "torch.numa.binding:K": VARIABLE,
    "torch.numa.binding:V": VARIABLE,
    "torch.numa.binding:logger": LOGGER,
    "run:logger": LOGGER,
}


@pytest.fixture(autouse=True)
def without_python_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch's etcd modules importable with the stub that they have for its client.

    A folder of tests is also called `etcd`, and would be imported as that client. One of the modules also imports
    urllib3, for the name of one error.
    """
    monkeypatch.setitem(sys.modules, "etcd", None)
    if find_spec("urllib3") is None:
        for name in ("urllib3", "urllib3.exceptions"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))


# Torch's names.


def modules_of_torch() -> list[str]:
    """Return the modules of the implemented areas, found as files so that none is missed."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0]).parent
    found = []
    for top in HOMES:
        place = root.joinpath(*top.split("."))
        files = place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
        for file in files:
            parts = file.relative_to(root).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(found)


def built_so_far() -> list[str]:
    return [name for name in modules_of_torch() if not is_to_come(name)]


def is_to_come(module: str) -> bool:
    areas = {*STILL_TO_COME, *NOT_FOR_US}
    return any(module == area or module.startswith(f"{area}.") for area in areas)


def counterpart(module: str) -> str:
    top = max((top for top in HOMES if f"{module}.".startswith(f"{top}.")), key=len)
    return HOMES[top] + module.removeprefix(top)


def short(module: str) -> str:
    return module.removeprefix("torch.distributed.")


def public_names(module: ModuleType) -> set[str]:
    """Return the public names of a module: `__all__`, its definitions, and the imports of a bare package."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    names = set(getattr(module, "__all__", ()))
    names.update(_defined(tree.body))
    if not names and module.__file__.endswith("__init__.py"):
        # A package that only re-exports the names of its modules, without an `__all__`.
        names.update(
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        )
    return {name for name in names if not name.startswith("_")}


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name))
        elif isinstance(node, ast.If):
            yield from _defined([*node.body, *node.orelse])


@cache
def members(cls: type) -> set[str]:
    """Return the members of a class, without those of `object` but with abstract hooks."""
    named = {
        name
        for base in cls.__mro__
        if _is_of_a_project(base)
        for name in [*vars(base), *getattr(base, "__annotations__", ()), *assigned_to_self(base)]
    }
    return {name for name in named if not name.startswith("_")} | abstract(cls)


def home_of(member: str, cls: type) -> str:
    """Return a member with the class that defines it first."""
    home = next((base for base in reversed(cls.__mro__) if member in vars(base)), cls)
    return f"{short(home.__module__)}:{home.__qualname__}.{member}"


def abstract(cls: type) -> set[str]:
    return set(getattr(cls, "__abstractmethods__", ()))


def assigned_to_self(cls: type) -> set[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # A C++ class, such as torch's errors, has no Python source.
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _is_of_a_project(cls: type) -> bool:
    # C++ classes derive from a class of pybind11.
    return cls.__module__.partition(".")[0] in ("torch", "holdfast", "pybind11_builtins")


# The comparison of two things under one name.


def compare(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    """Yield the differences that prevent `ours` from replacing `theirs`."""
    if isinstance(theirs, type):
        if isinstance(ours, type):
            yield from compare_classes(name, theirs, ours)
        else:
            yield f"{name}: is not a class here"
    elif callable(theirs):
        if callable(ours):
            yield from compare_calls(name, theirs, ours)
        else:
            yield f"{name}: cannot be called here"
    elif _is_of_a_project(type(theirs)):
        yield from compare_classes(name, type(theirs), type(ours))  # An instance in the module.
    elif theirs != ours:
        yield f"{name}: is {ours!r} here, {theirs!r} there"


def compare_classes(name: str, theirs: type, ours: type) -> Iterator[str]:
    for base in theirs.__mro__:
        if not _is_of_a_project(base) and not issubclass(ours, base):
            yield f"{name}: is not a {base.__name__} here"
    more = abstract(ours) - abstract(theirs)
    if more:
        yield f"{name}: a subclass that serves torch lacks {sorted(more)} here"
    if issubclass(theirs, enum.Enum) and issubclass(ours, enum.Enum):
        mine = {one: member.value for one, member in ours.__members__.items()}
        if mine != {one: member.value for one, member in theirs.__members__.items()}:
            yield f"{name}: has the members {mine} here"
    else:
        yield from compare_calls(name, theirs, ours)
    if dataclasses.is_dataclass(theirs):
        yield from compare_fields(name, theirs, ours)
    for member in sorted(members(theirs)):
        if home_of(member, theirs) not in LEFT_OUT:
            yield from compare_members(name, member, theirs, ours)


def compare_members(name: str, member: str, theirs: type, ours: type) -> Iterator[str]:
    where = f"{name}.{member}"
    if member not in members(ours) and not hasattr(ours, member):
        yield f"{where}: is missing"
        return
    # A plain attribute can replace a property; a method cannot.
    missing = object()
    there = inspect.getattr_static(theirs, member, missing)
    here = inspect.getattr_static(ours, member, missing)
    if type(there) in (staticmethod, classmethod) and type(here) is not type(there):
        yield f"{where}: is a {type(there).__name__} there and {type(here).__name__} here"
    elif callable(getattr(theirs, member, None)):
        if callable(getattr(ours, member, None)):
            yield from compare_calls(where, getattr(theirs, member), getattr(ours, member))
        else:
            yield f"{where}: cannot be called here"
    elif callable(getattr(ours, member, None)):
        yield f"{where}: is a method here"


def compare_fields(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    if not dataclasses.is_dataclass(ours):
        yield f"{name}: is not a dataclass here"
        return
    there = dataclasses.fields(theirs)
    here = dataclasses.fields(ours)
    if [field.name for field in there] != [field.name for field in here[: len(there)]]:
        yield f"{name}: has the fields {[field.name for field in here]} here"
        return
    for one, other in zip(there, here, strict=False):
        if one.init != other.init or _default_of(one) != _default_of(other):
            yield f"{name}.{one.name}: has another default here"


def _default_of(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def compare_calls(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    """Yield the calls that `theirs` accepts and `ours` refuses or binds differently."""
    try:
        there = inspect.signature(theirs)
    except ValueError:  # An exception without its own constructor has no signature.
        return
    here = inspect.signature(ours)
    for args, kwargs in calls(there):
        try:
            bound = here.bind(*args, **kwargs)
        except TypeError as refusal:
            yield f"{name}: cannot be called with {args} {kwargs}: {refusal}"
            return
        moved = {one: value for one, value in understood(bound).items() if one != value}
        if moved:
            yield f"{name}: takes its parameters in another order: {moved}"
    if dataclasses.is_dataclass(theirs):
        return  # The defaults of its fields are compared instead.
    for parameter in there.parameters.values():
        mine = here.parameters.get(parameter.name)
        if mine is not None and not same_default(parameter.default, mine.default):
            yield f"{name}({parameter.name}): {mine.default!r} here, {parameter.default!r} there"


def calls(signature: inspect.Signature) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield calls that a signature allows: with the fewest arguments, all by position, all by keyword.

    Each value is the name of the parameter that it is meant for.
    """
    parameters = list(signature.parameters.values())
    positional = [one.name for one in parameters if one.kind in POSITIONAL]
    needed = [one.name for one in parameters if one.kind in POSITIONAL and one.default is one.empty]
    only_named = {one.name: one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    more = ["*"] if any(one.kind is one.VAR_POSITIONAL for one in parameters) else []
    yield needed, {}
    yield [*positional, *more], only_named
    yield [], {one.name: one.name for one in parameters if one.kind in NAMED}


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def understood(bound: inspect.BoundArguments) -> dict[str, str]:
    """Return the value of each parameter, without `*args` and `**kwargs`."""
    return {one: value for one, value in bound.arguments.items() if isinstance(value, str)}


def same_default(theirs: Any, ours: Any) -> bool:
    """Whether omitting the argument has the same meaning, if torch allows it."""
    if theirs is inspect.Parameter.empty:
        return True
    if callable(theirs) and callable(ours):
        return True  # Whether two functions do the same cannot be seen from outside.
    return bool(theirs == ours)


# The tests.


def reference(a: int, b: str = "x", *, c: int = 1) -> None: ...
def same_with_more(a: int, b: str = "x", d: int = 0, *, c: int = 1) -> None: ...
def renamed(a: int, e: str = "x", *, c: int = 1) -> None: ...
def moved(b: str, a: int = 0, *, c: int = 1) -> None: ...
def another_default(a: int, b: str = "y", *, c: int = 1) -> None: ...
def needs_more(a: int, b: str, d: int, *, c: int = 1) -> None: ...
def only_by_position(a: int, b: str = "x", /, *, c: int = 1) -> None: ...


@pytest.mark.parametrize("other", [renamed, moved, another_default, needs_more, only_by_position])
def test_different_signature_is_detected(other: object) -> None:
    assert list(compare("it", reference, same_with_more)) == []
    assert list(compare("it", reference, other)) != []


def every_pair() -> Iterator[tuple[str, Any, Any]]:
    for module in built_so_far():
        theirs = importlib.import_module(module)
        ours = importlib.import_module(counterpart(module))
        for name in sorted(public_names(theirs)):
            where = f"{short(module)}:{name}"
            if where not in LEFT_OUT:
                yield where, getattr(theirs, name), getattr(ours, name, None)


def test_every_module_has_a_counterpart() -> None:
    missing = [name for name in built_so_far() if not _can_be_imported(counterpart(name))]
    assert missing == []


def test_every_public_name_exists() -> None:
    missing = [where for where, _, ours in every_pair() if ours is None]
    assert missing == []


def test_every_name_accepts_the_same_calls_and_has_the_same_members() -> None:
    problems = [
        problem
        for where, theirs, ours in every_pair()
        if ours is not None
        for problem in compare(where, theirs, ours)
    ]
    assert problems == []


def test_every_package_exports_what_torch_exports() -> None:
    """`from ... import *` must import the same names as with torch."""
    lacking = {}
    for module in built_so_far():
        theirs = importlib.import_module(module)
        ours = importlib.import_module(counterpart(module))
        wanted = set(getattr(theirs, "__all__", ()))
        wanted -= {name for name in wanted if f"{short(module)}:{name}" in LEFT_OUT}
        absent = wanted - set(getattr(ours, "__all__", ()))
        if absent:
            lacking[module] = absent
    assert lacking == {}


def test_every_backend_of_torch_exists() -> None:
    theirs = importlib.import_module("torch.distributed.elastic.rendezvous")
    ours = importlib.import_module("holdfast.elastic.rendezvous")
    names = set(theirs.rendezvous_handler_registry._registry)
    assert {"etcd", "etcd-v2"} < names
    assert names - set(ours.rendezvous_handler_registry._creators) == set()


def test_every_exception_in_the_tables_is_needed() -> None:
    names = set()
    for module in built_so_far():
        theirs = importlib.import_module(module)
        ours = importlib.import_module(counterpart(module))
        for name in public_names(theirs):
            value = getattr(theirs, name)
            if not hasattr(ours, name):
                names.add(f"{short(module)}:{name}")
            elif isinstance(value, type):
                absent = members(value) - members(getattr(ours, name))
                names |= {home_of(member, value) for member in absent}
    assert set(LEFT_OUT) - names == set()


def test_no_existing_area_is_listed_as_missing() -> None:
    known = set(modules_of_torch())
    areas = {*STILL_TO_COME, *NOT_FOR_US}
    assert known >= areas
    assert [area for area in areas if _can_be_imported(counterpart(area))] == []


def _can_be_imported(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    return True
