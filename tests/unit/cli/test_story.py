"""`holdfast story`: merges the files of several agents into one listing, in the order of causes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from holdfast.cli.main import dispatch
from holdfast.cli.story_command import read
from holdfast.core.machine import Event, Story
from holdfast.errors import UsageError
from holdfast.launcher.story_file import StoryFile
from other_users import STRANGER

if TYPE_CHECKING:
    from pathlib import Path

A = """\
a/supervision#1\t\trunning\tWorkerExited\tReportStatus
a/session#1\ta/supervision#1\tup\tStatusChanged\tSend(message=a/status#4[failed])
a/session#2\ta/view#1.2\tup\ta/view#1.2[member]\tDeliverView(view=a/view#1.2[member])
a/supervision#2\ta/view#1.2\tstopping\tViewReceived(view=a/view#1.2[member])\t
"""
B = """\
b/session#1\tb/view#1.2\tup\tb/view#1.2[member]\tDeliverView(view=b/view#1.2[member])
b/supervision#1\tb/view#1.2\trunning\tViewReceived(view=b/view#1.2[member])\tStopWorkers
b/supervision#2\t\tstopping\tSignalReceived\t
"""
HEAD = """\
head/job/rounds#1\ta/status#4\tactive\ta/status#4[failed]\ta/view#1.2[member], b/view#1.2[member]
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Return the paths of three files, not in the order of time."""
    for name, text in (("a", A), ("b", B), ("head", HEAD)):
        (tmp_path / name).write_text(text + "not a step\n")
    return [str(tmp_path / name) for name in ("b", "head", "a")]


def steps(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert dispatch(["story", *argv]) == 0
    return [line.split()[0].rstrip(":") for line in capsys.readouterr().out.splitlines()]


def test_steps_come_after_their_causes(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    listed = steps(capsys, *files)
    assert len(listed) == 8
    chain = ["a/supervision#1", "a/session#1", "head/job/rounds#1", "b/session#1"]
    places = [listed.index(one) for one in [*chain, "b/supervision#1", "b/supervision#2"]]
    assert places == sorted(places)


def test_story_shows_causes_and_effects_of_a_step(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    after = steps(capsys, "--from", "a/supervision#1", *files)
    assert len(after) == 7
    assert "b/supervision#2" not in after
    before = steps(capsys, "--why", "b/supervision#1", *files)
    assert before == [
        "a/supervision#1", "a/session#1", "head/job/rounds#1", "b/session#1", "b/supervision#1",
    ]  # fmt: skip


def test_causes_of_a_restarted_agent_are_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = "a/supervision#1\t\tjoining\tBegun\tFirst\na/session#1\ta/supervision#1\tup\tTick\t\n"
    (tmp_path / "a").write_text(first + first.replace("First", "Second"))
    assert dispatch(["story", "--why", "a/session#1", str(tmp_path / "a")]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "a/supervision#1", "a/session#1",
    ]  # fmt: skip
    assert dispatch(["story", "--from", "a/supervision#1", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert "Second" in printed
    assert "First" not in printed


@pytest.mark.parametrize("step", ["nobody/supervision#1", "supervision#1"])
def test_step_id_must_match_one_step(files: list[str], step: str) -> None:
    assert dispatch(["story", "--from", step, *files]) == 2


def test_missing_story_file_is_refused(tmp_path: Path) -> None:
    assert dispatch(["story", str(tmp_path / "none")]) == 2
    with pytest.raises(UsageError, match="--story"):
        StoryFile(str(tmp_path / "no" / "folder"), source="--story")


def test_file_without_steps_is_refused(files: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('a\\tb')\n")
    with pytest.raises(UsageError, match=r"train\.py"):
        read([*files, str(script)])


def test_machines_write_steps_while_story_file_is_entered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "story")
    one, other = Story("supervision", node="n1"), Story("session", node="n1")
    one.record(0.0, None, Event(), [])
    with StoryFile(path, source="--story"):
        one.record(1.0, None, Event(), [])
        other.record(1.0, None, Event(), [], cause=one.last)
    one.record(2.0, None, Event(), [])
    assert steps(capsys, path) == ["n1/supervision#2", "n1/session#1"]
    assert os.stat(path).st_mode & 0o777 == 0o600  # Errors of workers may contain secrets.


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_story_is_not_written_to_a_file_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "story"
    path.touch(0o666)
    os.chown(path, STRANGER, -1)
    with pytest.raises(UsageError, match="belongs to another user"):
        StoryFile(str(path), source="--story")


def test_story_output_has_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs").write_text("n/rounds#1\t\t\tSaid(\x1b[2J\u202e)\t\n")
    assert dispatch(["story", str(tmp_path / "theirs")]) == 0
    assert capsys.readouterr().out == "n/rounds#1: Said(\\x1b[2J\\u202e) -> nothing\n"
