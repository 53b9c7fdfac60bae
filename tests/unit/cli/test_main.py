from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import __version__
from holdfast.cli import main
from holdfast.errors import CannotStart, EnvironmentProblem, InternalError
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
        def launch(config: Any, entrypoint: Any) -> Callable[..., None]:
            def call(*args: Any) -> None:
                if ending is not None:
                    raise ending

            return call

        fake = ModuleType("holdfast.launcher.launch")
        fake.elastic_launch = launch  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, fake.__name__, fake)

    return arrange


def worker_failed(exitcode: int) -> ChildFailedError:
    failure = ProcessFailure(local_rank=0, pid=4711, exitcode=exitcode, error_file="none")
    return ChildFailedError("train.py", {0: failure})


def kind_of(value: object) -> str:
    """Name a case; the text of a failure has the time in it, and names must not change."""
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
]


@pytest.mark.parametrize(("ending", "code", "compat_code"), ENDINGS, ids=kind_of)
def test_exit_code(
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


@pytest.mark.parametrize("compat", [[], ["--exit-code-compat"]])
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--bogus", "x"],
        ["--max-restarts", "x", "x"],
        ["--nnodes", "x", "x"],
        ["--spares", "x", "x"],
    ],
)
def test_a_wrong_command_line_is_2_and_one_line(
    words: list[str], compat: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run_command([*compat, *words, *(["train.py"] if words else [])]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("holdfast run: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("ending", "line"),
    [
        (CannotStart("no such program", hint="see PATH"), "error: no such program (see PATH)"),
        (SignalException("x", signal.SIGHUP), "stopped by SIGHUP (terminal closed)"),
        (KeyboardInterrupt(), "interrupted"),
    ],
    ids=kind_of,
)
def test_endings_that_are_one_line(
    ending: BaseException,
    line: str,
    job_ends: Callable[[BaseException | None], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    job_ends(ending)
    main.run_command(["train.py"])
    assert capsys.readouterr().err == f"holdfast run: {line}\n"


def test_a_failed_worker_is_reported(
    job_ends: Callable[[BaseException | None], None], capsys: pytest.CaptureFixture[str]
) -> None:
    job_ends(worker_failed(7))
    main.run_command(["train.py"])
    out, err = capsys.readouterr()
    assert out == ""
    assert "4711" in err
    assert "Traceback" not in err


def test_a_bug_is_shown_with_its_traceback(
    job_ends: Callable[[BaseException | None], None], capsys: pytest.CaptureFixture[str]
) -> None:
    job_ends(RuntimeError("a bug"))
    main.run_command(["train.py"])
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "RuntimeError: a bug" in err
    assert err.endswith("this is a bug in Holdfast; please report it\n")


def test_exit_codes_of_system_exit(capsys: pytest.CaptureFixture[str]) -> None:
    assert [main._code_of(SystemExit(code)) for code in (None, 0, 3)] == [0, 0, 3]
    assert main._code_of(SystemExit("why")) == 1
    assert capsys.readouterr().err == "why\n"


def holdfast(*words: str, **options: Any) -> tuple[int, str, str]:
    done = subprocess.run([*HOLDFAST, *words], capture_output=True, text=True, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_overview(words: tuple[str, ...]) -> None:
    code, out, err = holdfast(*words)
    assert (code, err) == (0, "")
    assert all(f"\n  {verb} " in out for verb in main.VERBS)


def test_version() -> None:
    assert holdfast("--version") == (0, f"holdfast {__version__}\n", "")


def test_an_unknown_verb_names_the_known_ones() -> None:
    code, out, err = holdfast("jump")
    known = "run, coordinator, dump, story, simulate"
    assert (code, out, err) == (2, "", f"holdfast: error: 'jump' is not a verb; verbs: {known}\n")


@pytest.mark.parametrize("word", ["train.py", "--nproc-per-node"])
def test_a_forgotten_verb_is_suggested(word: str) -> None:
    code, _, err = holdfast(word)
    assert code == 2
    assert err.endswith(f"; did you mean holdfast run {word}?\n")


def test_help_of_run() -> None:
    code, out, err = holdfast("run", "--help", env={**os.environ, "PET_MAX_RESTARTS": "x"})
    assert (code, err) == (0, "")
    assert out.startswith("usage: holdfast run ")


def test_the_module_path_of_run_has_the_same_exit_codes() -> None:
    command = [sys.executable, "-m", "holdfast.run", "trian.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 127
    assert done.stderr == "holdfast run: error: 'trian.py': there is no such script\n"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"]])
def test_a_reader_that_went_away_is_no_failure(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([*HOLDFAST, *words], stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_closed_streams_are_no_failure() -> None:
    command = f"{sys.executable} -m holdfast run trian.py >&- 2>&-"
    assert subprocess.run(["sh", "-c", command]).returncode == 127


def test_optimised_python_makes_no_difference() -> None:
    command = [sys.executable, "-OO", "-m", "holdfast", "run", "--nnodes", "0", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("holdfast run: error: --nnodes: '0' ")


def test_the_command_line_is_read_without_heavy_modules() -> None:
    heavy = {
        "asyncio", "importlib.metadata", "json", "logging", "numpy", "shutil", "subprocess",
        "tempfile", "torch", "uuid",
    }  # fmt: skip
    program = (
        "import sys; from holdfast.cli.run import config_from_args, parse_args; "
        "config_from_args(parse_args(['--nproc-per-node', '2', 'train.py'])); "
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert heavy & set(done.stdout.split()) == set()
