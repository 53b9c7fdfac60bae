"""The meaning of command lines: torchrun's, if torchrun has the flag. test_help.py has the mistakes."""

from __future__ import annotations

import os
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.cli.run_command import build_parser, read_args
from holdfast.cli.script import check_can_start, worker_command
from holdfast.core.job_settings import DEFAULTS, SETTINGS
from holdfast.errors import CannotStart, PluginError, UsageError
from holdfast.launcher import devices
from holdfast.launcher import flag_values as flags
from holdfast.launcher.config import FLAGS, LaunchConfig
from holdfast.launcher.flag_values import FromEnvironment
from holdfast.processes.logs.std import Std
from holdfast.rendezvous import rdzv_conf

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.launcher.config import Flag

NO_VARIABLE = ("--dry-run", "--json", "--logs-specs", "--numa-binding")

# A value that each flag accepts, as text, and what the namespace then holds.
SAMPLES: dict[str, tuple[str, object]] = {
    "--metrics-port": ("9100", 9100),
    "--dashboard": ("29480", 29480),
    "--duplicate-stderr-filters": ("a,,b,c", ["a,b", "c"]),
    "--duplicate-stdout-filters": ("a", ["a"]),
    "--exit-barrier-timeout": ("2.5", 2.5),
    "--failure-grace": ("2.5", 2.5),
    "--log-tail": ("64K", 65536),
    "--master-port": ("29501", 29501),
    "--max-restarts": ("3", 3),
    "--monitor-interval": ("0.5", 0.5),
    "--node-rank": ("2", 2),
    "--numa-binding": ("core-complex", "core-complex"),
    "--shutdown-timeout": ("7", 7),
    "--spares": ("1", 1),
    "--signals-to-handle": ("TERM,SIGUSR1", "SIGTERM,SIGUSR1"),
    "--start-method": ("fork", "fork"),
    "--stop-signal": ("INT", "SIGINT"),
}


def name_of(flag: Flag) -> str:
    return flag.name


def parse(*words: str) -> Namespace:
    """Return what both ways to read a command line give."""
    parsed = read_args([*words])
    assert vars(parsed) == vars(build_parser().parse_args(words))
    return parsed


@pytest.mark.parametrize("flag", FLAGS, ids=name_of)
def test_flag_is_set_by_every_spelling_and_by_its_variable(
    flag: Flag, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, expected = SAMPLES.get(flag.name, ("text", "text")) if flag.metavar else ("1", True)
    values = [text] if flag.metavar else []
    for spelling in flag.spellings:
        assert getattr(parse(spelling, *values, "train.py"), flag.dest) == expected
    before = getattr(parse("train.py"), flag.dest)
    monkeypatch.setenv(flag.variable, text)
    after = before if flag.name in NO_VARIABLE else expected
    assert getattr(parse("train.py"), flag.dest) == after
    if flag.metavar:  # The command line takes precedence over the variable.
        monkeypatch.setenv(flag.variable, "not the value that is used")
        assert getattr(parse(f"{flag.name}={text}", "train.py"), flag.dest) == expected
    else:
        monkeypatch.setenv(flag.variable, "0")
        assert getattr(parse("train.py"), flag.dest) is False


@pytest.mark.parametrize(
    ("words", "script", "script_args"),
    [
        ("train.py --nnodes 2 -m x", "train.py", ["--nnodes", "2", "-m", "x"]),
        ("train.py -- a -- b", "train.py", ["a", "--", "b"]),
        ("-- train.py -- a", "train.py", ["--", "a"]),
        ("train.py --help", "train.py", ["--help"]),
        ("- a", "-", ["a"]),
        ("-- -c pass", "-c", ["pass"]),
        ("-1 a", "-1", ["a"]),
        ("--role -1 train.py", "train.py", []),
        ("-mr3 pkg.mod -m", "pkg.mod", ["-m"]),
    ],
)
def test_first_word_that_is_not_a_flag_is_the_script(
    words: str, script: str, script_args: list[str]
) -> None:
    parsed = parse(*words.split())
    assert (parsed.training_script, parsed.training_script_args) == (script, script_args)


def test_program_can_add_its_own_flags() -> None:
    parser = build_parser()
    parser.add_argument("--use-env", "--use_env", action="store_true")
    parser.add_argument("--pair", nargs=2)
    parser.add_argument("--role-of-node")
    words = ["--use_env", "--pair", "a", "b", "--role", "x", "train.py", "--pair", "c"]
    parsed = parser.parse_args(words)
    assert (parsed.use_env, parsed.pair, parsed.role) == (True, ["a", "b"], "x")
    assert parsed.training_script_args == ["--pair", "c"]
    assert parser.parse_known_args(["--bogus", "train.py"])[1] == ["--bogus"]


def test_every_flag_with_a_field_sets_a_field_of_the_config() -> None:
    fields = {flag.field for flag in FLAGS if flag.field}
    assert fields <= set(LaunchConfig.__annotations__)


def test_flag_of_a_setting_that_all_nodes_share_repeats_its_declaration() -> None:
    flags = [flag for flag in FLAGS if flag.setting]
    assert flags
    for flag in flags:
        setting = SETTINGS[flag.setting]
        assert (flag.name, flag.default) == (setting.flag, DEFAULTS[flag.setting])


# Values


def named(convert: Callable[[str, str], object]) -> Callable[[str], object]:
    return lambda text: convert(text, "--x")


def parse_modules(text: str) -> tuple[str, ...]:
    return flags.parse_modules(text, source=flags.source_of(text, "--preload"))


def parse_rdzv_conf(text: str) -> dict[str, str]:
    return rdzv_conf.parse_text(text, flags.source_of(text, rdzv_conf.FLAG))


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        (flags.parse_min_max_nnodes, " 2 : 2 ", (2, 2)),
        (flags.parse_min_max_nnodes, "1:4", (1, 4)),
        (flags.determine_local_world_size, "+3", 3),
        (flags.determine_local_world_size, "cpu", len(os.sched_getaffinity(0))),
        (parse_rdzv_conf, " a = 1 , b = x=y ", {"a": "1", "b": "x=y"}),
        (parse_rdzv_conf, "a=1,a=2", {"a": "2"}),
        (flags.parse_local_ranks, "0, 12,0", {0, 12}),
        (flags.parse_local_ranks, "", None),
        (named(flags.signals), " SIGTERM, SIGUSR1 ,INT", "SIGTERM,SIGUSR1,SIGINT"),
        (named(flags.stop_signal), "KILL", "SIGKILL"),
        (named(flags.byte_size), "0", 0),
        (named(flags.byte_size), "100", 100),
        (named(flags.byte_size), "2g", 2 << 30),
        (flags.parse_log_dir, "/dev/null", "/dev/null"),
        (flags.parse_log_dir, "", None),
    ],
)
def test_valid_text_is_parsed(parser: Any, text: str, expected: object) -> None:
    assert parser(text) == expected


@pytest.mark.parametrize(
    ("parser", "texts"),
    [
        (flags.parse_min_max_nnodes, ["", "x", "0", "-1", "2:1", "0:1", "1:2:3", "1:", ":1"]),
        (flags.determine_local_world_size, ["x", "0", "2.0", "", "GPU", str(1 << 17)]),
        (parse_rdzv_conf, ["a", "a=", "=1", "a=1,", "a=1,,b=2", "endpoint=x"]),
        (flags.parse_local_ranks, [",", "a", "0,", "-1"]),
        (named(flags.signals), ["SIGKILL", "SIGSTOP", "SIG_IGN", "signal"]),
        (named(flags.stop_signal), ["SIGSTOP", "NOPE"]),
        (lambda text: flags.parse_streams(text, "--tee"), ["both", "9"]),
        (parse_modules, ["my-module", "a b"]),
        (named(flags.interval), ["0", "-1", "nan", "inf", "often"]),
        (named(flags.seconds), ["-1", "soon"]),
        (named(flags.byte_size), ["", "M", "-1", "1.5M", "16 M", "16MB", "much"]),
        (named(flags.parse_switch), ["maybe"]),
    ],
)
def test_invalid_values_name_the_variable_they_came_from(parser: Any, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(UsageError, match=r"^--"):
            parser(text)
        with pytest.raises(UsageError, match=r"^PET_X: "):
            parser(FromEnvironment(text, "PET_X"))


def test_streams_and_module_names_are_parsed() -> None:
    assert flags.parse_streams("3", "--tee") == Std.ALL
    assert flags.parse_streams("0:1,12:2", "--tee") == {0: Std.OUT, 12: Std.ERR}
    names = parse_modules(FromEnvironment("a, b.c", "PET_PRELOAD"))
    assert (names, {type(name) for name in names}) == (("a", "b.c"), {str})


def test_devices_are_counted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # Otherwise torch counts.
    monkeypatch.setattr(devices, "nvidia_count", lambda: 3)
    monkeypatch.setattr(devices, "named_backend_count", {"npu": 8}.__getitem__)
    monkeypatch.setattr(devices, "xpu_count", lambda: 0)
    counts = {word: flags.determine_local_world_size(word) for word in ("gpu", "auto", "npu")}
    assert counts == {"gpu": 3, "auto": 3, "npu": 8}
    with pytest.raises(UsageError, match="'xpu'"):
        flags.determine_local_world_size("xpu")
    monkeypatch.setattr(devices, "accelerator_count", lambda: 0)
    assert flags.determine_local_world_size("auto") == len(os.sched_getaffinity(0))


def test_a_log_dir_is_made_absolute_but_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert flags.parse_log_dir("logs/run") == str(tmp_path / "logs/run")
    assert os.listdir(tmp_path) == []


def test_logs_specs_come_from_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plug-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    lines = (
        "mine = plug_code:Specs\nbroken = no_such_module_anywhere:Specs\n"
        "raises = plug_raises:Specs\nnumber = plug_code:NUMBER"
    )
    (folder / "entry_points.txt").write_text(f"[torchrun.logs_specs]\n{lines}\n")
    (tmp_path / "plug_code.py").write_text("NUMBER = 1\nclass Specs: pass\n")
    (tmp_path / "plug_raises.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert flags.load_logs_specs("mine").__module__ == "plug_code"
    with pytest.raises(UsageError, match=r"^--logs-specs: .*'broken'"):
        flags.load_logs_specs("broken")
    for name in ("raises", "number"):
        with pytest.raises(PluginError, match=f"^the logs specs plug-in '{name}'"):
            flags.load_logs_specs(name)
    with pytest.raises(UsageError, match=r"^--logs-specs: 'nope' .*default, .*mine"):
        flags.load_logs_specs("nope")


# The program of a worker


def test_python_exec_and_local_rank_argument_make_the_worker_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    args = parse("train.py", "a")
    args.use_env = False
    arguments = ["-u", "train.py", "--local-rank=${local_rank}", "a"]
    assert worker_command(args) == ("/opt/python", arguments)


def test_existing_script_module_or_program_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").touch()
    with zipfile.ZipFile("app.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    for script in ("train.py", str(tmp_path / "train.py"), "folder", "app.zip", "-"):
        check_can_start(parse(script))
    check_can_start(parse("-m", "no.such.module"))
    check_can_start(parse("--no-python", "sh", "-c", "true"))
    # As in a shell, a later folder of PATH may have an executable one, and the current folder is not
    # searched.
    for folder, mode in (("a", 0o644), ("b", 0o755)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "prog").touch(mode=mode)
    monkeypatch.setenv("PATH", f"{tmp_path}/a:{tmp_path}/b")
    check_can_start(parse("--no-python", "prog"))
    monkeypatch.chdir(tmp_path / "b")
    for path, code in ((f"{tmp_path}/a", 126), ("/usr/bin", 127)):
        monkeypatch.setenv("PATH", path)
        with pytest.raises(CannotStart) as caught:
            check_can_start(parse("--no-python", "prog"))
        assert caught.value.exit_code == code


def test_unreadable_script_is_refused_with_126(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Use only the mode bits, because the tests may run as root, which can read everything.
    monkeypatch.setattr(os, "access", lambda path, _: bool(os.stat(path).st_mode & 0o444))
    script = tmp_path / "train.py"
    script.touch(mode=0o200)
    with pytest.raises(CannotStart) as caught:
        check_can_start(parse("--run-path", str(script)))
    assert caught.value.exit_code == 126
