"""The tail of the workers' output that every job keeps on disk."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

from real_jobs import HOLDFAST, PATIENCE_S, holdfast

if TYPE_CHECKING:
    from pathlib import Path

SAYS_AND_FAILS = """
import sys
print("to out")
print("to err", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def run_script(folder: Path, *flags: str, code: int) -> str:
    script = folder / "train.py"
    script.write_text(SAYS_AND_FAILS)
    words = ("run", *flags, str(script), str(code))
    done = holdfast(*words, env={"TMPDIR": str(folder)}, cwd=folder)
    assert done.returncode == code, done
    assert done.stdout == "to out\n"
    return done.stderr


def test_a_failed_job_keeps_its_tails_and_a_successful_one_none(tmp_path: Path) -> None:
    report = run_script(tmp_path, code=3)
    [folder] = tmp_path.glob("holdfast_*")
    [run] = folder.iterdir()
    assert f"Logs:   {run}" in report
    tails = {one.name: one for one in run.rglob("*.tail")}
    assert {name: one.read_text() for name, one in tails.items()} == {
        "stdout.tail": "to out\n",
        "stderr.tail": "to err\n",
    }
    assert {one.stat().st_mode & 0o777 for one in tails.values()} == {0o600}
    run_script(tmp_path, code=0)
    assert [*tmp_path.glob("holdfast_*")] == [folder]
    run_script(tmp_path, "--log-dir", "logs", code=0)
    assert [*tmp_path.glob("logs/**/*.jsonl")]
    assert not [*tmp_path.glob("logs/**/*.tail")]


def test_without_a_tail_the_worker_has_the_agents_own_console(tmp_path: Path) -> None:
    words = ("--log-tail", "0", "--no-python", "readlink", "/proc/self/fd/1")
    with (tmp_path / "console").open("w") as console:
        subprocess.run([*HOLDFAST, "run", *words], stdout=console, check=True, timeout=PATIENCE_S)
    assert (tmp_path / "console").read_text() == f"{tmp_path}/console\n"


def test_a_worker_gets_sigpipe_after_the_reader_of_the_console_has_exited() -> None:
    command = [*HOLDFAST, "run", "--no-python", "yes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"y\n"
        job.stdout.close()
        assert job.wait(PATIENCE_S) == 128 + signal.SIGPIPE
