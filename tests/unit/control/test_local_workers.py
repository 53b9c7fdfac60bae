"""Workers are found by what they are, however they were started; what they start is none."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from holdfast.control.local_workers import LocalWorker, local_workers
from holdfast.processes.procfs import command_of

if TYPE_CHECKING:
    from collections.abc import Iterator

WAITING = "print(flush=True); input()"
# Has its variables in its memory alone, as one that a zygote has forked.
LATE = """
import os, sys
os.environ.update(TORCHELASTIC_RUN_ID=sys.argv[1], RANK="7", LOCAL_RANK="3")
print(flush=True); input()
"""
WITH_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"])
child.wait()
"""


@contextmanager
def started(
    program: str, *words: str, env: dict[str, str] | None = None, leads: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", program, *words],
        env={**os.environ, **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=leads,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate(b"\n")


def found(run_id: str) -> list[LocalWorker]:
    return [worker for worker in local_workers() if worker.run_id == run_id]


def variables(run_id: str, rank: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": run_id,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % 2),
        "HOLDFAST_GENERATION": "5",
    }


def test_workers_are_found_in_the_order_of_their_ranks() -> None:
    run_id = str(uuid.uuid4())
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started(WAITING, env=variables(run_id, rank), leads=rank > 2))
            for rank in (10, 9, 2)
        ]
        workers = found(run_id)
        assert [(worker.rank, worker.local_rank, worker.pid) for worker in workers] == [
            (2, 0, processes[2].pid),
            (9, 1, processes[1].pid),
            (10, 0, processes[0].pid),
        ]
        told = workers[0].described()
    expected = f"rank 2 (local rank 0), pid {processes[2].pid}, run id {run_id!r}, generation 5, "
    assert told.startswith(expected + sys.executable)
    assert found(run_id) == []


def test_what_a_worker_starts_is_no_worker() -> None:
    run_id = str(uuid.uuid4())
    with started(WITH_CHILD, env=variables(run_id, 0)) as process:
        assert [worker.pid for worker in found(run_id)] == [process.pid]


def test_one_with_variables_in_its_memory_alone() -> None:
    run_id = str(uuid.uuid4())
    with started(LATE, run_id) as process:
        assert [(worker.pid, worker.rank) for worker in found(run_id)] == [(process.pid, 7)]


def test_words_for_what_is_not_known() -> None:
    me = os.getpid()
    unknown = LocalWorker(me, {}).described()
    assert unknown.startswith(f"a worker whose rank cannot be read, pid {me}, ")
    assert LocalWorker(me, {"RANK": "x"}).rank == -1
    assert LocalWorker(me, {"RANK": "3"}).described().startswith(f"rank 3, pid {me}, ")
    env = {"TORCHELASTIC_RUN_ID": "a", "RANK": "1", "HOLDFAST_GENERATION": "2"}
    command = command_of(me)
    assert LocalWorker(me, env, is_worker=False).described() == f"pid {me}, {command}"
