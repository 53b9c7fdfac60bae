from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from functions_to_call import add

from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.processes.keeper.client import Keeper
from holdfast.processes.logs.specs import DefaultLogsSpecs, Std
from holdfast.processes.workers.command_workers import SubprocessContext
from holdfast.processes.workers.function_workers import MultiprocessContext
from holdfast.processes.workers.start import start_processes

if TYPE_CHECKING:
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


def test_a_text_is_a_program(tmp_path: Path) -> None:
    context = start_processes(
        "x", "test", {0: ("a", "=", "a"), 1: (1, "-lt", 2)}, ENVS, logs(tmp_path)
    )
    assert type(context) is SubprocessContext
    assert set(context.pids()) == {0, 1}
    assert values(context) == {0: None, 1: None}


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_anything_else_is_a_function(tmp_path: Path, method: str) -> None:
    args = {0: (1, 2), 1: (3, 4)}
    context = start_processes("x", add, args, ENVS, logs(tmp_path), start_method=method)
    assert type(context) is MultiprocessContext
    assert context.start_method == method
    assert values(context) == {0: 3, 1: 7}


def test_functions_are_spawned_unless_told_otherwise(tmp_path: Path) -> None:
    context = start_processes("x", add, {0: (1, 1)}, {0: {}}, logs(tmp_path))
    assert isinstance(context, MultiprocessContext)
    assert context.start_method == "spawn"
    assert values(context) == {0: 2}


@pytest.mark.parametrize(
    ("args", "envs", "said"),
    [
        ({0: ()}, {0: {}, 1: {}}, r"^envs: expected one entry .* \[0\], got \[0, 1\]"),
        ({0: (), 1: ()}, {0: {}}, r"^envs: expected one entry .* \[0, 1\], got \[0\]"),
        ({1: ()}, {1: {}}, r"^args: expected one entry .* \[0\], got \[1\]"),
        ({0: (), 2: ()}, {0: {}, 2: {}}, r"^args: expected one entry .* \[0, 1\], got \[0, 2\]"),
    ],
)
@pytest.mark.parametrize("what", ["true", add])
def test_every_rank_needs_an_entry(
    tmp_path: Path,
    what: object,
    args: dict[int, tuple[object, ...]],
    envs: dict[int, dict[str, str]],
    said: str,
) -> None:
    with pytest.raises(RuntimeError, match=said):
        start_processes("x", what, args, envs, logs(tmp_path))  # type: ignore[arg-type]
    assert not (tmp_path / "logs").exists(), "folders were made for a start that cannot be"


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


def test_all_settings_reach_the_context(tmp_path: Path) -> None:
    folder = logs(tmp_path)
    folder._tee = Std.ALL
    keeper = Keeper.start()
    context = start_processes(
        "trainer",
        "sh",
        {0: ("-c", "echo loss 1; echo other; echo bad >&2")},
        {0: {}},
        folder,
        log_line_prefixes={0: "<0> "},
        numa_options=None,
        duplicate_stdout_filters=["loss"],
        duplicate_stderr_filters=["bad"],
        keeper=keeper,
        capture_stderr=False,
    )
    assert values(context) == {0: None}
    assert Path(context.filtered_stdout).read_text() == "<0> loss 1\n"
    assert Path(context.filtered_stderr).read_text() == "<0> bad\n"
    assert not keeper.lost
    keeper.close()
    assert context.name == "trainer"


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
