from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from event_fakes import Keeping, event, names

from holdfast import events
from holdfast.errors import UsageError
from holdfast.events import Event, JobEvents
from holdfast.observe.events import destinations

if TYPE_CHECKING:
    from pathlib import Path


def lines_in(folder: Path) -> list[Event]:
    lines = [line for path in folder.iterdir() for line in path.read_text().splitlines()]
    return [Event.deserialize(line) for line in lines]


def test_lines_are_written_to_the_folder_of_the_job(tmp_path: Path) -> None:
    job = JobEvents("jsonl", str(tmp_path))
    job.record(event("a"))
    assert lines_in(tmp_path) == [event("a")]
    job.close()


def test_a_job_without_a_folder_records_nothing() -> None:
    job = JobEvents("jsonl", None)
    job.record(event("a"))
    job.close()


def test_a_configured_handler_gets_the_events_besides(tmp_path: Path) -> None:
    handler = Keeping()
    events.configure(handler)
    for _ in range(2):  # It serves one job after the other.
        job = JobEvents("jsonl", str(tmp_path))
        job.record(event("a"))
        job.close()
    assert handler.got == [event("a")] * 2 == lines_in(tmp_path)
    assert handler.calls == ["flush"] * 2


def test_null_means_whatever_is_configured_besides_the_lines(tmp_path: Path) -> None:
    handler = Keeping()
    for name in ("a", "b"):
        job = JobEvents("null", str(tmp_path))
        job.record(event(name))
        job.close()
        events.configure(handler)
    assert names(handler.got) == ["b"]
    assert names(lines_in(tmp_path)) == ["a", "b"]


def test_a_destination_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = JobEvents("console", str(tmp_path))
    job.record(event("a"))
    job.close()
    assert capsys.readouterr().err == event("a").serialize() + "\n"
    with pytest.raises(UsageError, match="'unheard of' is unknown"):
        JobEvents("unheard of", str(tmp_path))


def test_lines_can_be_configured_to_go_elsewhere(tmp_path: Path) -> None:
    handler = Keeping()
    events.configure(handler, "jsonl")
    job = JobEvents("jsonl", str(tmp_path))
    job.record(event("a"))
    job.close()
    assert names(handler.got) == ["a"]
    assert destinations.is_configured("jsonl")
    assert list(tmp_path.iterdir()) == []
