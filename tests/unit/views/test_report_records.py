"""Timelines in log directories: truncated, rotated, of several jobs, and with hostile links and paths."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import recorded_runs
from holdfast.cli import main
from holdfast.errors import UsageError
from holdfast.observe import lifecycle
from holdfast.observe.events.event_handlers import LogDirectoryHandler
from holdfast.observe.timeline import TimelineRecorder
from holdfast.views.report import records
from holdfast.views.report.html import render
from holdfast.views.report.model import describe
from timelines import Timeline, one_restart

if TYPE_CHECKING:
    from pathlib import Path


def test_truncated_timeline_has_a_report(tmp_path: Path) -> None:
    path = one_restart().write(tmp_path)
    data = path.read_bytes()
    first_line = data.index(b"\n") + 1
    for length in range(first_line, len(data), 97):
        path.write_bytes(data[:length])
        [run] = records.read([str(tmp_path)])
        records.read_other_files(run)
        assert run.unreadable == 0, "an incomplete last line does not count"
        assert render(describe([run]))


def test_unreadable_line_is_counted_and_skipped() -> None:
    node = one_restart()
    node.lines[3:3] = [b"{\n", b"[]\n", b'{"kind": "new", "at": 1}\n', b'{"at": NaN}\n', b"\xff\n"]
    node.lines.insert(9, b'{"kind": "progress", "at": -5, "generation": 0}\n')
    [run] = node.runs()
    assert run.unreadable == 6
    assert describe([run]).spans == describe(one_restart().runs()).spans


def test_rotated_file_is_read_first(tmp_path: Path) -> None:
    node = one_restart()
    path = node.write(tmp_path)
    path.rename(f"{path}.1")
    path.write_bytes(b"".join(node.lines[10:]))
    (tmp_path / f"{path.name}.1").write_bytes(b"".join(node.lines[:10]))
    [run] = records.read([str(tmp_path)])
    assert sorted(run.generations) == [0, 1]
    assert run.end is not None


def test_rotated_timeline_repeats_what_later_lines_need(tmp_path: Path) -> None:
    """The file is rotated several times during one generation."""
    handler = LogDirectoryHandler(str(tmp_path), file_bytes_max=3000)
    record = TimelineRecorder(handler.record)
    record(recorded_runs.began())
    record(recorded_runs.started(13.0, 0.1, 0))
    for step in range(200):
        record(lifecycle.ProgressSampled(14.0 + step, 0, ((4, step, 14.0 + step),)))
    handler.close()
    assert sum(len(path.read_bytes()) for path in tmp_path.iterdir()) <= 2 * 3000
    [run] = records.read([str(tmp_path)])
    [generation] = describe([run]).generations
    assert generation.last_step == 199


def test_node_has_the_id_that_its_round_gives_it(tmp_path: Path) -> None:
    """Two machines with one host name: one of them got another id after its run had begun."""
    node = Timeline("host", rank=1)
    node.run()
    node.generation(0, 1.0, 1.1, nodes=2, members=("host", "host-2"))
    path = node.write(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data + data.splitlines(keepends=True)[0])  # As at the beginning of a file.
    [run] = records.read([str(tmp_path)])
    assert run.run.node == "host-2"


def test_long_timeline_is_read_at_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_restart().write(tmp_path)
    monkeypatch.setattr(records, "FILE_BYTES_MAX", 4000)
    monkeypatch.setattr(records, "HEAD_BYTES", 1500)
    [run] = records.read([str(tmp_path)])
    assert run.is_cut
    assert run.end is not None
    assert describe([run]).outcome.state == "succeeded"


def test_jobs_below_a_folder_are_ordered_by_age(tmp_path: Path) -> None:
    for name, since in (("a", 0.0), ("b", 500.0)):
        node = Timeline(name)
        node.run(since, run_id=name)
        node.generation(int(since), since + 1.0, since + 2.0)
        node.write(tmp_path / "logs" / f"{name}_1234")
    jobs = records.jobs_in(records.read([str(tmp_path), str(tmp_path / "logs")]))
    assert [[run.run.run_id for run in job] for job in jobs] == [["b"], ["a"]]


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    one_restart().write(tmp_path / "outside")
    inside.mkdir()
    os.symlink(tmp_path / "outside" / "timeline-host-a-1.jsonl", inside / "timeline-x-1.jsonl")
    os.mkfifo(inside / "timeline-x-2.jsonl")
    assert records.read([str(inside)]) == []


def test_log_folder_that_becomes_a_link_is_not_read(tmp_path: Path) -> None:
    node = Timeline()
    node.run()
    node.generation(0, 1.0, 2.0)
    node.write(tmp_path / "logs")
    private = tmp_path / "private" / "1"
    private.mkdir(parents=True)
    (private / "stderr.log").write_text("password\n")
    (tmp_path / "logs" / "attempt_0").symlink_to(tmp_path / "private")
    (tmp_path / "here").symlink_to(tmp_path / "logs")  # The operator's own link is followed.
    [run] = records.read([str(tmp_path / "here")])
    records.read_other_files(run)
    assert describe([run]).tails == []


def test_report_does_not_write_through_a_symlink(tmp_path: Path) -> None:
    one_restart().write(tmp_path / "logs")
    kept = tmp_path / "kept"
    kept.write_text("mine")
    (tmp_path / "logs" / "report.html").symlink_to(kept)
    assert main.dispatch(["report", str(tmp_path / "logs")]) == 2
    assert kept.read_text() == "mine"
    assert main.dispatch(["report", str(tmp_path / "logs"), "--output", str(kept)]) == 0
    assert kept.read_text().startswith("<!DOCTYPE html>")
    assert kept.stat().st_mode & 0o777 == 0o600


def test_report_does_not_write_through_a_symlink_created_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_restart().write(tmp_path / "logs")
    kept, output = tmp_path / "kept", tmp_path / "logs" / "report.html"
    kept.write_text("mine")
    output.symlink_to(kept)
    monkeypatch.setattr(os.path, "islink", lambda _path: False)  # It was not there yet.
    assert main.dispatch(["report", str(tmp_path / "logs")]) == 0
    assert kept.read_text() == "mine"
    assert output.read_text().startswith("<!DOCTYPE html>")


def test_only_logs_of_a_killed_job_are_read(tmp_path: Path) -> None:
    node = Timeline()
    node.run()
    node.generation(0, 1.0, 2.0)
    node.write(tmp_path)
    logs = tmp_path / "attempt_0" / "1"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text("x" * 100_000 + "the end\n")
    [run] = records.read([str(tmp_path)])
    records.read_other_files(run)
    [tail] = describe([run]).tails
    assert (tail.rank, tail.stream) == (1, "stderr")
    assert tail.text.endswith("the end\n")
    assert len(tail.text) == records.TAIL_BYTES


@pytest.mark.parametrize("logs", ["../secrets", "attempt_0/../../secrets"])
def test_folder_outside_the_log_directory_is_not_entered(tmp_path: Path, logs: str) -> None:
    node = Timeline()
    node.run()
    node.generation(0, 1.0, 2.0)
    folder = tmp_path / "job"
    path = node.write(folder)
    path.write_bytes(path.read_bytes().replace(b'"attempt_0"', f'"{logs}"'.encode()))
    (folder / "attempt_0").mkdir()
    (tmp_path / "secrets" / "0").mkdir(parents=True)
    (tmp_path / "secrets" / "0" / "stderr.log").write_text("secret")
    [run] = records.read([str(folder)])
    records.read_other_files(run)
    assert run.tails == {}


@pytest.mark.parametrize("name", ["nothing", "file", "empty"])
def test_folder_without_a_timeline_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        records.read([str(tmp_path / name)])
