from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from holdfast import plugins
from holdfast.cli import main
from holdfast.errors import CannotStart, EnvironmentProblem, InternalError, PluginError
from holdfast.processes.failures.failure import ChildFailedError, ProcessFailure
from holdfast.processes.signals import SignalException

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOLDFAST = [sys.executable, "-m", "holdfast"]


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.fixture
def job_ends(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | None], None]:
    """Let every launched job end in this way."""

    def arrange(ending: BaseException | None) -> None:
        # A function of this module would count as the code of others.
        launch = Mock(return_value=Mock(side_effect=ending))
        monkeypatch.setattr("holdfast.cli.run_command.elastic_launch", launch)

    return arrange


def worker_failed(exitcode: int) -> ChildFailedError:
    failure = ProcessFailure(local_rank=0, pid=4711, exitcode=exitcode, error_file="none")
    return ChildFailedError("train.py", {0: failure})


def kind_of(value: object) -> str:
    """Name a case. The text of a failure contains the time, but a test's name must not change."""
    return str(value) if isinstance(value, (int, str)) else type(value).__name__


ENDINGS = [
    (None, 0, 0),
    (worker_failed(7), 7, 1),
    (worker_failed(2), 2, 1),
    (worker_failed(-signal.SIGSEGV), 139, 1),
    (SignalException("stopped", signal.SIGTERM), 143, 1),
    (KeyboardInterrupt(), 130, 1),
    (CannotStart("no such program"), 127, 1),
    (CannotStart("not executable", exit_code=126), 126, 1),
    (EnvironmentProblem("no space"), 78, 1),
    (InternalError("impossible"), 70, 1),
    (RuntimeError("a bug"), 70, 1),
    (PluginError("the plug-in failed"), 78, 1),
    (SystemExit(3), 3, 3),
    (SystemExit("why"), 1, 1),
]


@pytest.mark.parametrize(("ending", "code", "compat_code"), ENDINGS, ids=kind_of)
def test_exit_code_shows_how_the_job_ended(
    ending: BaseException | None,
    code: int,
    compat_code: int,
    job_ends: Callable[[BaseException | None], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_ends(ending)
    assert main.run_command(["train.py"]) == code
    assert main.run_command(["--exit-code-compat", "train.py"]) == compat_code
    monkeypatch.setenv("PET_EXIT_CODE_COMPAT", "1")
    assert main.run_command(["train.py"]) == compat_code


@pytest.mark.parametrize(
    ("ending", "shown"),
    [
        (worker_failed(7), "4711"),
        (CannotStart("no such program", hint="see PATH"), "no such program (see PATH)"),
        (SignalException("x", signal.SIGHUP), "SIGHUP"),
        (RuntimeError("a bug"), "RuntimeError: a bug"),
    ],
    ids=kind_of,
)
def test_stderr_explains_how_the_job_ended(
    ending: BaseException,
    shown: str,
    job_ends: Callable[[BaseException | None], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    job_ends(ending)
    main.run_command(["train.py"])
    out, err = capsys.readouterr()
    assert out == ""
    assert shown in err
    assert ("Traceback" in err) is isinstance(ending, RuntimeError)


class Refusal(Exception):
    """An error of a plug-in, which this module represents."""


@pytest.mark.parametrize(
    ("problem", "code", "shown"),
    [
        (Refusal("no licence"), 78, "failed: Refusal: no licence"),
        (SystemExit(3), 3, "ended this command"),
    ],
    ids=kind_of,
)
def test_exception_of_a_plug_in_is_not_a_bug_of_holdfast(
    problem: BaseException,
    code: int,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def launch(**_: object) -> None:
        raise problem

    monkeypatch.setattr("holdfast.cli.run_command.elastic_launch", launch)
    monkeypatch.setattr(plugins, "_in_use", {})
    plugins.note("rendezvous", SimpleNamespace(name="mine", value=f"{__name__}:launch"))
    assert main.run_command(["train.py"]) == code
    err = capsys.readouterr().err
    assert err.splitlines()[-1].endswith(
        f"error: the rendezvous plug-in 'mine' ({__name__}:launch) {shown}"
    )


def test_unexplained_exception_names_the_plug_ins_in_use(
    job_ends: Callable[[BaseException | None], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plugins, "_in_use", {"other": "the logs specs plug-in 'flat' (other:Flat)"})
    job_ends(RuntimeError("odd"))
    assert main.run_command(["train.py"]) == 70
    assert "bug in Holdfast, or in the logs specs plug-in 'flat'" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["", "--bogus x", "--max-restarts x x", "--nnodes x x"])
def test_wrong_command_line_exits_with_2_even_with_exit_code_compat(words: str) -> None:
    assert main.run_command(["--exit-code-compat", *words.split()]) == 2


def test_python_m_holdfast_run_has_the_same_exit_codes() -> None:
    command = [sys.executable, "-m", "holdfast.run", "trian.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 127
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"]])
def test_closed_pipe_is_not_a_failure(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([*HOLDFAST, *words], stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_closed_standard_streams_are_not_a_failure() -> None:
    command = f"{sys.executable} -m holdfast run trian.py >&- 2>&-"
    assert subprocess.run(["sh", "-c", command]).returncode == 127


def test_python_optimization_flag_changes_nothing() -> None:
    command = [sys.executable, "-OO", "-m", "holdfast", "run", "--nnodes", "0", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--nnodes: '0' " in done.stderr
