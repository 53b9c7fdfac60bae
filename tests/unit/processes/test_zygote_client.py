"""The agent's side of the zygote: whatever becomes of it, workers are started."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from zygotes import Nest

from holdfast.processes.keeper.client import Keeper
from holdfast.processes.keeper.main import children_of
from holdfast.processes.procfs import state_of
from holdfast.processes.zygote import client
from holdfast.processes.zygote.client import PythonCommand, WarmStart
from real_jobs import Watched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Says whether this worker was forked from a zygote.
TELLS = "import sys; print('warm' if 'slow' in sys.modules else 'cold')"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").touch()
    return tmp_path


@pytest.fixture
def nest(folder: Path) -> Iterator[Nest]:
    with Nest("-c", TELLS, cwd=folder, modules=["slow"]) as made:
        yield made


def frozen(nest: Nest) -> None:
    """Stop the zygote, and wait until it is stopped."""
    pid = nest.warm.pids()[0]
    os.kill(pid, signal.SIGSTOP)
    while state_of(pid) != "T":
        os.sched_yield()


def killed(nest: Nest) -> int:
    """Kill the zygote, wait until it is gone, and return what its process id was."""
    pid = nest.warm.pids()[0]
    gone = Watched(pid)
    os.kill(pid, signal.SIGKILL)
    gone.all_gone()
    return pid


def revived(nest: Nest) -> None:
    before = os.getcwd()
    os.chdir(nest.cwd)
    try:
        nest.warm.await_ready(nest.keeper)
    finally:
        os.chdir(before)


def test_a_zygote_that_dies_idle_is_started_again(
    nest: Nest, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2 * client.LOSSES_MAX):
        first = killed(nest)
        revived(nest)
        assert nest.warm.pids()[0] != first
        assert nest.run().out == "warm\n"  # So that its losses are not in a row.
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_one_that_dies_again_and_again_is_done_without(
    nest: Nest, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(client.LOSSES_MAX):
        killed(nest)
        revived(nest)
    assert not nest.warm.takes(nest.argv, nest.env, {})
    assert nest.warm.fileno() == -1
    assert nest.warm.pids() == [] or not nest.warm.pids()[1:]
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert nest.run(warm=False).out == "cold\n"


def test_a_module_that_crashes_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "crashes.py").write_text("import os; os.abort()")
    with Nest("-c", "pass", cwd=folder, modules=["slow", "crashes"]) as nest:
        assert not nest.warm.takes(nest.argv, nest.env, {})
        said = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == 1
        assert "imported crashes" in said[0]


def test_an_interpreter_that_is_not_there(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper = Keeper.start()
    command = PythonCommand(str(folder / "python"), (), "c", "pass", ())
    start = WarmStart(command, ["slow"], env=os.environ)
    start.await_ready(keeper)
    assert start.fileno() == -1
    start.close()
    keeper.close()


def test_a_worker_whose_zygote_dies_meanwhile_starts_cold(nest: Nest) -> None:
    frozen(nest)
    read, write = os.pipe()
    key = nest.start(fds={1: write})
    os.close(write)
    killed(nest)
    assert nest.exited(key).exitcode == 0
    with open(read) as stream:
        assert stream.read() == "cold\n"
    revived(nest)
    assert nest.run().out == "warm\n"


def test_a_frozen_zygote_is_given_up(
    nest: Nest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "FORK_S_MAX", 0.2)
    frozen(nest)
    gone = Watched(nest.warm.pids()[0])
    assert nest.run().out == "cold\n"
    gone.all_gone()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    monkeypatch.setattr(client, "FORK_S_MAX", 60.0)
    revived(nest)
    assert nest.run().out == "warm\n"


def test_a_frozen_zygote_takes_no_more_than_the_socket_holds(
    nest: Nest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A send that would wait for ever is given up as well."""
    monkeypatch.setattr(client, "FORK_S_MAX", 0.2)
    frozen(nest)
    env = {**nest.env, **{f"VARIABLE_{number}": "x" * 100_000 for number in range(10)}}
    assert nest.run(env=env).out == "cold\n"


def test_a_fork_that_hangs_is_given_up_with_all_below_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FORK_S_MAX", 0.5)
    (folder / "hangs.py").write_text(
        "import os, signal, threading\n"
        "os.register_at_fork(after_in_child=lambda: threading.Event().wait())\n"
    )
    with Nest("-c", TELLS, cwd=folder, modules=["slow", "hangs"]) as nest:
        assert nest.run().out == "cold\n"
        Watched(*nest.warm.pids()).all_gone()


def test_workers_survive_their_zygote(nest: Nest) -> None:
    stdin, end = os.pipe()
    key = nest.start("-c", "import sys; sys.stdin.read(); sys.exit(7)", fds={0: stdin})
    nest.pid(key)
    os.close(stdin)
    killed(nest)
    os.close(end)
    assert nest.exited(key).exitcode == 7


def test_workers_that_are_not_wanted_any_more_never_run(nest: Nest) -> None:
    frozen(nest)
    read, write = os.pipe()
    nest.start(fds={1: write})
    os.close(write)
    nest.warm.forget()
    os.kill(nest.warm.pids()[0], signal.SIGCONT)
    with open(read) as stream:
        assert stream.read() == ""
    assert nest.run().out == "warm\n"
    assert children_of(nest.keeper.pid) == nest.warm.pids()


def test_another_keeper_gets_another_zygote(nest: Nest, caplog: pytest.LogCaptureFixture) -> None:
    first = Watched(nest.warm.pids()[0])
    os.kill(nest.keeper.pid, signal.SIGKILL)
    first.all_gone()
    nest.warm.await_ready(nest.keeper)  # Returns: nothing can be awaited of a lost keeper.
    assert nest.keeper.lost
    nest.keeper.close()
    nest.keeper = Keeper.start()
    assert not nest.warm.takes(nest.argv, nest.env, {})
    revived(nest)
    assert nest.run().out == "warm\n"
    assert caplog.messages == []


def test_another_interpreter_can_be_the_workers(tmp_path: Path) -> None:
    """It need not know of this project: neither its path nor its packages."""
    link = tmp_path / "python"
    link.symlink_to(os.path.realpath(sys.executable))
    command = PythonCommand(str(link), ("-I", "-S"), "c", "pass", ())
    keeper = Keeper.start()
    start = WarmStart(command, ["json"], env={})
    start.await_ready(keeper)
    assert start.takes([str(link), "-I", "-S", "-c", "pass"], {}, {})
    start.close()
    keeper.close()
