"""Stopping a job: which process receives which signal, how long it has, and the output of the command."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import textwrap
from pathlib import Path

import pytest

from real_jobs import Job, Watched

OBEDIENT = """
    def obey(signum, frame):
        send(f"got{signum}-{RANK}")
        sys.exit(0)
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(one, obey)
"""
STUBBORN = """
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda signum, frame: send(f"ignored{signum}-{RANK}"))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_signal_is_forwarded_to_each_leader(tmp_path: Path, name: str) -> None:
    signum = signal.Signals[name]
    flags = ("--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    script = OBEDIENT + "\n    send(f'leader{RANK}'); forever()\n"
    with Job(tmp_path, script, *flags) as job:
        leaders = job.messages.take(2)
        job.signal(signum)
        assert job.messages.take(2) == {
            f"got{int(signum)}-{rank[-1]}": pid for rank, pid in leaders.items()
        }
        code, _, err = job.end()
        assert code == 128 + signum
        assert f"stopped by {name}" in err
        assert "Traceback" not in err


def test_signal_is_sent_only_to_the_leader(tmp_path: Path) -> None:
    """A leader stops its own children, in its own order; a signal to the group would race with it."""
    script = (
        OBEDIENT
        + """
    if os.fork() == 0:
        RANK = "child"
        send("child"); forever()
    send("leader"); forever()
    """
    )
    with Job(tmp_path, script) as job:
        family = job.messages.take(2)
        gone = Watched(family["child"])
        job.signal(signal.SIGTERM)
        assert job.messages.take(1) == {"got15-0": family["leader"]}
        assert job.end()[0] == 143
        gone.assert_exited()
        # The child was killed without a signal that it could handle.
        assert job.messages.is_quiet()


def test_child_of_a_killed_shell_keeps_its_grace_period(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import os, signal, sys, time\n"
        "def save(signum, frame):\n"
        "    with open(os.environ['MESSAGES'], 'w') as messages: messages.write(f'saved {os.getpid()}\\n')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "with open(os.environ['MESSAGES'], 'w') as messages: messages.write(f'child {os.getpid()}\\n')\n"
        "while True: time.sleep(0.1)  # A signal just before it sleeps does not wake it.\n"
    )
    script = f"#!/bin/sh\npython3 {child}\nexit $?\n"
    with Job(tmp_path, script, "--no-python", name="train.sh") as job:
        pid = job.messages.take(1)["child"]
        job.signal(signal.SIGTERM)
        assert job.messages.take(1) == {"saved": pid}
        assert job.end()[0] == 143


def test_blocked_console_does_not_delay_a_signal(tmp_path: Path) -> None:
    """Workers must receive the signal even if a pager or a log collector blocks the console."""
    read, write = os.pipe()
    os.write(write, bytes(fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)))
    script = OBEDIENT + "\n    send('leader'); forever()\n"
    with Job(tmp_path, script, stderr=write) as job:
        pid = job.messages.take(1)["leader"]
        job.signal(signal.SIGTERM)
        assert job.messages.take(1) == {"got15-0": pid}
        os.close(write)
        with open(read, "rb") as console:
            assert console.read().endswith(b"stopped by SIGTERM (termination request)\n")
        assert job.end()[0] == 143


# Rank 1 fails once the test opens the file for writing.
FAILS_WHEN_TOLD = """
    send(f"leader{RANK}")
    if RANK == "1":
        with open(os.environ["MESSAGES"] + ".go"): pass
        sys.exit(7)
    forever()
"""


def test_second_ctrl_c_kills_immediately(tmp_path: Path) -> None:
    script = STUBBORN + "\n    send(f'leader{RANK}'); forever()\n"
    with Job(tmp_path, script, "--nproc-per-node=2", "--shutdown-timeout=1000") as job:
        leaders = Watched(*job.messages.take(2).values())
        job.signal(signal.SIGINT)
        assert set(job.messages.take(2)) == {"ignored2-0", "ignored2-1"}
        job.signal(signal.SIGINT)
        code, _, err = job.end()
        leaders.assert_exited()
        assert code == 130
        assert "killing the workers now" in err


def test_worker_is_killed_with_its_children_after_the_timeout(tmp_path: Path) -> None:
    script = (
        STUBBORN
        + """
    if os.fork() == 0:
        os.setsid()
        send("child")
        forever()
    send("leader"); forever()
    """
    )
    with Job(tmp_path, script, "--shutdown-timeout=0.2") as job:
        family = Watched(*job.messages.take(2).values())
        job.signal(signal.SIGTERM)
        code, _, err = job.end()
        family.assert_exited()
        assert code == 143
        assert "did not exit in time: killed it" in err


@pytest.mark.parametrize(
    "flags",
    [("--shutdown-timeout=0.2",), ("--shutdown-timeout=1000", "--failure-grace=0.2")],
    ids=["shutdown timeout", "failure grace"],
)
def test_workers_have_less_time_to_exit_after_a_failure(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """torchrun always waits 30 s here, regardless of --shutdown-timeout."""
    script = STUBBORN + FAILS_WHEN_TOLD
    os.mkfifo(tmp_path / "messages.go")  # Before a worker opens it.
    with Job(tmp_path, script, "--nproc-per-node=2", *flags) as job:
        family = Watched(*job.messages.take(2).values())
        with open(f"{job.messages.path}.go", "w"):
            pass
        code, _, err = job.end()
        family.assert_exited()
        assert code == 7
        assert "consequence" in err


def test_slow_worker_is_named_with_what_it_does(tmp_path: Path) -> None:
    script = STUBBORN + FAILS_WHEN_TOLD
    os.mkfifo(tmp_path / "messages.go")  # Before a worker opens it.
    with Job(tmp_path, script, "--nproc-per-node=2", "--failure-grace=9") as job:
        slow = job.messages.take(2)["leader0"]
        with open(f"{job.messages.path}.go", "w"):
            pass
        assert job.agent.stderr is not None
        line = next(line for line in job.agent.stderr if "has not exited yet" in line)
        assert f"worker 0 (pid {slow}) has not exited yet: " in line
        assert re.search(r", called from forever \(train.py:\d+\); killing it in \d s$", line)
        os.kill(slow, signal.SIGKILL)


def test_stop_signal_can_be_configured(tmp_path: Path) -> None:
    script = OBEDIENT + FAILS_WHEN_TOLD
    os.mkfifo(tmp_path / "messages.go")  # Before a worker opens it.
    with Job(tmp_path, script, "--nproc-per-node=2", "--stop-signal=SIGUSR1") as job:
        leaders = job.messages.take(2)
        with open(f"{job.messages.path}.go", "w"):
            pass
        assert job.messages.take(1) == {f"got{int(signal.SIGUSR1)}-0": leaders["leader0"]}
        assert job.end()[0] == 7


def test_signal_during_a_restart_ends_the_job(tmp_path: Path) -> None:
    script = STUBBORN + "\n    send(f'leader{RANK}'); forever()\n"
    with Job(tmp_path, script, "--nproc-per-node=2", "--max-restarts=5") as job:
        leaders = job.messages.take(2)
        os.kill(leaders["leader1"], signal.SIGKILL)
        # The agent is stopping the workers.
        assert job.messages.take(1) == {"ignored15-0": leaders["leader0"]}
        job.signal(signal.SIGTERM)
        os.kill(leaders["leader0"], signal.SIGKILL)
        assert job.end()[0] == 143
        assert job.messages.is_quiet()


def test_worker_in_uninterruptible_sleep_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for its vfork child is in that state until the child exits or calls exec."""
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "0.3")
    script = """
    os.mkfifo("never")
    send("leader")
    os.posix_spawn("/bin/true", ["true"], {},
                   file_actions=[(os.POSIX_SPAWN_OPEN, 0, "never", os.O_RDONLY, 0)])
    """
    with Job(tmp_path, script, "--max-restarts=3") as job:
        worker = Watched(*job.messages.take(1).values())
        code, _, err = job.end()
        worker.assert_exited()
        assert code == 128 + signal.SIGKILL
        assert "stuck in uninterruptible sleep" in err
        assert "restarting" not in err  # A new generation would get stuck as well.
        assert job.messages.is_quiet()


# Signals that Holdfast does not handle may still kill the agent by their default action.
@pytest.mark.parametrize(
    "signum", [signal.SIGUSR1, signal.SIGALRM, signal.SIGRTMIN + 3, signal.SIGKILL]
)
def test_unhandled_signal_leaves_no_folder(tmp_path: Path, signum: int) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = "\n    send(os.environ['HOLDFAST_WORKER_PAGE']); send('leader'); forever()\n"
    with Job(tmp_path, script, env={"TMPDIR": str(temporary)}) as job:
        page = Path(job.messages.next()[0])
        everyone = Watched(*job.messages.take(1).values(), job.keeper())
        assert page.exists()
        assert [*temporary.iterdir()]
        os.kill(job.agent.pid, signum)
        assert job.end()[0] == -signum
        everyone.wait_until_exited()
        assert not page.parent.exists()
        assert not [*temporary.iterdir()]


def meddled(folder: Path, program: str) -> dict[str, str]:
    """Return an environment in which every Python process first runs this program."""
    (folder / "sitecustomize.py").write_text("import os, signal, sys\n" + textwrap.dedent(program))
    return {"PYTHONPATH": str(folder)}


def test_signals_during_startup_end_the_command_cleanly(tmp_path: Path) -> None:
    """Two signals in a row arrive when the agent starts its imports, after it has started the keeper."""
    meddling = """
        class Signals:
            def find_spec(self, name, *_):
                if name == "holdfast.cli.run_command":
                    for _ in range(2):
                        os.kill(os.getpid(), signal.SIGHUP)
        sys.meta_path.insert(0, Signals())
    """
    with Job(tmp_path, "", env=meddled(tmp_path, meddling)) as job:
        code, _, err = job.end()
    assert code == 128 + signal.SIGHUP
    assert len(err.splitlines()) == 1, err


def test_signals_during_the_cleanup_change_nothing(tmp_path: Path) -> None:
    """The first signal ends the job; then one arrives with each folder that is removed."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    meddling = """
        remove = os.rmdir
        def rmdir(path, *, dir_fd=None):
            if dir_fd is not None or path.startswith(("/dev/shm/", os.environ["TMPDIR"])):
                os.kill(os.getpid(), signal.SIGHUP)
            remove(path, dir_fd=dir_fd)
        os.rmdir = rmdir
    """
    script = "\n    send(os.environ['HOLDFAST_WORKER_PAGE']); forever()\n"
    env = {"TMPDIR": str(temporary), **meddled(tmp_path, meddling)}
    with Job(tmp_path, script, env=env) as job:
        page = Path(job.messages.next()[0])
        job.signal(signal.SIGHUP)
        assert job.end()[0] == 128 + signal.SIGHUP
        assert not page.parent.exists()
        assert not [*temporary.iterdir()]


def test_excluded_signal_keeps_its_default_action(tmp_path: Path) -> None:
    with Job(tmp_path, "\n    send('leader'); forever()\n", "--signals-to-handle=SIGINT") as job:
        everyone = Watched(*job.messages.take(1).values(), job.keeper())
        job.signal(signal.SIGTERM)
        assert job.end()[0] == -signal.SIGTERM
        everyone.wait_until_exited()
