"""The output and exit code of the command for a failed job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from real_jobs import holdfast

if TYPE_CHECKING:
    from pathlib import Path

RAISES = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("the disk is full of cats", file=sys.stderr)
    raise ValueError("no room")
time.sleep(1000)
"""


def ended(folder: Path, *words: str, script: str) -> tuple[int, str]:
    """Run a job; return its exit code and what it wrote to standard error."""
    (folder / "train.py").write_text(script)
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    done = holdfast("run", *words, env={"TMPDIR": str(temporary)}, cwd=folder)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--local-ranks-filter", "0"],
        ["--redirects", "3"],
        ["--tee", "3", "--log-dir", "logs"],
        ["--log-dir", "/dev/null"],
        ["--log-dir", "/dev/null", "--redirects", "3"],
        ["--run-path"],
        ["--run-path", "--start-method", "fork"],
    ],
    ids=" ".join,
)
def test_failure_of_an_undecorated_script_is_reported_in_full(
    tmp_path: Path, flags: list[str]
) -> None:
    code, err = ended(tmp_path, "--nproc-per-node=2", *flags, "train.py", script=RAISES)
    report = err[err.index("=====") :]
    assert code == 1
    assert "Root Cause (first observed failure):" in report
    assert "rank      : 1 (local_rank: 1)" in report
    assert "ValueError: no room" in report
    assert "train.py" in report
    assert "the disk is full of cats" in report
    assert "/dev/null" not in report
    others = [line for line in report.splitlines() if "consequence" in line]
    # As in torchrun, functions that were only stopped are not failures; commands are.
    assert len(others) == ("--run-path" not in flags)
    assert all("rank 0" in other and "SIGTERM" in other for other in others)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_traceback_begins_with_the_users_code(tmp_path: Path, method: str) -> None:
    words = ("--nproc-per-node=2", "--run-path", f"--start-method={method}", "train.py")
    _, err = ended(tmp_path, *words, script=RAISES)
    assert "ValueError: no room" in err
    assert "holdfast/" not in err
    assert "runpy" not in err


ENDINGS = {
    "exit code": ("import sys; sys.exit(7)", 7),
    "text": ("import sys; sys.exit('no')", 1),
    "signal": ("import os; os.kill(os.getpid(), 11)", 139),
    "killed": ("import os; os.kill(os.getpid(), 9)", 137),
    "abort": ("import os; os.abort()", 134),
    "success": ("", 0),
    "syntax": ("def", 1),
}


@pytest.mark.parametrize(("script", "expected"), ENDINGS.values(), ids=ENDINGS)
def test_exit_code_is_the_workers_own(tmp_path: Path, script: str, expected: int) -> None:
    code, err = ended(tmp_path, "train.py", script=script)
    assert code == expected
    assert "holdfast/" not in err  # No traceback of Holdfast itself.


def test_temporary_logs_are_removed_after_success_and_kept_after_failure(tmp_path: Path) -> None:
    ended(tmp_path, "train.py", script="")
    assert not list((tmp_path / "tmp").iterdir())
    ended(tmp_path, "train.py", script="raise SystemExit(3)")
    assert len(list((tmp_path / "tmp").rglob("failure.json"))) == 1


def test_failing_worker_that_is_stopped_keeps_its_own_exit_code(tmp_path: Path) -> None:
    """Schedulers read 143 as preemption and start the job again."""
    script = """
import atexit, os, time
from holdfast import record
@record
def main():
    if os.environ["RANK"] == "0":
        atexit.register(time.sleep, 1000)
        raise ValueError("first")
    while not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"].replace("/1/", "/0/")):
        time.sleep(0.01)
    raise ValueError("second")
main()
"""
    code, err = ended(tmp_path, "--nproc-per-node=2", "train.py", script=script)
    assert "rank      : 0" in err
    assert "ValueError: first" in err
    assert code == 1


def test_worker_killed_after_the_timeout_is_reported_as_such(tmp_path: Path) -> None:
    script = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
here = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
open(here + "/ready", "w").close()
if os.environ["RANK"] == "0":
    signal.pause()
while not os.path.exists(here[:-1] + "0/ready"):
    pass
sys.exit(5)
"""
    words = ("--nproc-per-node=2", "--shutdown-timeout=0.1", "train.py")
    code, err = ended(tmp_path, *words, script=script)
    assert code == 5
    assert "killed by SIGKILL (did not exit in time after the stop signal)" in err
    assert "out-of-memory" not in err
