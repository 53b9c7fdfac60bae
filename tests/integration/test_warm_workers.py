"""Jobs whose workers are forked from a zygote: they survive its failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.keeper.keeper_program import children_of, descendants_of
from real_jobs import Job, Watched

if TYPE_CHECKING:
    from pathlib import Path

# Each worker reports how it was started; the first generation waits until it is stopped.
TELLS = """
    send(("warm" if "slow" in sys.modules else "cold") + RANK)
    if GENERATION == "0":
        forever()
"""


def zygote_of(job: Job) -> int:
    """Return the pid of a job's zygote, by its process name."""
    for pid in children_of(job.keeper()):
        with open(f"/proc/{pid}/comm") as name:
            if name.read() == "hf-zygote\n":
                return pid
    raise AssertionError("there is no zygote")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").touch()
    return tmp_path


def test_first_start_and_each_restart_are_warm(folder: Path) -> None:
    flags = ("--nproc-per-node=2", "--max-restarts=2", "--preload=slow")
    script = TELLS.replace('== "0"', '!= "2"')
    with Job(folder, script, *flags) as job:
        zygotes = set()
        for _ in range(2):
            workers = job.messages.take(2)
            assert sorted(workers) == ["warm0", "warm1"]
            zygotes.add(zygote_of(job))
            assert set(children_of(job.keeper())) == {*workers.values(), *zygotes}
            os.kill(workers["warm0"], signal.SIGKILL)
        everyone = Watched(*workers.values(), *zygotes, job.keeper())
        assert sorted(job.messages.take(2)) == ["warm0", "warm1"]
        code, _, err = job.end()
        assert code == 0, err
        everyone.assert_exited()


@pytest.mark.parametrize("moment", ["while workers run", "while it imports"])
def test_killed_zygote_restarts_no_worker(folder: Path, moment: str) -> None:
    """No worker restarts, and the next start is warm again."""
    early = moment == "while it imports"
    if early:
        (folder / "slow.py").write_text(
            "import os, signal\n"
            "again = os.path.exists('once')\n"
            "open('once', 'w').close()\n"
            "with open(os.environ['MESSAGES'], 'w') as messages:\n"
            "    messages.write(f'importing {os.getpid()}\\n')\n"
            "while not again: signal.pause()\n"
        )
    with Job(folder, TELLS, "--max-restarts=1", "--preload=slow") as job:
        if early:
            first = job.messages.take(1)["importing"]
            os.kill(first, signal.SIGKILL)
            assert job.messages.take(1)["importing"] != first
        worker = job.messages.take(1)["warm0"]
        if not early:
            gone = Watched(zygote_of(job))
            os.kill(zygote_of(job), signal.SIGKILL)
            gone.wait_until_exited()
        os.kill(worker, signal.SIGKILL)
        assert job.messages.next()[0] == "warm0"
        code, _, err = job.end()
        assert code == 0, err
        assert "restart 1 of 1" in err


def test_job_without_restarts_survives_its_zygote(folder: Path) -> None:
    script = """
    send("warm" if "slow" in sys.modules else "cold")
    with open(os.environ["MESSAGES"] + ".go"): pass
    """
    os.mkfifo(folder / "messages.go")  # Before a worker opens it.
    with Job(folder, script, "--preload=slow") as job:
        assert job.messages.next()[0] == "warm"
        gone = Watched(zygote_of(job))
        os.kill(zygote_of(job), signal.SIGKILL)
        gone.wait_until_exited()
        with open(f"{job.messages.path}.go", "w"):
            pass
        code, _, err = job.end()
        assert (code, err) == (0, "")


# Where the zygote, or the process that forks the workers, blocks.
HELD_UP = {
    "importing": "send(); pause()",
    "forking": "os.register_at_fork(after_in_child=lambda: (send(), pause()))",
}


def hold_up(folder: Path, where: str) -> None:
    (folder / "slow.py").write_text(
        "import os, signal\n"
        "def send():\n"
        "    with open(os.environ['MESSAGES'], 'w') as messages: messages.write(f'held {os.getpid()}\\n')\n"
        "def pause():\n"
        "    while True: signal.pause()\n" + HELD_UP[where]
    )


@pytest.mark.parametrize("where", HELD_UP)
@pytest.mark.parametrize("victim", ["agent", "keeper"])
def test_no_process_is_left_after_agent_or_keeper_is_killed(
    folder: Path, where: str, victim: str
) -> None:
    hold_up(folder, where)
    with Job(folder, "send('never')", "--preload=slow") as job:
        held = job.messages.take(1)["held"]
        keeper = job.keeper()
        below = descendants_of(keeper)
        assert held in below
        everyone = Watched(*below, keeper)
        os.kill(job.agent.pid if victim == "agent" else keeper, signal.SIGKILL)
        if victim == "keeper":
            everyone.wait_until_exited()  # The agent continues with another keeper.
            job.signal(signal.SIGKILL)
        else:
            everyone.wait_until_exited()


def test_signal_ends_the_wait_for_imports(folder: Path) -> None:
    hold_up(folder, "importing")
    with Job(folder, "send('never')", "--preload=slow") as job:
        job.messages.take(1)
        everyone = Watched(*descendants_of(job.agent.pid))
        job.signal(signal.SIGTERM)
        code, _, err = job.end()
        assert code == 128 + signal.SIGTERM, err
        everyone.assert_exited()
        assert job.messages.is_quiet()


def test_traceback_of_a_warm_worker_begins_with_its_own_code(folder: Path) -> None:
    with Job(
        folder, "    def f():\n        raise ValueError('mine')\n    f()", "--preload=slow"
    ) as job:
        code, _, err = job.end()
        assert code == 1
        assert "ValueError: mine" in err
        assert "zygote" not in err
        assert "newborn" not in err


def test_functions_are_forked_from_the_zygote(folder: Path) -> None:
    program = folder / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, sys
            from holdfast.launcher import LaunchConfig, elastic_launch
            def work(text):
                if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    os.kill(os.getpid(), 9)
                names = ("slow", "holdfast.processes.workers.function_child")
                found = [name in sys.modules for name in names]
                return text, int(os.environ["RANK"]), sys.path[0], __name__, os.getppid()
            if __name__ == "__main__":
                config = LaunchConfig(1, 1, 2, preload="slow", max_restarts=1)
                values = elastic_launch(config, work)("told")
                assert len({value[-1] for value in values.values()}) == 1
                print(*(value[:-1] for value in values.values()))
            """
        )
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    received = [("told", rank, str(folder), "__mp_main__") for rank in range(2)]
    assert done.stdout == " ".join(map(str, received)) + "\n"


@pytest.mark.torch
def test_torch_workers_reconnect_after_a_restart(folder: Path) -> None:
    script = """
    was_there = "torch" in sys.modules
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    send(f"{'warm' if was_there else 'cold'}{RANK}:{int(total)}")
    if GENERATION == "0":
        forever()
    dist.barrier()
    dist.destroy_process_group()
    """
    flags = ("--nproc-per-node=2", "--max-restarts=1", "--preload=torch")
    with Job(folder, script, *flags) as job:
        workers = job.messages.take(2)
        assert sorted(workers) == ["warm0:2", "warm1:2"]
        os.kill(workers["warm1:2"], signal.SIGKILL)
        assert sorted(job.messages.take(2)) == ["warm0:2", "warm1:2"]
        code, _, err = job.end()
        assert code == 0, err
        assert "thread" not in err
