from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from holdfast.elastic.multiprocessing import start_processes
from holdfast.errors import UsageError
from holdfast.processes.keeper.keeper_client import Keeper
from holdfast.processes.logs.specs import (
    CLAIM_FILE,
    DefaultLogsSpecs,
    LogsDest,
    remove_abandoned_directories,
)
from holdfast.processes.logs.std import Std


def envs_of(size: int, run_id: str = "job", restarts: int = 0) -> dict[int, dict[str, str]]:
    return {
        rank: {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        for rank in range(size)
    }


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_layout_is_that_of_torchelastic(tmp_path: Path) -> None:
    root = tmp_path / "a" / "logs"
    specs = DefaultLogsSpecs(str(root), redirects=Std.OUT, tee={1: Std.ERR})
    envs = envs_of(2, restarts=3)

    dest = specs.reify(envs)

    assert specs.run_dir is not None
    assert re.fullmatch(r"job_[0-9a-f]{8}", os.path.basename(specs.run_dir))
    assert os.path.dirname(specs.run_dir) == str(root)
    assert stat.S_IMODE(os.stat(specs.run_dir).st_mode) == 0o700
    attempt = f"{specs.run_dir}/attempt_3"
    assert dest == LogsDest(
        stdouts={0: f"{attempt}/0/stdout.log", 1: f"{attempt}/1/stdout.log"},
        stderrs={0: "", 1: f"{attempt}/1/stderr.log"},
        tee_stdouts={},
        tee_stderrs={1: f"{attempt}/1/stderr.log"},
        error_files={0: f"{attempt}/0/error.json", 1: f"{attempt}/1/error.json"},
        filtered_stdout=f"{attempt}/filtered_stdout.log",
        filtered_stderr=f"{attempt}/filtered_stderr.log",
        tail_stdouts={},
        tail_stderrs={0: f"{attempt}/0/stderr.tail"},
    )
    for rank, env in envs.items():
        assert env["TORCHELASTIC_ERROR_FILE"] == dest.error_files[rank]
    run = os.path.basename(specs.run_dir)
    assert files_below(root) == {
        run, f"{run}/attempt_3", f"{run}/attempt_3/0", f"{run}/attempt_3/1",
    }  # fmt: skip


def test_second_start_with_the_same_count_keeps_the_first_logs(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
    paths: list[str] = []
    for restarts in (0, 0, 1, 0):
        path = specs.reify(envs_of(1, restarts=restarts)).stdouts[0]
        with open(path, "x") as file:
            file.write(f"start {len(paths)}")
        paths.append(path)
    assert [path.split("/")[-3] for path in paths] == [
        "attempt_0", "attempt_0_1", "attempt_1", "attempt_0_2",
    ]  # fmt: skip
    for number, path in enumerate(paths):
        with open(path) as file:
            assert file.read() == f"start {number}"


def test_workers_start_in_the_directory_that_the_program_reified(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
    for attempt in ("attempt_0", "attempt_0_1"):
        envs = envs_of(1)
        dest = specs.reify(envs)
        context = start_processes(
            "x", "/bin/sh", {0: ("-c", "echo seen")}, envs, specs, duplicate_stdout_filters=["se"]
        )
        assert context.wait() is not None
        for path in (dest.filtered_stdout, dest.stdouts[0]):
            assert Path(path).read_text().endswith("seen\n")
        assert os.path.basename(os.path.dirname(dest.filtered_stdout)) == attempt
    assert specs.run_dir is not None
    assert sorted(os.listdir(specs.run_dir)) == ["attempt_0", "attempt_0_1"]


@pytest.mark.parametrize("run_id", ["team/exp/1", "..", "a\nb\x00c", "\u00e9" * 300, ""])
def test_any_run_id_is_one_directory(tmp_path: Path, run_id: str) -> None:
    specs = DefaultLogsSpecs(str(tmp_path))
    specs.reify(envs_of(1, run_id=run_id))
    assert specs.run_dir is not None
    assert os.path.dirname(specs.run_dir) == str(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [os.path.basename(specs.run_dir)]
    assert specs.run_dir.isprintable()


@pytest.mark.parametrize("name", ["TMPDIR", "TEMP", "TMP"])
def test_own_root_is_private_and_can_be_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for each in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, str(tmp_path))
    specs = DefaultLogsSpecs()
    root = specs.root_log_dir
    assert re.fullmatch(re.escape(str(tmp_path)) + r"/holdfast_[0-9a-f]{8}", root)
    assert stat.S_IMODE(os.stat(root).st_mode) == 0o700
    assert specs.root_log_dir == root
    specs.reify(envs_of(2))
    assert specs.run_dir is not None
    assert specs.run_dir.startswith(f"{root}/job_")

    specs.discard_if_temporary()

    assert files_below(tmp_path) == set()
    assert specs.run_dir is None
    specs.discard_if_temporary()


def test_tails_of_the_last_two_starts_are_kept(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path))
    written = []
    for start in range(3):
        tail = Path(specs.reify(envs_of(1, restarts=start)).tail_stdouts[0])
        written += [tail, tail.with_name("stdout.tail.1")]
        for one in written[-2:]:
            one.write_text("")
    assert [one.exists() for one in written] == [False, False, True, True, True, True]
    specs.discard_tails()
    assert not any(one.exists() for one in written)


def test_directories_of_killed_agents_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    abandoned, failed, running = (DefaultLogsSpecs().for_another_run() for _ in range(3))
    for specs in (abandoned, failed, running):
        specs.reify(envs_of(1))
    failed.keep()
    os.close(abandoned._claim_fd)  # As if its agent had been killed.
    new, other = tmp_path / "holdfast_0", tmp_path / "holdfast_2"
    for folder, host in ((new, ""), (other, "other.host")):
        folder.mkdir()
        (folder / CLAIM_FILE).write_text(host)
    strange = tmp_path / "holdfast_1"
    strange.mkdir()
    os.mkfifo(strange / CLAIM_FILE)
    shared = tmp_path / "holdfast_shared"  # The user's own, to which others may add files.
    shared.mkdir()
    (shared / CLAIM_FILE).write_text(os.uname().nodename)
    shared.chmod(0o777)
    roots = [Path(one.root_log_dir) for one in (failed, running)]

    remove_abandoned_directories()

    assert {*tmp_path.iterdir()} == {*roots, new, other, strange, shared}
    running.discard_if_temporary()
    Keeper.keep_if_killed(abandoned.root_log_dir)


def test_link_in_place_of_a_temporary_directory_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    specs = DefaultLogsSpecs().for_another_run()
    specs.reify(envs_of(1))
    root, other = Path(specs.root_log_dir), tmp_path / "other"
    (other / "folder").mkdir(parents=True)
    (other / "folder" / "file").touch()
    root.rename(tmp_path / "removed")  # As if a cleaner had removed it.
    root.symlink_to(other)

    specs.discard_if_temporary()

    assert files_below(other) == {"folder", "folder/file"}


def test_file_at_the_log_dir_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for log_dir in (file, file / "below"):
        with pytest.raises(UsageError, match=re.escape(str(log_dir))):
            DefaultLogsSpecs(str(log_dir)).reify(envs_of(1))


@pytest.mark.parametrize(
    "text",
    ["", "4", "-1", "03", "1 ", "a", ":", "0:", ":1", "0:4", "0:1,", "0:1 ,1:2", "0:1;1:2", "x:1",
     "0=1", "\u0661", "\u0661:1", "1\n\n", "0:1:2", "1" * 7 + ":1"],
)  # fmt: skip
def test_other_text_is_a_usage_error_that_quotes_it(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Std.from_str(text)
    assert repr(text) in str(caught.value)
    assert "0:1,1:2" in caught.value.hint
