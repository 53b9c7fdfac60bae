"""`holdfast simulate`: what it prints, and its exit codes."""

from __future__ import annotations

import pytest

from holdfast.cli import simulate as verb
from holdfast.core.rounds import Rounds


def test_a_run_in_which_all_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.command(["--seed", "3", "--nodes", "3", "--minutes", "1.3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 run, ")
    assert out.endswith("every invariant held\n")


def test_the_story_is_told_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.command(["--seed", "3", "--nodes", "3", "--profile", "calm", "--story"]) == 0
    out = capsys.readouterr().out
    assert "coordinator 1     is there" in out
    assert "ends: succeeded" in out


def test_a_violation_is_shown_with_the_command_that_shows_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rounds, "_retire", lambda *_args, **_more: None)
    found = verb.command(["--seeds", "1:50", "--nodes", "4", "--profile", "partitions"])
    assert found == verb.VIOLATED
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= verb.STORY_LINES + 2
    assert "VIOLATION" in lines[-3]
    assert "FencedStaysOut does not hold" in lines[-2]
    command = lines[-1].removeprefix("see it again: holdfast simulate ").split()
    assert verb.command(command) == verb.VIOLATED
    assert "FencedStaysOut does not hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    ["--seed x", "--seeds 5", "--seeds 5:1", "--nodes 0", "--minutes nan", "--minutes soon",
     "--profile rain", "--seeds 1:2 --seed 1", "--speed"],
)  # fmt: skip
def test_bad_flags_get_one_line(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.command(flags.split()) == 2
    err = capsys.readouterr().err
    assert flags.split(maxsplit=1)[0] in err
    assert err.count("\n") == 1
