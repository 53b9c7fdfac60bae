from __future__ import annotations

import pytest

from holdfast.processes.zygote.client import PythonCommand, parse_command


@pytest.mark.parametrize(
    ("line", "flags", "kind", "what", "args"),
    [
        ("train.py", "", "script", "train.py", ""),
        ("-u train.py -u -m x", "-u", "script", "train.py", "-u -m x"),
        ("-u -m pkg.train --lr 1", "-u", "m", "pkg.train", "--lr 1"),
        ("-mpkg.train", "", "m", "pkg.train", ""),
        ("-c pass -x", "", "c", "pass", "-x"),
        ("-uOO -Wignore train.py", "-u -O -O -W ignore", "script", "train.py", ""),
        ("-W error -X dev -Xutf8 train.py", "-W error -X dev -X utf8", "script", "train.py", ""),
        ("-IBmtrain 1", "-I -B", "m", "train", "1"),
        ("-bEsSPdqR -cpass", "-b -E -s -S -P -d -q -R", "c", "pass", ""),
    ],
)
def test_commands_are_taken_apart(line: str, flags: str, kind: str, what: str, args: str) -> None:
    command = parse_command(["python", *line.split()])
    expected = tuple(flags.split()), kind, what, tuple(args.split())
    assert command == PythonCommand("python", *expected)


@pytest.mark.parametrize(
    "line",
    ["", "-", "-u -", "-i train.py", "-ui train.py", "--version", "-V", "-- train.py",
     "-x train.py", "-u", "-m", "-c", "-W", "-X", "--check-hash-based-pycs always train.py",
     "-Z train.py"],
)  # fmt: skip
def test_what_is_not_surely_understood_is_left_alone(line: str) -> None:
    assert parse_command(["python", *line.split()]) is None
