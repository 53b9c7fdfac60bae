from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from holdfast.core.machine import short_text
from holdfast.core.phases import NodePhase
from holdfast.core.values import Value


class Exited(Value):
    pid: int
    code: int
    detail: str = ""
    when: float | None = None


class Ended(Exited):
    pid: int
    code: int
    detail: str = ""
    when: float | None = None


def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Call without type checking."""
    return cls(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((7, 1, "", None), {}), ((7, 1), {}), ((7,), {"code": 1}), ((), {"code": 1, "pid": 7})],
)
def test_positional_and_keyword_arguments_give_equal_values(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    made = make(Exited, *args, **kwargs)
    assert made == Exited(7, 1)
    assert hash(made) == hash(Exited(7, 1))
    assert repr(made) == "Exited(pid=7, code=1, detail='', when=None)"
    assert short_text(made) == "Exited(pid=7, code=1)"
    assert short_text(NodePhase.READY) == "ready"
    for same in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert same == made


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((7,), {"detail": "x"}),
        ((1, 2, "", None, 5), {}),
        ((7, 1), {"color": 3}),
        ((7, 1, "", None), {"pid": 3}),
    ],
)
def test_a_call_with_wrong_arguments_raises(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="Exited"):
        make(Exited, *args, **kwargs)


def test_values_differ_by_any_field_and_by_type() -> None:
    values = [Exited(7, 1), Exited(8, 1), Exited(7, 2), Exited(7, 1, "x"), Ended(7, 1), (7, 1)]
    assert len(set(values)) == len(values)
