from __future__ import annotations

import enum
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.events import EventSource
from holdfast.observe.events.event import DEPTH_MAX, json_text

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.characters()
VALUES = st.recursive(PLAIN, lambda one: st.lists(one) | st.dictionaries(st.text(), one))


class Number(enum.IntEnum):
    ONE = 1


@given(VALUES)
def test_the_text_is_that_of_the_module_json(value: Any) -> None:
    assert json_text(value) == json.dumps(value)


@pytest.mark.parametrize(
    "value", ["\ud800", "a\udfff", "\U0001f600 \x7f\x80", "\0\x1f\"\\/\b\f\n\r\t", (1, ("a",)), {},
              EventSource.AGENT, Number.ONE, -0.0, 1e300, float("-inf"),
              {1: 2, 0.5: 3, None: 4}, {True: 5}, {EventSource.AGENT: 1}],
)  # fmt: skip
def test_what_is_rare_is_the_same_too(value: Any) -> None:
    assert json_text(value) == json.dumps(value)


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": b"x"}, '{"a": "b\'x\'"}'),
        ({3}, '"{3}"'),
        (Mute(), '"<Mute>"'),
        ({(1,): 2}, '{"(1,)": 2}'),
    ],
)
def test_what_json_has_no_word_for_becomes_text(value: Any, text: str) -> None:
    assert json_text(value) == text


def test_what_is_in_itself_has_an_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert json_text(endless) == "[" * (DEPTH_MAX + 1) + '"..."' + "]" * (DEPTH_MAX + 1)
