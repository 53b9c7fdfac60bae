"""Real workers that take too long: their stacks are shown, they are killed, and the job continues."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from observed_jobs import ObservedJob, events_of, summary_of

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

HEAD = """
from holdfast import worker
from holdfast.elastic import timer
def be_stuck_here():
    forever()
def in_a_timer(scope, after=0.3):
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    return timer.expires(after, scope)
"""
SECTION = 'worker.section("stuck", timeout=0.3)'
TIMER = 'in_a_timer(scope="stuck")'
TIMERS = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
LOGS = ("--log-dir=logs", "--redirects=2", "--nproc-per-node=2")


def stuck_once(block: str) -> str:
    """Return a script in which rank 1 is stuck in the first generation."""
    return f"""{HEAD}
if GENERATION == "0":
    if RANK == "1":
        with {block}:
            be_stuck_here()
    forever()
"""


def watchdog_events(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the events about expired timers, in order."""
    return [
        (one["name"], json.loads(one["metadata"]["metadata"]))
        for one in events_of(folder)
        if one["name"] in ("timer expired", "kill worker process")
    ]


@pytest.mark.parametrize("block", [SECTION, TIMER], ids=["section", "timer"])
def test_stuck_worker_is_dumped_and_killed_and_the_job_continues(
    tmp_path: Path, block: str
) -> None:
    flags = (*LOGS, "--max-restarts=1")
    with ObservedJob(tmp_path, stuck_once(block), *flags, env=TIMERS) as job:
        code, output = job.ends()
        assert job.left_behind() == []  # The pipe of the timers is removed too.
    assert code == 0
    scope = "section stuck" if block == SECTION else "stuck"
    pid = watchdog_events(tmp_path)[0][1]["worker_pid"]
    assert f"timer expired: {scope!r} (pid {pid}); its signal is 9" in output
    assert f"rank 1 (pid {pid}) failed: timer {scope!r} expired: killed the worker" in output
    [log] = tmp_path.glob("logs/*/attempt_0/1/stderr.log")
    assert "be_stuck_here (" in log.read_text()
    [other] = tmp_path.glob("logs/*/attempt_0/0/stderr.log")
    assert other.read_text() == ""
    events = watchdog_events(tmp_path)
    assert [name for name, _ in events] == ["timer expired", "kill worker process"]
    for _, inner in events:
        assert inner["scope_id"] == scope
        assert inner["signal"] == signal.SIGKILL
        assert inner["expiration_time"] > 0
    names = [summary_of(one).name for one in events_of(tmp_path)]
    assert names.index("kill worker process") < names.index("SUCCEEDED")
    assert names.count("RENDEZVOUS") == 2
    assert names.count("watchdog started") == names.count("watchdog stopped") == 1


@pytest.mark.parametrize("block", [SECTION, TIMER], ids=["section", "timer"])
def test_stuck_worker_below_a_shell_is_dumped_and_explained(tmp_path: Path, block: str) -> None:
    script = f"""{HEAD}
if len(sys.argv) == 1:
    import subprocess
    done = subprocess.run([sys.executable, *sys.orig_argv[1:], "inner"])
    sys.exit(128 - done.returncode)
with {block}:
    be_stuck_here()
"""
    with ObservedJob(tmp_path, script, *LOGS[:2], env=TIMERS) as job:
        code, output = job.ends()
    assert code == 128 + signal.SIGKILL
    pid = watchdog_events(tmp_path)[0][1]["worker_pid"]
    assert f" expired: killed its process {pid}" in output
    [log] = tmp_path.glob("logs/*/attempt_0/0/stderr.log")
    assert "be_stuck_here (" in log.read_text()


@pytest.mark.parametrize("block", [SECTION, TIMER], ids=["section", "timer"])
def test_report_names_the_timer_that_killed_a_worker_and_has_the_stacks(
    tmp_path: Path, block: str
) -> None:
    flags = ("--nproc-per-node=2", "--log-dir=logs")
    with ObservedJob(tmp_path, stuck_once(block), *flags, env=TIMERS) as job:
        code, output = job.ends()
    assert code == 128 + signal.SIGKILL
    why = f"timer {'section stuck' if block == SECTION else 'stuck'!r} expired: killed the worker"
    assert f"reason    : {why}" in output
    assert "rank      : 1 (local_rank: 1)" in output
    assert "out-of-memory" not in output
    assert "be_stuck_here (" in output.partition("Root Cause")[2]
    [path] = tmp_path.glob("logs/*/failure.json")
    report = path.read_text()
    assert why in report
    assert "be_stuck_here (" in report


def test_pipe_at_a_chosen_path_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "timers"
    script = """
import stat
sys.exit(not stat.S_ISFIFO(os.stat(os.environ["TORCHELASTIC_TIMER_FILE"]).st_mode))
"""
    env = {**TIMERS, "TORCHELASTIC_TIMER_FILE": str(path)}
    with ObservedJob(tmp_path, script, env=env) as job:
        assert job.ends() == (0, "")
    assert not path.exists()
