from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest

from holdfast.events import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent

EVENT = Event("started", EventSource.WORKER, 17, {"rank": 3, "share": 0.5, "up": True, "x": None})
STEP = RdzvEvent("join", "job", "joined", "host", 42, NodeState.RUNNING, rank=2)


def test_the_text_of_an_event_is_one_line_and_reads_back() -> None:
    text = EVENT.serialize()
    assert text == str(EVENT)
    assert "\n" not in text
    assert json.loads(text) == {
        "name": "started", "source": "WORKER", "timestamp": 17,
        "metadata": {"rank": 3, "share": 0.5, "up": True, "x": None},
    }  # fmt: skip
    assert Event.deserialize(text) == EVENT
    assert type(Event.deserialize(text).source) is EventSource
    assert Event.deserialize(EVENT) is EVENT


def test_a_step_of_a_rendezvous_reads_back() -> None:
    assert RdzvEvent.deserialize(str(STEP)) == STEP
    assert RdzvEvent.deserialize(STEP) is STEP
    assert list(json.loads(STEP.serialize())) == [one.name for one in dataclasses.fields(STEP)]


@pytest.mark.parametrize("kind", [Event, RdzvEvent])
def test_a_text_that_is_no_event_is_refused(kind: type[Event]) -> None:
    for text in ("", "no", "[1]", '{"name": "x"}'):
        with pytest.raises((ValueError, KeyError, TypeError)):
            kind.deserialize(text)


def test_events_are_data_classes() -> None:
    assert dataclasses.asdict(EVENT)["metadata"] == EVENT.metadata
    assert dataclasses.replace(EVENT, name="ended").name == "ended"
    assert [one.name for one in dataclasses.fields(Event)] == [
        "name", "source", "timestamp", "metadata",
    ]  # fmt: skip
    assert copy.deepcopy(EVENT) == EVENT == pickle.loads(pickle.dumps(EVENT))
    assert Event("a", EventSource.AGENT).metadata is not Event("a", EventSource.AGENT).metadata
    assert Event("a", EventSource.AGENT) != Event("b", EventSource.AGENT)


def test_a_class_with_more_fields_writes_them() -> None:
    @dataclasses.dataclass
    class Wider(Event):
        more: int = 5

    assert json.loads(Wider("a", EventSource.AGENT).serialize())["more"] == 5


def test_a_value_of_metadata_is_plain() -> None:
    assert EventMetadataValue == str | int | float | bool | None
