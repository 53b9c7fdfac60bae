"""`--preload` on real command lines: which modules workers then find imported, and what is said."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from real_jobs import HOLDFAST

if TYPE_CHECKING:
    from pathlib import Path

# Two modules of the standard library that nothing else here imports, and one of the person's own.
WORKER = """
import sys
told = [name for name in ("wave", "chunk_of_mine", "filecmp") if name in sys.modules]
import wave
import chunk_of_mine
def main():
    import filecmp
sys.stdout.write(" ".join(["there already:", *told]) + "\\n")  # One write: two share it.
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "PYTHON_EXEC", "LOGLEVEL", "PET_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "chunk_of_mine.py").touch()


def run(*words: str, **variables: str) -> tuple[int, list[str], list[str]]:
    """Run a job; return its exit code and the lines of its output and of its messages."""
    done = subprocess.run(
        [*HOLDFAST, "run", *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.parametrize("program", [("worker.py",), ("-m", "worker"), ("--run-path", "worker.py")])
def test_auto_imports_what_is_installed_and_nothing_of_ones_own(program: tuple[str, ...]) -> None:
    code, out, err = run("--nproc-per-node", "2", "--preload", "auto", *program)
    assert (code, out) == (0, ["there already: wave"] * 2), err
    assert err == []


def test_names_are_imported_as_well_and_may_be_ones_own() -> None:
    code, out, err = run("--preload", "auto,filecmp,chunk_of_mine", "worker.py")
    assert (code, out) == (0, ["there already: wave chunk_of_mine filecmp"]), err


def test_the_variable_does_the_same_and_what_auto_finds_is_told_of() -> None:
    code, out, err = run("worker.py", PET_PRELOAD="auto", LOGLEVEL="INFO")
    assert (code, out) == (0, ["there already: wave"])
    assert "[holdfast] --preload auto finds in worker.py: wave" in err


def test_where_auto_finds_nothing_the_job_runs_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("print('ran')")
    code, out, err = run("--preload", "auto", "app")
    assert (code, out) == (0, ["ran"])
    assert err == ["[holdfast] --preload auto finds no modules: app is a folder"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--preload", "my-module", "worker.py"), "--preload: 'my-module' is not the name of a mo"),
        (("--preload", "wave", "--no-python", "true"), "--preload: "),
    ],
)
def test_what_cannot_work_is_one_line(words: tuple[str, ...], told: str) -> None:
    code, out, err = run(*words)
    assert (code, out, len(err)) == (2, [], 1)
    assert told in err[0]
