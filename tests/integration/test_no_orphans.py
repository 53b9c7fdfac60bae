"""No process of a job is left behind, whichever process dies and however it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from real_jobs import Job, Watched, WorkerMessages

if TYPE_CHECKING:
    from pathlib import Path

# Children, most of which are hard to find: a child, children in their own sessions, and a daemon that was forked twice
# and has no parent in the job.
FAMILY = """
    def sleeper(**how):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], **how).pid
    def daemon():
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                send(f"daemon{RANK}")
                os.close(write)
                forever()
            os._exit(0)
        os.close(write)
        os.read(read, 1)  # Returns once the daemon has sent its message.
    def have_family():
        send(f"child{RANK}", sleeper())
        send(f"session{RANK}", sleeper(start_new_session=True))
        send(f"bare{RANK}", sleeper(start_new_session=True, env={}))
        daemon()
        send(f"leader{RANK}")
"""
FAMILY_SIZE = 5


@pytest.mark.parametrize("victims", ["agent", "agent and leaders", "keeper"])
def test_killing_agent_or_keeper_kills_all_processes(tmp_path: Path, victims: str) -> None:
    with Job(tmp_path, FAMILY + "\n    have_family(); forever()\n", "--nproc-per-node=2") as job:
        family = job.messages.take(2 * FAMILY_SIZE)
        keeper = job.keeper()
        everyone = Watched(*family.values(), keeper, job.agent.pid)
        doomed = {
            "agent": [job.agent.pid],
            "agent and leaders": [family["leader0"], family["leader1"], job.agent.pid],
            "keeper": [keeper],
        }[victims]
        if victims == "agent and leaders":
            # Stop the agent first. Otherwise it could react to the exit of the leaders before it is killed, or the
            # keeper could kill the leaders after the agent's exit.
            os.kill(job.agent.pid, signal.SIGSTOP)
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        everyone.wait_until_exited()


def test_killing_agent_and_keeper_at_once_still_kills_the_workers(tmp_path: Path) -> None:
    """Only in this case may children of workers survive, because no process is left to find them."""
    with Job(tmp_path, FAMILY + "\n    have_family(); forever()\n") as job:
        family = job.messages.take(FAMILY_SIZE)
        keeper = job.keeper()
        workers = Watched(family["leader0"], keeper, job.agent.pid)
        os.kill(job.agent.pid, signal.SIGSTOP)  # So that it does not clean up in between.
        os.kill(keeper, signal.SIGKILL)
        os.kill(job.agent.pid, signal.SIGKILL)
        workers.wait_until_exited()
        for name, pid in family.items():
            if name != "leader0":
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "expected", "shown"),
    [("", 0, ""), ("os.kill(os.getpid(), 11)", 139, "SIGSEGV (segmentation fault)")],
    ids=["success", "crash"],
)
def test_exited_worker_leaves_no_children(
    tmp_path: Path, end: str, expected: int, shown: str
) -> None:
    with Job(tmp_path, f"{FAMILY}\n    have_family(); {end}\n") as job:
        family = Watched(*job.messages.take(FAMILY_SIZE).values())
        code, _, err = job.end()
        family.assert_exited()
        assert code == expected, err
        assert shown in err


def test_generation_exits_completely_before_the_next_one_starts(tmp_path: Path) -> None:
    script = (
        FAMILY
        + """
    if GENERATION == "0":
        have_family()
        forever()
    send("again")
    with open(os.environ["MESSAGES"] + ".go"): pass
    """
    )
    os.mkfifo(tmp_path / "messages.go")  # Before a worker opens it.
    with Job(tmp_path, script, "--max-restarts=1", "--shutdown-timeout=30") as job:
        received = job.messages.take(FAMILY_SIZE)
        family = Watched(*received.values())
        os.kill(received["leader0"], signal.SIGKILL)
        assert job.messages.next()[0] == "again"
        family.assert_exited()
        with open(f"{job.messages.path}.go", "w"):
            pass
        code, _, err = job.end()
        assert code == 0, err


def test_lost_keeper_costs_one_restart_and_leaves_no_orphan(tmp_path: Path) -> None:
    script = (
        FAMILY
        + """
    if GENERATION == "0":
        have_family()
        forever()
    """
    )
    with Job(tmp_path, script, "--max-restarts=1") as job:
        family = Watched(*job.messages.take(FAMILY_SIZE).values())
        os.kill(job.keeper(), signal.SIGKILL)
        code, _, err = job.end()
        family.assert_exited()
        assert code == 0, err
        assert "the keeper of the workers" in err


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_function_workers_are_killed_with_their_program(tmp_path: Path, method: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, subprocess, sys\n"
        "from holdfast.launcher import LaunchConfig, elastic_launch\n"
        "def send(name, pid):\n"
        "    with open(os.environ['MESSAGES'], 'w') as messages: messages.write(f'{name} {pid}\\n')\n"
        "def work():\n"
        "    rank = os.environ['RANK']\n"
        "    child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    send('child' + rank, child.pid); send('leader' + rank, os.getpid())\n"
        "    signal.pause()\n"
        "if __name__ == '__main__':\n"
        "    config = LaunchConfig(1, 1, 2, start_method=sys.argv[1])\n"
        "    elastic_launch(config, work)()\n"
    )
    messages = WorkerMessages(tmp_path)
    command = [sys.executable, str(program), method]
    with subprocess.Popen(command, env={**os.environ, "MESSAGES": str(messages.path)}) as launched:
        try:
            everyone = Watched(*messages.take(4).values())
        finally:
            launched.kill()
    everyone.wait_until_exited()
    messages.close()
