from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.cli import devices, flags
from holdfast.cli.flags import FromEnvironment
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def one_line(error: UsageError) -> str:
    text = str(error)
    assert "\n" not in text
    return text


def test_from_environment_is_the_text_and_names_the_variable() -> None:
    value = FromEnvironment("2", "PET_NNODES")
    assert value == "2"
    assert type(str(value)) is str
    assert flags.source_of(value, "--nnodes") == "PET_NNODES"
    assert flags.source_of("2", "--nnodes") == "--nnodes"
    assert pickle.loads(pickle.dumps(value)).variable == "PET_NNODES"


@pytest.mark.parametrize(
    ("text", "expected"), [("1", (1, 1)), ("3", (3, 3)), ("1:4", (1, 4)), (" 2 : 2 ", (2, 2))]
)
def test_nnodes(text: str, expected: tuple[int, int]) -> None:
    assert flags.parse_min_max_nnodes(text) == expected


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "2:1", "0:1", "1:2:3", "1:", ":1", "1.0"])
def test_nnodes_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        flags.parse_min_max_nnodes(text)
    assert one_line(caught.value) == (
        f"--nnodes: {text!r} is not a number of nodes; accepted: N or MIN:MAX, from 1, MIN <= MAX"
    )


def test_a_value_from_the_environment_is_refused_by_its_variable() -> None:
    with pytest.raises(UsageError, match=r"^PET_NNODES: 'x' is not a number of nodes"):
        flags.parse_min_max_nnodes(FromEnvironment("x", "PET_NNODES"))


@pytest.mark.parametrize(("text", "expected"), [("1", 1), ("64", 64), (" 2 ", 2), ("+3", 3)])
def test_worker_count_as_a_number(text: str, expected: int) -> None:
    assert flags.determine_local_world_size(text) == expected


@pytest.mark.parametrize("text", ["x", "0", "-2", "2.0", "", "two workers", "GPU"])
def test_worker_count_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        flags.determine_local_world_size(text)
    assert one_line(caught.value) == (
        f"--nproc-per-node: {text!r} is not a worker count; "
        "accepted: a whole number from 1, or cpu, gpu, xpu, auto"
    )


def test_cpu_counts_what_this_process_may_use() -> None:
    assert flags.determine_local_world_size("cpu") == len(os.sched_getaffinity(0))


def test_gpu_and_auto_count_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "nvidia_count", lambda: 3)
    assert flags.determine_local_world_size("gpu") == 3
    assert flags.determine_local_world_size("auto") == 3


def test_auto_without_an_accelerator_counts_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator_count", lambda: 0)
    assert flags.determine_local_world_size("auto") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("word", ["gpu", "xpu"])
def test_a_device_that_is_not_there_is_refused(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, f"{word}_count", lambda: 0)
    with pytest.raises(UsageError, match=f"^--nproc-per-node: '{word}' finds no such device"):
        flags.determine_local_world_size(word)


def test_a_backend_added_to_torch_is_counted_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "named_backend_count", {"npu": 8}.__getitem__)
    assert flags.determine_local_world_size("npu") == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("  ", {}),
        ("a=1", {"a": "1"}),
        (" a = 1 , b = x=y ", {"a": "1", "b": "x=y"}),
        ("a=1,a=2", {"a": "2"}),
    ],
)
def test_rdzv_conf(text: str, expected: dict[str, str]) -> None:
    assert flags.parse_rdzv_conf(text) == expected


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=1,", ",a=1", "a=1,,b=2"])
def test_rdzv_conf_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"^--rdzv-conf: '{text}' has the item"):
        flags.parse_rdzv_conf(text)


@pytest.mark.parametrize(
    "key", ["run_id", "backend", "endpoint", "min_nodes", "max_nodes", "local_addr"]
)
def test_rdzv_conf_cannot_set_what_has_a_flag(key: str) -> None:
    with pytest.raises(UsageError, match=f"sets '{key}', which has a flag of its own"):
        flags.parse_rdzv_conf(f"a=1,{key}=2")


FILTERS = ["a", "a,b", "a,,b", "a,,,b", "a,,,,b", ",a", "a,", "", "a, b", ",,", ",", ",,,a"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("orange,,x,zzz", ["orange,x", "zzz"]), ("a,,,b", ["a,", "b"]), (",", ["", ""]), ("", [""])],
)
def test_filters(text: str, expected: list[str]) -> None:
    assert flags.split_filters(text) == expected


@pytest.mark.torch
@pytest.mark.parametrize("text", FILTERS)
def test_filters_split_as_in_torch(text: str) -> None:
    from torch.distributed.run import get_args_parser

    theirs = get_args_parser().parse_args([f"--duplicate-stdout-filters={text}", "x"])
    assert flags.split_filters(text) == theirs.duplicate_stdout_filters


def test_local_ranks() -> None:
    assert flags.parse_local_ranks("") is None
    assert flags.parse_local_ranks("0, 12,0") == {0, 12}


@pytest.mark.parametrize("text", [",", "a", "0,", "-1", "0:1"])
def test_local_ranks_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"^--local-ranks-filter: '{text}' is not a list"):
        flags.parse_local_ranks(text)


def test_streams() -> None:
    from holdfast.processes.logs.specs import Std

    assert flags.parse_streams("3", "--tee") == Std.ALL
    assert flags.parse_streams("0:1,12:2", "--tee") == {0: Std.OUT, 12: Std.ERR}


def test_streams_refused() -> None:
    with pytest.raises(UsageError) as caught:
        flags.parse_streams("both", "--redirects")
    assert one_line(caught.value).startswith("--redirects: 'both' does not select streams; ")
    with pytest.raises(UsageError, match=r"^PET_TEE: '9'"):
        flags.parse_streams(FromEnvironment("9", "PET_TEE"), "--tee")


def test_module_names() -> None:
    assert flags.parse_module_names("torch, my.module", "--preload") == ("torch", "my.module")
    assert flags.parse_module_names("", "--preload") == ()
    named = flags.parse_module_names(FromEnvironment("auto", "PET_PRELOAD"), "--preload")
    assert {type(name) for name in named} == {str}


def test_module_names_refused() -> None:
    with pytest.raises(UsageError) as caught:
        flags.parse_module_names("train.py,my-module", "--preload")
    assert one_line(caught.value).startswith("--preload: 'my-module' is not the name of a module")
    with pytest.raises(UsageError, match=r"^PET_PRELOAD: 'a b' is not the name of a module"):
        flags.parse_module_names(FromEnvironment("a b", "PET_PRELOAD"), "--preload")


def test_signal_names_are_written_in_full() -> None:
    assert flags.parse_signal_names(" SIGTERM, SIGUSR1 ,INT") == "SIGTERM,SIGUSR1,SIGINT"
    assert flags.parse_signal_names("") == ""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGNOPE", "SIG_IGN", "signal"])
def test_signals_that_cannot_be_handled_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^--signals-to-handle: .*{name}"):
        flags.parse_signal_names(f"SIGTERM,{name}")
    with pytest.raises(UsageError, match=r"^PET_SIGNALS_TO_HANDLE: "):
        flags.parse_signal_names(FromEnvironment(name, "PET_SIGNALS_TO_HANDLE"))


def test_stop_signal() -> None:
    assert flags.parse_stop_signal("SIGINT") == "SIGINT"
    assert flags.parse_stop_signal("KILL") == "SIGKILL"
    with pytest.raises(UsageError, match=r"^--stop-signal: 'SIGSTOP' does not end a process"):
        flags.parse_stop_signal("SIGSTOP")
    with pytest.raises(UsageError, match=r"^--stop-signal: 'NOPE' is not a signal"):
        flags.parse_stop_signal("NOPE")


def test_whole_number() -> None:
    assert flags.whole_number("0", "--x") == 0
    with pytest.raises(UsageError, match=r"^--x: '-1' cannot be used; .* a whole number from 0$"):
        flags.whole_number("-1", "--x")
    with pytest.raises(UsageError, match=r"a whole number from 1 to 5$"):
        flags.whole_number("6", "--x", least=1, most=5)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "often"])
def test_interval_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"^--x: '{text}' is not an interval"):
        flags.interval(text, "--x")


def test_seconds() -> None:
    assert flags.interval("0.5", "--x") == 0.5
    assert flags.seconds("2.5", "--x") == 2.5
    with pytest.raises(UsageError, match=r"^PET_X: '-1' is not a time"):
        flags.seconds(FromEnvironment("-1", "PET_X"), "--x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", True), ("0", False), ("2", True), ("", False), ("True", True), ("off", False)],
)
def test_switch(text: str, expected: bool) -> None:
    assert flags.on_or_off(text, "--x") is expected


def test_switch_refused() -> None:
    with pytest.raises(UsageError, match=r"^--x: 'maybe' is neither on nor off; accepted: 1 or 0"):
        flags.on_or_off("maybe", "--x")


def test_log_dir_is_made_absolute_but_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert flags.parse_log_dir("logs/run") == str(tmp_path / "logs/run")
    assert flags.parse_log_dir(str(tmp_path)) == str(tmp_path)
    assert flags.parse_log_dir("/dev/null") == "/dev/null"
    assert flags.parse_log_dir(None) is None
    assert flags.parse_log_dir("") is None
    assert os.listdir(tmp_path) == []


def test_a_file_is_no_log_dir(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.write_text("")
    with pytest.raises(UsageError, match=f"^--log-dir: '{path}' is not a folder"):
        flags.parse_log_dir(str(path))


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install entry points of the group by writing the metadata a package would bring."""

    def install(lines: str) -> None:
        folder = tmp_path / "plug-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[torchrun.logs_specs]\n{lines}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_default_logs_specs_are_ours() -> None:
    from holdfast.processes.logs.specs import DefaultLogsSpecs

    assert flags.load_logs_specs("default") is DefaultLogsSpecs


def test_logs_specs_of_a_plugin(tmp_path: Path, plugins: Callable[[str], None]) -> None:
    (tmp_path / "plug_code.py").write_text("class Specs: pass\n")
    plugins("mine = plug_code:Specs")
    loaded: Any = flags.load_logs_specs("mine")
    assert (loaded.__module__, loaded.__name__) == ("plug_code", "Specs")


def test_unknown_logs_specs_list_what_is_installed(plugins: Callable[[str], None]) -> None:
    plugins("mine = plug_code:Specs")
    with pytest.raises(UsageError, match=r"^--logs-specs: 'nope' .*accepted: default, .*mine"):
        flags.load_logs_specs("nope")


def test_logs_specs_that_cannot_be_imported(plugins: Callable[[str], None]) -> None:
    plugins("mine = no_such_module_anywhere:Specs")
    with pytest.raises(UsageError, match=r"^--logs-specs: 'mine' cannot be loaded: .*no_such_mod"):
        flags.load_logs_specs("mine")
