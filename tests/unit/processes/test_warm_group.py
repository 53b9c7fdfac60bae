"""Groups whose workers a zygote forks."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.processes.keeper.keeper_client import Keeper
from holdfast.processes.keeper.keeper_program import children_of
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.logs.std import Std
from holdfast.processes.workers.group import GroupSpec, start_group
from holdfast.processes.zygote.warm_start import warm_start
from real_jobs import Watched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from holdfast.processes.workers.group import RunningGroup
    from holdfast.processes.zygote.warm_start import WarmStart

PATIENCE_S = 60
TELLS = "import os, sys; print('warm' if 'slow' in sys.modules else 'cold', os.environ['RANK'])"


class Started:
    """A keeper and a warm start, for contexts whose output goes to files."""

    def __init__(self, folder: Path) -> None:
        (folder / "slow.py").touch()
        self.folder = folder
        self.keeper = Keeper.start()
        warm = warm_start(["slow"], sys.executable, ["-c", TELLS], "spawn", {})
        assert warm is not None
        self.warm: WarmStart = warm
        self.contexts: list[RunningGroup] = []

    def context(self, *programs: str) -> RunningGroup:
        """Start one worker for each program."""
        self.warm.await_ready(self.keeper)
        ranks = range(len(programs))
        spec = GroupSpec(
            "trainer",
            sys.executable,
            {rank: ("-c", programs[rank]) for rank in ranks},
            {rank: {"RANK": str(rank)} for rank in ranks},
            DefaultLogsSpecs(str(self.folder / "logs"), redirects=Std.ALL),
        )
        context = start_group(spec, keeper=self.keeper, warm=self.warm)
        self.contexts.append(context)
        return context

    def output(self, context: RunningGroup) -> list[str]:
        """Wait until all workers have exited, and return their output."""
        result = context.wait(PATIENCE_S)
        assert result is not None
        assert not result.is_failed(), result
        lines = []
        for path in result.stdouts.values():
            with open(path) as stream:
                lines.append(stream.read())
        return lines


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    monkeypatch.chdir(tmp_path)
    made = Started(tmp_path)
    yield made
    for context in made.contexts:
        context.close(signal.SIGKILL)
    made.warm.close()
    made.keeper.close()


def test_lost_zygote_is_restarted_while_workers_run(started: Started) -> None:
    context = started.context("import sys; sys.stdin.read(); import time; time.sleep(1000)")
    first = started.warm.pids()[0]
    gone = Watched(first)
    os.kill(first, signal.SIGKILL)
    gone.wait_until_exited()
    while started.warm.pids() in ([], [first]):  # It reports its process id after its imports.
        assert select.select([context.fileno()], [], [], PATIENCE_S)[0]
        assert context.poll_events(time.monotonic()) == []
    assert context.running() == {0}
    assert set(children_of(started.keeper.pid)) >= {*started.warm.pids(), *context.pids().values()}
    context.close(signal.SIGKILL)
    assert started.output(started.context(TELLS)) == ["warm 0\n"]


def test_failed_start_cancels_its_requests(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.processes.logs.specs import WorkerStdio

    real = WorkerStdio.open

    def full(self: Any, rank: int) -> dict[int, int]:
        if rank == 1:
            raise EnvironmentProblem("no space")
        return real(self, rank)

    monkeypatch.setattr(WorkerStdio, "open", full)
    with pytest.raises(EnvironmentProblem, match="no space"):
        started.context("open('ran', 'w')", "pass")
    monkeypatch.undo()
    os.chdir(started.folder)
    assert started.output(started.context(TELLS)) == ["warm 0\n"]
    assert not (started.folder / "ran").exists()
