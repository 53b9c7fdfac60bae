"""Programs that use `torch.distributed` with the gloo backend run under Holdfast, also after restarts."""

from __future__ import annotations

import sys

import pytest
from launchers import Launchers, Outcome, free_port

pytestmark = pytest.mark.torch

GLOO = """\
import os, signal, sys
import torch
import torch.distributed as dist
assert dist.is_torchelastic_launched()
dist.init_process_group("gloo")
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
total = torch.tensor([rank + 1])
dist.all_reduce(total)
line = f"attempt {attempt} rank {rank} of {dist.get_world_size()} total {total.item()}"
sys.stdout.write(f"{line}\\n")
sys.stdout.flush()
if f"{attempt}-{rank}" == os.environ.get("KILLED"):
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("flags", "workers"),
    [("", 4), ("--standalone", 2), ("--nnodes 1", 2), ("--master-port PORT", 2)],
)
def test_gloo_processes_exchange_data(flags: str, workers: int, launchers: Launchers) -> None:
    launchers.script("gloo.py", GLOO)
    line = [*flags.replace("PORT", str(free_port())).split(), f"--nproc-per-node={workers}"]
    outcome = launchers.holdfast([*line, "../gloo.py"])
    assert outcome.code == 0, outcome.err
    assert sorted(outcome.out.splitlines()) == all_reduced(0, workers)


def test_gloo_works_after_a_restart(launchers: Launchers) -> None:
    launchers.script("gloo.py", GLOO)
    line = ["--nproc-per-node=2", "--max-restarts=1", "../gloo.py"]
    outcome = launchers.holdfast(line, {"KILLED": "0-1"})
    assert outcome.code == 0, outcome.err
    assert "SIGKILL" in outcome.err
    assert_recovered(outcome)


GLOO_LAUNCHING = """\
import sys
import torch.distributed
from holdfast.launcher.api import LaunchConfig, elastic_launch
from holdfast.run import run_script_path
config = LaunchConfig(
    1, 1, 2, rdzv_backend="static", rdzv_endpoint=sys.argv[1], max_restarts=1, start_method="fork")
elastic_launch(config, run_script_path)("../gloo.py")
"""


def test_gloo_works_again_at_the_same_port(launchers: Launchers) -> None:
    """Workers are forked, so that torch is imported only once."""
    launchers.script("gloo.py", GLOO)
    launchers.script("launching.py", GLOO_LAUNCHING)
    command = [sys.executable, "../launching.py", f"127.0.0.1:{free_port()}"]
    outcome = launchers.command(command, "holdfast", {"KILLED": "0-1"})
    assert outcome.code == 0, outcome.err
    assert_recovered(outcome)


def assert_recovered(outcome: Outcome) -> None:
    # Worker 0 may be stopped before it has printed anything in its first attempt.
    lines = sorted(outcome.out.splitlines())
    assert [line for line in lines if not line.startswith("attempt 0 rank 0")] == [
        all_reduced(0, 2)[1],
        *all_reduced(1, 2),
    ]


def all_reduced(attempt: int, workers: int) -> list[str]:
    total = sum(range(workers + 1))
    return [f"attempt {attempt} rank {rank} of {workers} total {total}" for rank in range(workers)]
