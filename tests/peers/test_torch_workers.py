"""Real torch workers whose process group breaks during an operation.

The other tests of gloo kill workers that wait for orders. Here one of two workers is killed while the other waits for
it in a collective operation, which then fails there too; the test checks that this second failure is not reported as
the cause. A second test checks that workers without torch find the store of a job under both launchers.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from real_teams import Cluster

if TYPE_CHECKING:
    from launchers import Launchers

pytestmark = pytest.mark.torch

# The worker with rank 1 waits for orders; the other worker waits for it in a sum that never completes.
WAITING = """
import traceback
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    assert dist.is_torchelastic_launched()
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    seen = store.check(["left behind"])
    dist.barrier()  # All have looked.
    store.set("left behind", "by an earlier generation")
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    send(f"connected {AGENT} {NUMBER} {rank} {total.item()} {seen}")
    if rank == 1:
        # Its connections must not close before it exits, or the other worker could exit first.
        sys.excepthook = lambda *error: (traceback.print_exception(*error), os._exit(1))
        obey()
    dist.all_reduce(total)

main()
"""


def wait_for_workers(cluster: Cluster, generation: int) -> dict[int, int]:
    """Wait until both workers of a generation have connected; return their processes by rank."""
    pids: dict[int, int] = {}
    while len(pids) < 2:
        word, *words = cluster.messages.next()
        if word == "connected":
            _agent, number, rank, total, seen, pid = words
            assert (int(number), int(total), seen) == (generation, 3, "False"), words
            pids[int(rank)] = int(pid)
    return pids


def test_failure_of_a_broken_collective_is_not_blamed_and_the_job_restarts(tmp_path: Path) -> None:
    """The next generation finds no keys of the previous one, and torch's `@record` is read."""
    logs = tmp_path / "logs"
    flags = ("--max-restarts=1", "--log-dir", str(logs))
    with Cluster(tmp_path, WAITING, *flags, nnodes="2") as cluster:
        cluster.start_all("a", "b")
        os.kill(wait_for_workers(cluster, 0)[1], signal.SIGKILL)
        failing = wait_for_workers(cluster, 1)[1]
        os.kill(failing, signal.SIGUSR2)
        ends = cluster.end()
    assert {name: code for name, (code, _) in ends.items()} == {"a": 1, "b": 1}
    for name, (_, output) in ends.items():
        assert "killed by SIGKILL" in output, output
        assert "restart 1 of 1" in output, output
        report = output[output.index("train.py FAILED after 1 of 1 restarts") :]
        first = report.partition("Other Failures:")[0]
        assert f"rank      : 1 (local_rank: 0)\n  exitcode  : 1 (pid: {failing})" in first, name
        # Torch's own decorator wrote the file that this traceback is from.
        assert "error.json" in first, report
        assert "was told to fail" in first, report
        assert "Connection closed by peer" not in first, report
    written = [json.loads(path.read_text()) for path in logs.glob("*/failure.json")]
    assert {report["first"]["rank"] for report in written} == {1}


def test_workers_without_torch_share_the_store_of_either_launcher(launchers: Launchers) -> None:
    script = Path(__file__).parents[2] / "examples" / "store_plain.py"
    for outcome in launchers.both(["--nproc-per-node=3", str(script)]):
        assert outcome.code == 0, outcome.err
        taken = re.findall(r"rank [012] of 3 took (\d+) blocks", outcome.out)
        assert (len(taken), sum(map(int, taken))) == (3, 40)
        assert "primes below 20000: 2262" in outcome.out
