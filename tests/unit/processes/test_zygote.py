"""The zygote's program: the problems that it reports during imports, and its forks.

`test_zygote_child` tests the state of a forked worker, and `test_warm_start` the agent's side.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from zygotes import Harness

from holdfast.processes.zygote import warm_start, zygote_program
from real_jobs import Watched

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.processes.keeper.keeper_client import Keeper


def test_agent_and_zygote_keep_the_same_descriptors_free() -> None:
    assert warm_start.RESERVED_END == zygote_program.RESERVED_END
    assert warm_start.MARSHAL_VERSION == zygote_program.MARSHAL_VERSION
    assert zygote_program.__file__ == warm_start.PROGRAM


def preloaded(
    folder: Path, caplog: pytest.LogCaptureFixture, *modules: str, **how: str
) -> list[str]:
    """Return the console output while modules are imported; check that a worker runs."""
    env = {**os.environ, **how}
    with Harness("-c", "print('ran')", cwd=folder, modules=modules, env=env) as harness:
        assert harness.run().out == "ran\n"
        return caplog.messages


def test_unimportable_modules_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "raises.py").write_text("raise ValueError('one\\nreason')")
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(3)")
    output = preloaded(tmp_path, caplog, "raises", "no.such", "leaves", "json.tool")
    expected = (
        "raises: ValueError: one reason",
        "no.such: ModuleNotFoundError",
        "leaves: SystemExit",
    )
    assert all(text in line for text, line in zip(expected, output, strict=True)), output


def test_a_module_that_opens_a_gpu_ends_preloading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torch.py").write_text("class cuda:\n    is_initialized = staticmethod(bool)\n")
    (tmp_path / "uses.py").write_text("import torch; torch.cuda.is_initialized = lambda: True\n")
    with Harness("-c", "pass", cwd=tmp_path, modules=["torch", "uses"]) as harness:
        assert not harness.warm.can_fork(harness.argv, harness.env, {})
        assert harness.warm.fileno() == -1
        (output,) = caplog.messages
        assert "uses" in output
        assert "CUDA" in output
        harness.warm.prepare(harness.keeper)
        assert harness.warm.fileno() == -1
        assert harness.run(warm=False).exitcode == 0


def test_workers_are_started_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "BATCH_MAX", 4)
    out = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDWR)
    program = (
        "import os; os.write(1, os.environb[b'RANK'] + b' ' * len(os.listdir('/proc/self/fd')))"
    )
    with Harness("-c", program, cwd=tmp_path) as harness:
        fds = {0: null, 1: out, 2: out}
        for rank in range(11):
            harness.warm.spawn(
                100 + rank, harness.argv, env={**harness.env, "RANK": str(rank)}, cwd="/", fds=fds
            )
        harness.warm.begin()
        assert [harness.exited(100 + rank).exitcode for rank in range(11)] == [0] * 11
    os.close(out)
    os.close(null)
    received = (tmp_path / "out").read_text()
    assert sorted(map(int, received.split())) == [*range(11)]
    assert received.count(" ") == 11 * 4, "each has three streams, and the listing's descriptor"


def test_worker_that_is_never_adopted_exits(tmp_path: Path) -> None:
    class Deaf:
        """A keeper that does not adopt."""

        def __init__(self, real: Keeper) -> None:
            self.real = real
            self.asked: list[int] = []

        def adopt(self, key: int, pid: int, *_: int) -> None:
            self.asked.append(pid)

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

    with Harness("-c", "print('never')", cwd=tmp_path) as harness:
        deaf = Deaf(harness.keeper)
        assert harness.warm._zygote is not None
        harness.warm._zygote.keeper = deaf  # type: ignore[assignment]
        read, write = os.pipe()
        harness.start(fds={1: write})
        os.close(write)
        while not deaf.asked:
            harness.handle_events()
        Watched(*deaf.asked).wait_until_exited()
        with open(read) as stream:
            assert stream.read() == ""


@pytest.mark.parametrize("victim", ["keeper", "agent"])
def test_zygote_exits_with_the_keeper_and_with_the_agent(tmp_path: Path, victim: str) -> None:
    with Harness("-c", "pass", cwd=tmp_path) as harness:
        gone = Watched(*harness.warm.pids())
        if victim == "keeper":
            os.kill(harness.keeper.pid, signal.SIGKILL)
        else:
            harness.warm.close()
        gone.wait_until_exited()
