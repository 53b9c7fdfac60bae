from __future__ import annotations

import enum

import pytest

from holdfast.errors import UsageError
from holdfast.processes.logs.specs import Std, to_map


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", Std.NONE),
        ("1", Std.OUT),
        ("2", Std.ERR),
        ("3", Std.ALL),
        ("3\n", Std.ALL),
        ("0:1", {0: Std.OUT}),
        ("0:1,1:2", {0: Std.OUT, 1: Std.ERR}),
        ("1:3,1:0", {1: Std.NONE}),
        ("10:1,127:3", {10: Std.OUT, 127: Std.ALL}),
    ],
)
def test_text_is_read(text: str, expected: Std | dict[int, Std]) -> None:
    assert Std.from_str(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "4", "-1", "03", "1 ", "a", ":", "0:", ":1", "0:4", "0:1,", "0:1 ,1:2", "0:1;1:2", "x:1",
     "0=1", "\u0661", "\u0661:1", "1\n\n", "0:1:2", "1" * 7 + ":1"],
)  # fmt: skip
def test_other_text_is_a_usage_error_that_quotes_it(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Std.from_str(text)
    assert repr(text) in str(caught.value)
    assert "0:1,1:2" in caught.value.hint


def test_one_value_is_spread_over_all_ranks() -> None:
    assert to_map(Std.OUT, 3) == {0: Std.OUT, 1: Std.OUT, 2: Std.OUT}


def test_a_map_is_filled_up_and_cut_to_the_world() -> None:
    assert to_map({0: Std.OUT, 7: Std.ALL}, 2) == {0: Std.OUT, 1: Std.NONE}


def test_another_flag_class_with_the_same_values_is_understood() -> None:
    class Foreign(enum.IntFlag):
        ALL = 3

    spread = to_map(Foreign.ALL, 1)  # type: ignore[arg-type]
    assert isinstance(spread[0], Std)
    assert spread == {0: Std.ALL}
