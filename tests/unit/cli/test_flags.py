from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from holdfast.cli.flags import FLAGS, Flag, build_parser

if TYPE_CHECKING:
    from argparse import Namespace

OWN_FLAGS = {
    "--exit-barrier-timeout",
    "--exit-code-compat",
    "--no-capture-stderr",
    "--metrics-addr",
    "--story",
    "--metrics-port",
    "--preload",
    "--spares",
    "--stop-signal",
    "--worker-store",
}
NO_VARIABLE = {"--logs-specs", "--numa-binding"}
SWITCHES = [flag for flag in FLAGS if not flag.metavar]
VALUED = [flag for flag in FLAGS if flag.metavar]

# A value that each flag accepts, as text, and what the namespace then holds.
SAMPLES: dict[str, tuple[str, object]] = {
    "--metrics-port": ("9100", 9100),
    "--duplicate-stderr-filters": ("a,,b,c", ["a,b", "c"]),
    "--duplicate-stdout-filters": ("a", ["a"]),
    "--exit-barrier-timeout": ("2.5", 2.5),
    "--master-port": ("29501", 29501),
    "--max-restarts": ("3", 3),
    "--monitor-interval": ("0.5", 0.5),
    "--node-rank": ("2", 2),
    "--numa-binding": ("core-complex", "core-complex"),
    "--shutdown-timeout": ("7", 7),
    "--spares": ("1", 1),
    "--start-method": ("fork", "fork"),
}


def sample(flag: Flag) -> tuple[str, object]:
    return SAMPLES.get(flag.name, ("text", "text"))


def name_of(flag: Flag) -> str:
    return flag.name


def parse(*words: str) -> Namespace:
    return build_parser().parse_args(words)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the only line that a wrong command line is answered with."""
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.rstrip("\n")


@pytest.mark.torch
def test_every_flag_of_torchrun_is_here_with_the_same_default() -> None:
    from torch.distributed.run import get_args_parser

    theirs = {
        spelling: action.default
        for action in get_args_parser()._actions
        for spelling in action.option_strings
    }
    ours = {
        spelling: action.default
        for action in build_parser()._actions
        for spelling in action.option_strings
    }
    assert set(theirs) <= set(ours)
    assert {spelling: ours[spelling] for spelling in theirs} == theirs
    added = {spelling for spelling in ours if spelling not in theirs and "_" not in spelling}
    assert added == OWN_FLAGS


@pytest.mark.torch
def test_the_namespace_of_torchrun_is_within_ours() -> None:
    from torch.distributed.run import parse_args

    theirs = vars(parse_args(["train.py", "--x"]))
    ours = vars(parse("train.py", "--x"))
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize("flag", VALUED, ids=name_of)
def test_a_value_in_every_spelling(flag: Flag) -> None:
    text, expected = sample(flag)
    for spelling in flag.spellings:
        assert getattr(parse(spelling, text, "train.py"), flag.dest) == expected
    for spelling in (flag.name, f"--{flag.dest}"):
        assert getattr(parse(f"{spelling}={text}", "train.py"), flag.dest) == expected


@pytest.mark.parametrize("flag", SWITCHES, ids=name_of)
def test_a_switch_in_every_spelling(flag: Flag) -> None:
    assert getattr(parse("train.py"), flag.dest) is False
    for spelling in flag.spellings:
        assert getattr(parse(spelling, "train.py"), flag.dest) is True


@pytest.mark.parametrize(
    "flag", [flag for flag in VALUED if flag.name not in NO_VARIABLE], ids=name_of
)
def test_a_variable_gives_the_default_and_the_command_line_wins(
    flag: Flag, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, expected = sample(flag)
    monkeypatch.setenv(flag.variable, text)
    assert getattr(parse("train.py"), flag.dest) == expected
    monkeypatch.setenv(flag.variable, "not the value that is used")
    assert getattr(parse(flag.name, text, "train.py"), flag.dest) == expected


@pytest.mark.parametrize("flag", SWITCHES, ids=name_of)
def test_a_variable_turns_a_switch_on(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flag.variable, "1")
    assert getattr(parse("train.py"), flag.dest) is True
    monkeypatch.setenv(flag.variable, "0")
    assert getattr(parse("train.py"), flag.dest) is False


@pytest.mark.parametrize("name", sorted(NO_VARIABLE))
def test_flags_that_no_variable_sets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = next(flag for flag in FLAGS if flag.name == name)
    monkeypatch.setenv(flag.variable, "node")
    assert getattr(parse("train.py"), flag.dest) is None


@pytest.mark.parametrize(
    ("variable", "text", "accepted"),
    [
        ("PET_MAX_RESTARTS", "abc", "a whole number from 0"),
        ("PET_MAX_RESTARTS", "", "a whole number from 0"),
        ("PET_START_METHOD", "zzz", "spawn, fork, forkserver"),
        ("PET_STANDALONE", "maybe", "1 or 0, true or false"),
        ("PET_MASTER_PORT", "70000", "a whole number from 0 to 65535"),
        ("PET_SHUTDOWN_TIMEOUT", "-1", "seconds from 0, such as 30 or 2.5"),
    ],
)
def test_a_bad_variable_is_named_but_never_breaks_help(
    variable: str,
    text: str,
    accepted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, text)
    line = refusal(capsys, "train.py")
    assert line.startswith(f"holdfast run: error: {variable}: {text!r} ")
    assert line.endswith(f"; accepted: {accepted}")
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0


def test_variables_are_read_when_the_parser_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "3")
    parser = build_parser()
    monkeypatch.delenv("PET_NNODES")
    assert parser.parse_args(["train.py"]).nnodes == "3"
    assert parse("train.py").nnodes == "1:1"


def test_filters_of_two_parses_are_separate_lists() -> None:
    parse("train.py").duplicate_stdout_filters.append("x")
    assert parse("train.py").duplicate_stdout_filters == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-restarts", "-1"), "--max-restarts: '-1' cannot be used; accepted: a whole number"),
        (("--max_restarts=x",), "--max-restarts: 'x' cannot be used; accepted: a whole number"),
        (("--monitor-interval", "0"), "--monitor-interval: '0' is not an interval"),
        (("--start-method", "zzz"), "--start-method: 'zzz' cannot be used; accepted: spawn, fork"),
        (("--numa-binding", "zzz"), "--numa-binding: 'zzz' cannot be used; accepted: node, socket"),
        (("--shutdown-timeout", "-5"), "--shutdown-timeout: '-5' is not a time"),
    ],
)
def test_a_wrong_value_is_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, *words, "train.py")
    assert line.startswith(f"holdfast run: error: {message}")


def test_help_is_grouped_shows_each_flag_once_and_ends_with_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        parse("-h")
    assert caught.value.code == 0
    text, err = capsys.readouterr()
    assert err == ""
    shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, flags=re.MULTILINE)
    assert sorted(shown) == sorted([*(flag.name for flag in FLAGS), "--help"])
    groups = re.findall(r"^(\w[\w ]+):$", text, flags=re.MULTILINE)
    assert groups == [*dict.fromkeys(flag.group for flag in FLAGS), "Other", "Examples"]
    assert text.index("Examples:") > text.index("--help")
    assert max(map(len, text.splitlines())) <= 82


def test_the_examples_of_the_help_are_command_lines_that_parse(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    told = capsys.readouterr().out.replace("\\\n", "")
    examples = re.findall(r"^    holdfast run (.+)$", told, flags=re.MULTILINE)
    assert len(examples) == 7
    for example in examples:
        assert parse(*example.split()).training_script
