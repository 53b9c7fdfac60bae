"""The JAX program of the documentation loses a rank.

`make test` does not install JAX, which needs 500 MB; `make test-jax` does, and runs this file.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from holdfast.processes import procfs
from real_jobs import Job, children

pytest.importorskip("jax")
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "jax.md"
NO_PREEMPTION = {"JAX_ENABLE_PREEMPTION_SERVICE": "false"}


@pytest.mark.parametrize(
    ("rank", "env", "is_killed"),
    [("0", {}, False), ("1", {}, True), ("1", NO_PREEMPTION, False)],
    ids=["rank 0", "rank 1", "rank 1 without the preemption service"],
)
def test_job_restarts_after_the_loss_of_a_rank(
    tmp_path: Path, rank: str, env: dict[str, str], is_killed: bool
) -> None:
    found = re.search(r'```python title="train_jax.py"\n(.*?)```', GUIDE.read_text(), re.DOTALL)
    assert found is not None
    # Generation 0 has too many steps to end before its rank is killed.
    steps = 'os.environ["STEPS"] = "5" if os.environ["HOLDFAST_GENERATION"] == "1" else "9999999"\n'
    script = found[1].replace("\nimport jax\n", f"\n{steps}import jax\n", 1)
    script = script.replace("for step in", 'send(os.environ["HOLDFAST_GENERATION"])\nfor step in')
    flags = ("--nproc-per-node=2", "--max-restarts=1", "--failure-grace=5")
    with Job(tmp_path, script, *flags, env=env) as job:
        job.messages.next()
        job.messages.next()  # Both have initialized JAX.
        workers = children(job.keeper())
        victim = next(one for one in workers if procfs.initial_environment(one)["RANK"] == rank)
        os.kill(victim, signal.SIGKILL)
        code, out, err = job.end()
    assert code == 0, err
    assert sorted(out.split("\n"))[-2:] == ["rank 0 of 2: 1", "rank 1 of 2: 1"]
    assert ("did not exit in time: killed it" in err) == is_killed
    assert f"rank {rank} (pid {victim}) failed: killed by SIGKILL" in err
