"""The text of an event is that of `json`, and reads back."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.events import Event, EventSource, NodeState, RdzvEvent
from holdfast.observe.events.event import DEPTH_MAX, json_text

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.characters()
VALUES = st.recursive(PLAIN, lambda one: st.lists(one) | st.dictionaries(st.text(), one))
EVENT = Event("started", EventSource.WORKER, 17, {"rank": 3, "share": 0.5, "up": True, "x": None})
STEP = RdzvEvent("join", "job", "joined", "host", 42, NodeState.RUNNING, rank=2)


class Number(enum.IntEnum):
    ONE = 1


@given(VALUES)
def test_text_equals_that_of_the_json_module(value: Any) -> None:
    assert json_text(value) == json.dumps(value)


@pytest.mark.parametrize(
    "value", ["\ud800", "a\udfff", "\U0001f600 \x7f\x80", "\0\x1f\"\\/\b\f\n\r\t", (1, ("a",)), {},
              EventSource.AGENT, Number.ONE, -0.0, 1e300, float("-inf"),
              {1: 2, 0.5: 3, None: 4}, {True: 5}, {EventSource.AGENT: 1}],
)  # fmt: skip
def test_rare_values_equal_those_of_the_json_module(value: Any) -> None:
    assert json_text(value) == json.dumps(value)


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_value_without_a_json_type_becomes_text() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value, text in (
        ({"a": b"x"}, '{"a": "b\'x\'"}'),
        (Mute(), '"<Mute>"'),
        ({(1,): 2}, '{"(1,)": 2}'),
        (endless, "[" * (DEPTH_MAX + 1) + '"..."' + "]" * (DEPTH_MAX + 1)),
    ):
        assert json_text(value) == text


@pytest.mark.parametrize("event", [EVENT, STEP])
def test_event_is_one_line_that_reads_back_and_a_data_class(event: Any) -> None:
    text = event.serialize()
    assert text == str(event) == json.dumps(dataclasses.asdict(event))
    assert type(event).deserialize(text) == event
    assert type(event).deserialize(event) is event
    assert copy.deepcopy(event) == event == pickle.loads(pickle.dumps(event))
    assert dataclasses.replace(event, name="ended").name == "ended"
    for wrong in ("", "no", "[1]", '{"name": "x"}'):
        with pytest.raises((ValueError, KeyError, TypeError)):
            type(event).deserialize(wrong)
