from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest

from holdfast.core.values import Value


class Begun(Value):
    """A fact without fields."""


class Exited(Value):
    pid: int
    code: int
    detail: str = ""
    when: float | None = None


class Ended(Value):
    """The same fields, another fact."""

    pid: int
    code: int
    detail: str = ""
    when: float | None = None


class Range(Value):
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    def grown(self) -> Range:
        return Range(self.first, self.last + 1)


def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Call without the type checker's help, as a mistaken caller would."""
    return cls(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((7, 1, "", None), {}),
        ((7, 1), {}),
        ((7,), {"code": 1}),
        ((), {"code": 1, "pid": 7}),
        ((7, 1), {"when": None}),
    ],
)
def test_however_it_is_made_it_is_the_same(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    made = make(Exited, *args, **kwargs)
    assert made == Exited(7, 1)
    assert hash(made) == hash(Exited(7, 1))
    assert repr(made) == "Exited(pid=7, code=1, detail='', when=None)"


@pytest.mark.parametrize(
    ("args", "kwargs", "complaint"),
    [
        ((), {}, "Exited needs 'pid'"),
        ((7,), {"detail": "x"}, "Exited needs 'code'"),
        ((1, 2, "", None, 5), {}, "Exited has 4 fields, not 5"),
        ((7, 1), {"color": 3}, "Exited has no field 'color'"),
        ((7, 1), {"pid": 3}, "Exited was given 'pid' twice"),
        ((7, 1, "", None), {"pid": 3}, "Exited was given 'pid' twice"),
    ],
)
def test_a_wrong_call_is_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(TypeError, match=f"^{complaint}$"):
        make(Exited, *args, **kwargs)


def test_any_other_value_makes_another_fact() -> None:
    different = {Exited(7, 1), Exited(8, 1), Exited(7, 2), Exited(7, 1, "x"), Exited(7, 1, when=0)}
    assert len(different) == 5


def test_another_kind_with_the_same_values_is_another_fact() -> None:
    other: object = Ended(7, 1)
    assert Exited(7, 1) != other
    assert len({Exited(7, 1), other}) == 2
    assert Exited(7, 1) != (7, 1)


def test_facts_without_fields_are_equal() -> None:
    assert Begun() == Begun()
    assert repr(Begun()) == "Begun()"
    with pytest.raises(TypeError, match=r"^Begun has 0 fields, not 1$"):
        make(Begun, 1)


def test_it_cannot_be_changed() -> None:
    fact: Any = Exited(7, 1)
    with pytest.raises(AttributeError, match=r"^Exited cannot be changed: 'pid'$"):
        fact.pid = 8
    with pytest.raises(AttributeError, match=r"^Exited cannot be changed: 'other'$"):
        fact.other = 8
    with pytest.raises(AttributeError, match=r"^Exited cannot be changed: 'pid'$"):
        del fact.pid
    assert fact == Exited(7, 1)


def test_a_value_that_cannot_be_hashed_shows_when_it_is_needed() -> None:
    fact = make(Range, [1], [2])
    assert fact == make(Range, [1], [2])
    with pytest.raises(TypeError, match="unhashable"):
        hash(fact)


def test_fields_are_matched_by_position_and_by_name() -> None:
    match Exited(7, 1, "x"):
        case Exited(pid, 1, detail=detail):
            assert (pid, detail) == (7, "x")
        case _:
            pytest.fail("it did not match")


def test_it_may_have_methods_and_properties() -> None:
    assert Range(1, 3).size == 3
    assert Range(1, 3).grown() == Range(1, 4)


def test_copies_and_pickles_are_equal() -> None:
    fact = Exited(7, 1, "x", 2.5)
    assert copy.copy(fact) == fact
    assert copy.deepcopy(fact) == fact
    assert pickle.loads(pickle.dumps(fact)) == fact


def test_importing_it_loads_nothing_else() -> None:
    program = (
        "import __future__, sys; before = set(sys.modules); import holdfast.core.values; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["holdfast", "holdfast.core", "holdfast.core.values"]
