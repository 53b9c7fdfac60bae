"""`holdfast dump`: the stacks of real workers, whose scripts do not import Holdfast."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.cli import dump_command
from holdfast.errors import HoldfastError
from holdfast.processes.local_workers import local_workers
from real_jobs import Job, holdfast

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
def where_all_are():
    send(RANK)
    forever()
where_all_are()
"""


def dumped(*words: str) -> tuple[int, str, str]:
    done = holdfast("dump", *words)
    return done.returncode, done.stdout, done.stderr


def run_id_of(pid: int) -> str:
    (worker,) = (worker for worker in local_workers() if worker.pid == pid)
    assert worker.run_id
    return worker.run_id


def sections(text: str) -> dict[str, str]:
    """Return the text about each process, by the line that identifies the process."""
    parts = re.split(r"^== (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("more", [(), ("--preload", "json")], ids=["cold", "warm"])
def test_dump_shows_all_workers_of_a_job(tmp_path: Path, more: tuple[str, ...]) -> None:
    with Job(tmp_path, SCRIPT, "--nproc-per-node=2", *more) as job:
        pids = job.messages.take(2)
        run_id = run_id_of(pids["0"])
        code, out, err = dumped("--run-id", run_id)
        assert (code, err) == (0, "")
        found = sections(out)
        script = f"{sys.executable} -u {tmp_path}/train.py"
        assert [*found] == [
            f"rank {rank} (local rank {rank}), pid {pids[str(rank)]}, run id {run_id!r}, "
            f"generation 0, {script}"
            for rank in (0, 1)
        ]
        assert all("where_all_are (train.py:" in text for text in found.values())
        code, out, err = dumped(str(pids["1"]))
        assert (code, err) == (0, "")
        assert [key.partition(",")[0] for key in sections(out)] == ["rank 1 (local rank 1)"]
        code, out, err = dumped("--run-id", "other", str(pids["1"]))
        assert (code, out) == (1, "")
        assert err.startswith("holdfast dump: error: --run-id: ")
        assert repr(run_id) in err


def test_dump_shows_subprocesses_on_request() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            code, out, _ = dumped("--subprocesses", str(os.getpid()))
        finally:
            child.kill()
    assert code == 0
    assert any(key.startswith(f"below pid {os.getpid()}: pid {child.pid}") for key in sections(out))


def test_missing_process_or_job_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    code, out, err = dumped(str(ended.pid))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert str(ended.pid) in err
    monkeypatch.setattr("holdfast.cli.dump_command.local_workers", list)
    with pytest.raises(HoldfastError):
        dump_command.execute(dump_command.build_parser("dump").parse_args([]))
