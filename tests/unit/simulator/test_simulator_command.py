"""`python -m simulator`: its output and exit codes."""

from __future__ import annotations

import pytest

from holdfast.core.rounds import Rounds
from simulator import __main__ as command_line


def test_run_without_violation_exits_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--seed", "3", "--nodes", "3", "--minutes", "1.3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 run, ")
    assert out.endswith("every invariant held\n")


def test_seconds_limit_the_real_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--seed", "5", "--seconds", "0.2"]) == 0
    assert "every invariant held" in capsys.readouterr().out


def test_story_flag_prints_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--seed", "3", "--nodes", "3", "--profile", "calm", "--story"]) == 0
    out = capsys.readouterr().out
    assert "coordinator 1     starts" in out
    assert "ends: succeeded" in out


def test_violation_prints_the_command_that_repeats_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rounds, "_retire", lambda *_args, **_more: None)
    found = command_line.main(["--seeds", "1:50", "--nodes", "4", "--profile", "partitions"])
    assert found == command_line.VIOLATED
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= command_line.STORY_LINES + 2
    assert "VIOLATION" in lines[-3]
    assert "FencedStaysOut does not hold" in lines[-2]
    command = lines[-1].removeprefix("repeat it with: python -m simulator ").split()
    assert command_line.main(command) == command_line.VIOLATED
    assert "FencedStaysOut does not hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    ["--seed x", "--seeds 5", "--seeds 5:1", "--nodes 0", "--minutes nan", "--minutes soon",
     "--profile rain", "--seeds 1:2 --seed 1", "--speed"],
)  # fmt: skip
def test_error_names_the_bad_flag(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(flags.split()) == 2
    err = capsys.readouterr().err
    assert flags.split(maxsplit=1)[0] in err.splitlines()[-1]
