from __future__ import annotations

import os
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from holdfast.cli.flags import build_parser
from holdfast.cli.script import (
    check_can_start,
    get_use_env,
    parse_preload,
    run_script_path,
    worker_command,
)
from holdfast.errors import CannotStart, UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path


@pytest.fixture(autouse=True)
def _our_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHON_EXEC", raising=False)


@pytest.fixture
def _unprivileged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge access by the mode bits alone: root, who may run the tests, may read everything."""
    bits = {os.R_OK: 0o444, os.X_OK: 0o111}
    monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & bits[mode]))


def parse(*words: str) -> Namespace:
    return build_parser().parse_args(words)


def refusal(*words: str) -> tuple[int, str]:
    with pytest.raises(CannotStart) as caught:
        check_can_start(parse(*words))
    assert "\n" not in str(caught.value)
    return caught.value.exit_code, str(caught.value)


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (("train.py", "a", "--b"), [sys.executable, "-u", "train.py", "a", "--b"]),
        (("-m", "pkg.mod", "a"), [sys.executable, "-u", "-m", "pkg.mod", "a"]),
        (("--no-python", "./prog", "-x"), ["./prog", "-x"]),
        (("-", "a"), [sys.executable, "-u", "-", "a"]),
    ],
)
def test_command_of_a_worker(words: tuple[str, ...], argv: list[str]) -> None:
    program, args = worker_command(parse(*words))
    assert [program, *args] == argv


@pytest.mark.parametrize("others", [(), ("-m",), ("--no-python",), ("-m", "--no-python")])
def test_run_path_beats_the_other_ways(others: tuple[str, ...]) -> None:
    program, args = worker_command(parse("--run-path", *others, "train.py", "a"))
    assert (program, args) == (run_script_path, ["train.py", "a"])


def test_a_module_needs_python() -> None:
    with pytest.raises(UsageError, match=r"^--no-python: cannot be used with --module"):
        worker_command(parse("--no-python", "-m", "pkg.mod"))


def test_the_interpreter_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert worker_command(parse("train.py"))[0] == "/opt/python"
    monkeypatch.setenv("PYTHON_EXEC", "")
    assert worker_command(parse("train.py"))[0] == sys.executable


def test_the_old_local_rank_argument_comes_first() -> None:
    args = parse("train.py", "a")
    assert get_use_env(args) is True
    args.use_env = False
    assert get_use_env(args) is False
    assert worker_command(args)[1] == ["-u", "train.py", "--local-rank=${local_rank}", "a"]


@pytest.mark.parametrize(
    "others",
    [
        ("train.py",),
        ("-m", "pkg.mod"),
        ("--start-method", "fork", "train.py"),  # It is about functions, and this is none.
        ("--run-path", "train.py"),
        ("--run-path", "--no-python", "train.py"),
    ],
)
def test_modules_to_preload(others: tuple[str, ...]) -> None:
    assert parse_preload(parse("--preload", "auto,torch", *others)) == ("auto", "torch")
    assert parse_preload(parse(*others)) == ()


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        (("--no-python", "./prog"), "--preload: cannot be used with --no-python: only workers"),
        (
            ("--run-path", "--start-method", "fork", "train.py"),
            "--preload: 'torch' contradicts --start-method fork; accepted: --start-method spawn",
        ),
        (
            ("--run-path", "--start-method", "forkserver", "train.py"),
            "--preload: 'torch' contradicts --start-method forkserver; accepted",
        ),
    ],
)
def test_workers_that_cannot_be_forked_after_imports(
    others: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=f"^{problem}") as caught:
        parse_preload(parse("--preload", "torch", *others))
    assert "\n" not in str(caught.value)
    assert parse_preload(parse(*others)) == ()
    monkeypatch.setenv("PET_PRELOAD", "torch")
    with pytest.raises(UsageError, match=r"^PET_PRELOAD: "):
        parse_preload(parse(*others))


def test_run_script_path_is_a_main_program_with_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    seen = tmp_path / "seen"
    script.write_text(
        "import pathlib, sys\n"
        f"pathlib.Path({str(seen)!r}).write_text(f'{{__name__}} {{sys.argv}}')\n"
    )
    monkeypatch.setattr(sys, "argv", ["before"])
    run_script_path(str(script), "a", "b")
    assert seen.read_text() == f"__main__ {[str(script), 'a', 'b']}"


def test_what_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").touch()
    with zipfile.ZipFile("app.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    for script in ("train.py", str(tmp_path / "train.py"), "folder", "app.zip"):
        check_can_start(parse(script))
        check_can_start(parse("--run-path", script))
    check_can_start(parse("-"))
    check_can_start(parse("--", "-c", "pass"))
    check_can_start(parse("-m", "no.such.module"))
    check_can_start(parse("--no-python", "sh", "-c", "true"))
    check_can_start(parse("--no-python", sys.executable))


@pytest.mark.parametrize("flags", [(), ("--run-path",)])
def test_a_script_that_is_not_there(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(*flags, "trian.py") == (127, "'trian.py': there is no such script")
    os.symlink("nowhere", "dangling.py")
    assert refusal(*flags, "dangling.py") == (127, "'dangling.py': there is no such script")


@pytest.mark.usefixtures("_unprivileged")
def test_a_script_that_cannot_be_read(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch(mode=0o200)
    assert refusal(str(script)) == (126, f"{str(script)!r}: the script cannot be read")


def test_a_folder_without_a_main_program(tmp_path: Path) -> None:
    code, text = refusal(str(tmp_path))
    assert code == 126
    assert text.endswith("a folder can only be run if it has a __main__.py")


def test_a_program_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prog").touch(mode=0o755)
    assert refusal("--no-python", "./gorp") == (127, "'./gorp': there is no such program")
    # As in a shell, the present folder is not searched.
    monkeypatch.setenv("PATH", "/usr/bin")
    assert refusal("--no-python", "prog") == (127, "'prog': there is no such program in PATH")
    assert refusal("--no-python", "")[0] == 127


def test_a_program_in_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, mode in (("a", 0o644), ("b", 0o755)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "prog").touch(mode=mode)
    monkeypatch.setenv("PATH", f"{tmp_path}/a:{tmp_path}/b")
    check_can_start(parse("--no-python", "prog"))
    monkeypatch.setenv("PATH", f"{tmp_path}/a")
    assert refusal("--no-python", "prog") == (126, "'prog': the program is not executable")


def test_a_program_that_cannot_be_executed(tmp_path: Path) -> None:
    prog = tmp_path / "prog"
    prog.touch(mode=0o644)
    assert refusal("--no-python", str(prog)) == (
        126,
        f"{str(prog)!r}: the program is not executable",
    )
    assert refusal("--no-python", str(tmp_path)) == (
        126,
        f"{str(tmp_path)!r}: the program is a folder",
    )


@pytest.mark.parametrize("words", [("train.py",), ("-m", "pkg.mod")])
def test_an_interpreter_that_is_not_there(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PYTHON_EXEC", "/no/python")
    assert refusal(*words) == (127, "PYTHON_EXEC: '/no/python': there is no such program")
    # A program that is not Python needs no interpreter.
    check_can_start(parse("--no-python", "sh"))
