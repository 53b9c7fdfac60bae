from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest
from functions_to_call import add

from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.processes.keeper.client import Keeper
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.workers.start import start_processes

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.processes.workers.group import PContext

PATIENCE_S = 60
ENVS: dict[int, dict[str, str]] = {0: {}, 1: {}}


def logs(folder: Path) -> DefaultLogsSpecs:
    return DefaultLogsSpecs(log_dir=str(folder / "logs"))


def values(context: PContext) -> dict[int, object]:
    try:
        result = context.wait(PATIENCE_S)
        assert result is not None
        assert result.failures == {}
        return result.return_values
    finally:
        context.close()


def test_an_unknown_start_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^start_method: 'thread' is unknown; accepted: spawn"):
        start_processes("x", add, {0: (1, 1)}, {0: {}}, logs(tmp_path), start_method="thread")


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_too_few_descriptors_are_the_machines_problem(tmp_path: Path, method: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    args: dict[int, tuple[object, ...]] = dict.fromkeys(range(100), (1, 1))
    envs: dict[int, dict[str, str]] = {rank: {} for rank in args}
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
    try:
        with pytest.raises(EnvironmentProblem, match=r"^could not start 100 .*`ulimit -n`"):
            start_processes("x", add, args, envs, logs(tmp_path), start_method=method)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_workers_start_in_a_folder_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    context = start_processes("x", "true", {0: ()}, {0: {}}, logs(tmp_path))
    result = context.wait()
    assert result is not None
    assert not result.is_failed()


def test_only_spawned_functions_share_the_keeper_of_commands(tmp_path: Path) -> None:
    """A forked worker needs a keeper that has this moment's memory."""
    keeper = Keeper.start()
    for method in ("spawn", "fork", "forkserver"):
        context = start_processes(
            "x", add, {0: (1, 1)}, {0: {}}, logs(tmp_path), start_method=method, keeper=keeper
        )
        assert (context._keeper is keeper) == (method == "spawn")
        assert values(context) == {0: 2}
    keeper.close()
