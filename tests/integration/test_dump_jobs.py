"""`holdfast dump` of a real job shows the stack of each worker."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING
from uuid import uuid4

from observed_jobs import ObservedJob
from real_jobs import holdfast

if TYPE_CHECKING:
    from pathlib import Path

WAITING = """
def wait_for_rank_zero():
    send(f"up{RANK}")
    obey()
def compute():
    send(f"up{RANK}")
    while not signal.sigpending():
        pass
    obey()
compute() if RANK == "0" else wait_for_rank_zero()
"""


def dumped(run_id: str) -> tuple[int, list[str], str]:
    """Return the exit code, a text for each worker, and the standard error."""
    done = holdfast("dump", "--run-id", run_id)
    return done.returncode, done.stdout.split("== ")[1:], done.stderr


def test_each_worker_is_shown_even_if_the_agent_is_stuck(tmp_path: Path) -> None:
    run_id = uuid4().hex
    flags = ("--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-id={run_id}")
    with ObservedJob(tmp_path, WAITING, *flags) as job:
        workers = job.messages.take(2)
        job.signal(signal.SIGSTOP)
        code, texts, err = dumped(run_id)
        job.signal(signal.SIGCONT)
        assert (code, err, len(texts)) == (0, "", 2)
        for text, rank, function in zip(
            texts, (0, 1), ("compute", "wait_for_rank_zero"), strict=True
        ):
            head, _, stacks = text.partition("\n")
            assert run_id in head
            assert f"rank {rank}" in head
            assert f"pid {workers[f'up{rank}']}" in head
            assert f"    {function} (" in stacks
        for pid in workers.values():
            os.kill(pid, signal.SIGUSR1)
        assert job.ends() == (0, "")
    code, texts, err = dumped(run_id)
    assert (code, texts) == (1, [])
    assert err.startswith("holdfast dump: error: ")
    assert err.count("\n") == 1
