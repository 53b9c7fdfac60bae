"""The agent's side of the zygote: workers start, even if the zygote fails in any way."""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from zygotes import Harness

from holdfast.processes.keeper.keeper_program import children_of
from holdfast.processes.procfs import state_of
from holdfast.processes.zygote import warm_start
from holdfast.processes.zygote.warm_start import PythonCommand, parse_command
from real_jobs import Watched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# Prints whether a zygote forked this worker.
TELLS = "import sys; print('warm' if 'slow' in sys.modules else 'cold')"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").touch()
    return tmp_path


@pytest.fixture
def harness(folder: Path) -> Iterator[Harness]:
    with Harness("-c", TELLS, cwd=folder, modules=["slow"]) as made:
        yield made


def frozen(harness: Harness) -> None:
    """Stop the zygote, and wait until it is stopped."""
    pid = harness.warm.pids()[0]
    os.kill(pid, signal.SIGSTOP)
    while state_of(pid) != "T":
        os.sched_yield()


def killed(harness: Harness) -> int:
    """Kill the zygote, wait until it has exited, and return its process id."""
    pid = harness.warm.pids()[0]
    gone = Watched(pid)
    os.kill(pid, signal.SIGKILL)
    gone.wait_until_exited()
    return pid


def revived(harness: Harness) -> None:
    before = os.getcwd()
    os.chdir(harness.cwd)
    try:
        harness.warm.await_ready(harness.keeper)
    finally:
        os.chdir(before)


def test_zygote_lost_three_times_is_not_restarted(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(warm_start.LOSSES_MAX):
        killed(harness)
        revived(harness)
    assert not harness.warm.can_fork(harness.argv, harness.env, {})
    assert harness.warm.fileno() == -1
    assert harness.warm.pids() == [] or not harness.warm.pids()[1:]
    output = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(output) == 1
    assert harness.run(warm=False).out == "cold\n"


def test_zygote_of_a_dead_keeper_is_not_waited_for() -> None:
    """The keeper exits before the request for a zygote, and the agent has not noticed it yet."""
    unprepared = Harness("-c", TELLS)
    gone = Watched(unprepared.keeper.pid)
    os.kill(unprepared.keeper.pid, signal.SIGKILL)
    gone.wait_until_exited()
    with unprepared:
        assert not unprepared.warm.can_fork(unprepared.argv, unprepared.env, {})


def test_unstartable_zygote_is_abandoned(harness: Harness) -> None:
    """The keeper has no free descriptor for it."""
    killed(harness)
    full = max(int(name) for name in os.listdir(f"/proc/{harness.keeper.pid}/fd")) + 1
    resource.prlimit(harness.keeper.pid, resource.RLIMIT_NOFILE, (full, full))
    revived(harness)
    assert not harness.warm.can_fork(harness.argv, harness.env, {})
    assert harness.warm.fileno() == -1


def test_frozen_zygote_is_abandoned(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm_start, "FORK_S_MAX", 0.2)
    frozen(harness)
    gone = Watched(harness.warm.pids()[0])
    assert harness.run().out == "cold\n"
    gone.wait_until_exited()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    monkeypatch.setattr(warm_start, "FORK_S_MAX", 60.0)
    revived(harness)
    assert harness.run().out == "warm\n"


def test_changed_startup_variables_prevent_a_warm_start(harness: Harness) -> None:
    assert harness.warm.can_fork(harness.argv, {**harness.env, "RANK": "1"}, {})
    assert not harness.warm.can_fork(harness.argv, {**harness.env, "PYTHONHASHSEED": "1"}, {})


@pytest.mark.parametrize("words", [("-i", "train.py"), ("-O", "-c", TELLS)])
def test_zygote_takes_no_command_with_other_flags(harness: Harness, words: tuple[str, ...]) -> None:
    assert not harness.warm.can_fork([sys.executable, *words], harness.env, {})


def test_workers_survive_their_zygote(harness: Harness) -> None:
    stdin, end = os.pipe()
    key = harness.start("-c", "import sys; sys.stdin.read(); sys.exit(7)", fds={0: stdin})
    harness.pid(key)
    os.close(stdin)
    killed(harness)
    os.close(end)
    assert harness.exited(key).exitcode == 7


def test_dropped_workers_never_run(harness: Harness) -> None:
    frozen(harness)
    read, write = os.pipe()
    harness.start(fds={1: write})
    os.close(write)
    harness.warm.forget()
    os.kill(harness.warm.pids()[0], signal.SIGCONT)
    with open(read) as stream:
        assert stream.read() == ""
    assert harness.run().out == "warm\n"
    assert children_of(harness.keeper.pid) == harness.warm.pids()


@pytest.mark.parametrize(
    ("line", "flags", "kind", "what", "args"),
    [
        ("train.py", "", "script", "train.py", ""),
        ("-u train.py -u -m x", "-u", "script", "train.py", "-u -m x"),
        ("-u -m pkg.train --lr 1", "-u", "m", "pkg.train", "--lr 1"),
        ("-mpkg.train", "", "m", "pkg.train", ""),
        ("-c pass -x", "", "c", "pass", "-x"),
        ("-uOO -Wignore train.py", "-u -O -O -W ignore", "script", "train.py", ""),
        ("-W error -X dev -Xutf8 train.py", "-W error -X dev -X utf8", "script", "train.py", ""),
        ("-IBmtrain 1", "-I -B", "m", "train", "1"),
        ("-bEsSPdqR -cpass", "-b -E -s -S -P -d -q -R", "c", "pass", ""),
    ],
)
def test_python_commands_are_parsed(line: str, flags: str, kind: str, what: str, args: str) -> None:
    command = parse_command(["python", *line.split()])
    expected = tuple(flags.split()), kind, what, tuple(args.split())
    assert command == PythonCommand("python", *expected)


@pytest.mark.parametrize(
    "line",
    ["", "-", "-u -", "-i train.py", "-ui train.py", "--version", "-V", "-- train.py",
     "-x train.py", "-u", "-m", "-c", "-W", "-X", "--check-hash-based-pycs always train.py",
     "-Z train.py"],
)  # fmt: skip
def test_commands_with_unknown_interpreters_or_flags_are_not_parsed(line: str) -> None:
    assert parse_command(["python", *line.split()]) is None
