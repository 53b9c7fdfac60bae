from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from holdfast.agent.spec import RunResult, WorkerSpec
from holdfast.launcher.config import LaunchConfig
from holdfast.lazy_dataclass import factory_field, keyword_field, lazy_dataclass
from holdfast.processes.logs.specs import LogsDest
from holdfast.processes.workers.group import RunProcsResult
from holdfast.rendezvous.handler import RendezvousStoreInfo

PUBLIC = [LaunchConfig, LogsDest, RendezvousStoreInfo, RunProcsResult, RunResult, WorkerSpec]


@lazy_dataclass
class Box:
    MAKER: ClassVar[str] = "somebody"
    name: str
    size: int = 3
    parts: list[str] = factory_field(default_factory=list)
    lid: str | None = None
    colour: str = keyword_field(default="red", kw_only=True)

    def __post_init__(self) -> None:
        self.label = f"{self.name} of {self.size}"


@dataclass
class Real:
    """`Box` as a real data class."""

    MAKER: ClassVar[str] = "somebody"
    name: str
    size: int = 3
    parts: list[str] = field(default_factory=list)
    lid: str | None = None
    colour: str = field(default="red", kw_only=True)


@dataclass
class Chest(Box):
    """A real data class that is derived from a lazy one."""

    lock: str = "none"
    keys: list[int] = field(default_factory=list)


@dataclass
class RealChest(Real):
    lock: str = "none"
    keys: list[int] = field(default_factory=list)


def described(cls: Any) -> list[tuple[Any, ...]]:
    return [
        (f.name, f.type, f.default, f.default_factory, f.init, f.repr, f.compare, f.kw_only)
        for f in dataclasses.fields(cls)
    ]


def test_the_constructor_has_the_signature_of_a_data_class() -> None:
    assert str(inspect.signature(Box)) == str(inspect.signature(Real))
    ours = [(p.name, p.kind, p.annotation) for p in inspect.signature(Box).parameters.values()]
    real = [(p.name, p.kind, p.annotation) for p in inspect.signature(Real).parameters.values()]
    assert ours == real
    assert Box.__init__.__qualname__ == "Box.__init__"


def test_text_and_comparison_are_those_of_a_data_class() -> None:
    assert repr(Box("a", parts=["x"])) == repr(Real("a", parts=["x"])).replace("Real", "Box")
    assert Box("a") == Box("a")
    assert Box("a") != Box("b")
    assert Box("a") != Box("a", colour="blue")
    other: object = Real("a")
    assert Box("a") != other
    assert Box.__hash__ is None


def test_dataclasses_module_recognizes_it() -> None:
    box = Box("a", parts=["x"])
    assert dataclasses.is_dataclass(Box)
    assert dataclasses.is_dataclass(box)
    assert described(Box) == described(Real)
    assert dataclasses.asdict(box) == dataclasses.asdict(Real("a", parts=["x"]))
    assert dataclasses.astuple(box) == ("a", 3, ["x"], None, "red")
    assert repr(Box.__dataclass_params__) == repr(Real.__dataclass_params__)  # type: ignore[attr-defined]


def test_data_class_can_be_derived_from_it() -> None:
    assert described(Chest) == described(RealChest)
    assert str(inspect.signature(Chest)) == str(inspect.signature(RealChest))
    chest = Chest("a", lock="brass", colour="blue")
    assert chest.label == "a of 3"
    assert repr(chest) == repr(RealChest("a", lock="brass", colour="blue")).replace("Real", "")
    assert chest != Chest("a", colour="blue")


@pytest.mark.parametrize("cls", PUBLIC)
def test_the_fields_of_public_classes_are_their_constructors_parameters(cls: Any) -> None:
    parameters = inspect.signature(cls).parameters
    assert [f.name for f in dataclasses.fields(cls)] == list(parameters)
    assert list(cls.__match_args__) == [
        name for name, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY
    ]


LAZY = """
import sys
from holdfast.agent.spec import RunResult
from holdfast.agent.spec import WorkerState
from holdfast.processes.logs.specs import LogsDest
assert RunResult(WorkerState.INIT) == RunResult(WorkerState.INIT, {})
assert repr(LogsDest()).startswith("LogsDest(stdouts={}, ")
assert "dataclasses" not in sys.modules, "imported before anyone asked"
assert hasattr(RunResult, "__dataclass_fields__")
assert "dataclasses" in sys.modules
"""


def test_dataclasses_is_imported_only_on_use() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", LAZY], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
