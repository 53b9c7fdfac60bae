"""The wording of the command line: help, and the error line of each mistake.

No other test matches these sentences.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.cli import main
from holdfast.cli.commands import COMMANDS
from holdfast.cli.run_command import build_parser
from holdfast.launcher import launch_job
from holdfast.launcher.config import FLAGS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(launch_job.elastic_launch, "__call__", lambda *_: {})


def stderr_of(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    assert main.run_command(list(words)) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    prefix, _, line = err.rstrip("\n").partition("holdfast run: error: ")
    assert prefix == ""
    return line


# A command line, and its error line.
MISTAKES = """\
 | no script given; usage: holdfast run [flags] SCRIPT [arguments of the script]
--nproc train.py | no script given: train.py was parsed as the value of --nproc-per-node; usage: holdfast run [flags] SCRIPT [arguments of the script]
--nproc-per-node --tee 3 x | --nproc-per-node: needs a value; accepted: N
--standalone=1 train.py | --standalone: does not take a value
--master x train.py | --master: ambiguous; could be --master-addr, --master-port
--max-restart-count 3 x | --max-restart-count: unknown flag; did you mean --max-restarts?
--nprocs 2 train.py | --nprocs: unknown flag; did you mean --nproc-per-node?
--rdzv_timeout 2 x | --rdzv_timeout: unknown flag; set rendezvous settings with --rdzv-conf KEY=VALUE
--version train.py | --version: unknown flag; see holdfast run --help
--zzzzzz=1 train.py | --zzzzzz=1: unknown flag; see holdfast run --help
--max-restarts x x | --max-restarts: 'x' is invalid; accepted: a whole number from 0
--master-port 70000 x | --master-port: '70000' is invalid; accepted: a whole number from 0 to 65535
--monitor-interval 0 x | --monitor-interval: '0' is not a number of seconds; accepted: above 0, e.g. 0.1
--start-method zzz x | --start-method: 'zzz' is invalid; accepted: spawn, fork, forkserver
--nnodes 2:1 x | --nnodes: '2:1' is not a number of nodes; accepted: N or MIN:MAX, from 1, MIN <= MAX
--nproc-per-node 0 x | --nproc-per-node: '0' is not a number of workers; accepted: a whole number from 1, or cpu, gpu, xpu, auto
--rdzv-conf a x | --rdzv-conf: 'a' has the item 'a'; accepted: key=value,key=value
--rdzv-conf run_id=1 x | --rdzv-conf: 'run_id=1' sets 'run_id', which has its own flag; accepted: other keys
--local-ranks-filter a x | --local-ranks-filter: 'a' is not a list of local ranks; accepted: numbers, e.g. 0,2
--tee 9 x | --tee: '9' does not select streams; accepted: 0 (none), 1 (stdout), 2 (stderr), 3 (both), or by local rank, e.g. 0:3,1:2
--stop-signal SIGSTOP x | --stop-signal: 'SIGSTOP' does not terminate a process; accepted: a signal that does, such as SIGTERM or SIGINT
--log-dir train.py train.py | --log-dir: 'train.py' is not a directory; accepted: a directory, created if missing, or /dev/null
--no-python -m pkg | --no-python: conflicts with --module, which needs Python
--rdzv-endpoint host x | --rdzv-endpoint: 'host' has no port; accepted: HOST:PORT for the static backend
--standalone --nnodes 2 x | --nnodes: '2' conflicts with --standalone, which is for one node; accepted: 1
--preload torch --no-python true | --preload: conflicts with --no-python: only Python workers can be forked from a process that has imported modules
--preload torch --run-path --start-method fork train.py | --preload: 'torch' conflicts with --start-method fork; accepted: --start-method spawn, which is as fast with --preload
"""


@pytest.mark.parametrize("mistake", MISTAKES.splitlines())
def test_mistake_is_reported_in_one_line(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, _, line = mistake.partition(" | ")
    assert stderr_of(capsys, 2, *words.split()) == line


def test_bad_variable_is_reported_but_does_not_break_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "abc")
    line = "PET_MAX_RESTARTS: 'abc' is invalid; accepted: a whole number from 0"
    assert stderr_of(capsys, 2, "train.py") == line
    assert main.run_command(["--help"]) == 0


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("trian.py", 127, "'trian.py': no such script"),
        ("--run-path trian.py", 127, "'trian.py': no such script"),
        (".", 126, "'.': a directory needs a __main__.py to be run"),
        ("--no-python ./gorp", 127, "'./gorp': no such program"),
        ("--no-python gorp", 127, "'gorp': no such program in PATH"),
        ("--no-python ./train.py", 126, "'./train.py': the program is not executable"),
        ("--no-python /usr", 126, "'/usr': the program is a directory"),
    ],
)
def test_program_that_cannot_start_is_reported_in_one_line(
    words: str, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stderr_of(capsys, code, *words.split()) == line


def test_missing_interpreter_is_reported_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/no/python")
    line = "PYTHON_EXEC: '/no/python': no such program"
    assert stderr_of(capsys, 127, "train.py") == line


# Flags, and the line that warns about them, if any.
WARNINGS = """\
--standalone --rdzv-conf join_timeout=5
--rdzv-conf timeout=5,is_host=1
--local-ranks-filter 0
--nnodes 2 --master-addr head
--nnodes 2 --rdzv-endpoint 127.0.0.1:5000
--nnodes 2 --rdzv-backend file --rdzv-endpoint /somewhere
--spares 3 | --spares is ignored: the job has one node
--rdzv-conf spares=3 | --spares is ignored: the job has one node
--node-rank 1 | --node-rank 1 is ignored: the job has one node, which has rank 0
--rdzv-backend c10d --node-rank 1 | --node-rank is ignored: --rdzv-backend c10d assigns node ranks itself
--rdzv-backend c10d --master-port 1 | --master-port is ignored by --rdzv-backend c10d
--local-ranks-filter 7 | --local-ranks-filter: no local rank 7 among 1 workers; no output is shown
--local-ranks-filter 0,2,1 | --local-ranks-filter: no local rank 1, 2 among 1 workers
--nnodes 2 --master-port 7 | the endpoint of this job is 127.0.0.1:7, which only agents on this machine can reach; to use other machines, set --master-addr to the address of node 0
--nnodes 2 --rdzv-backend c10d | the endpoint of this job is localhost:29400, which only agents on this machine can reach; to use other machines, set --rdzv-endpoint to HOST:29400 of the node that runs the coordinator
"""


@pytest.mark.parametrize("warning", WARNINGS.splitlines())
def test_flags_without_effect_cause_a_warning(
    warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    words, _, line = warning.partition(" | ")
    assert main.run_command([*words.split(), "train.py"]) == 0
    assert caplog.messages == ([line] if line else [])


# Help


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.dispatch([*words, "--help"]) == 0
    text, err = capsys.readouterr()
    assert err == ""
    return text


def test_help_of_run_is_grouped_and_shows_each_flag_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys, "run")
    shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, flags=re.MULTILINE)
    assert sorted(shown) == sorted([*(flag.name for flag in FLAGS), "--print-completion", "--help"])
    groups = re.findall(r"^(\w[\w ]+):$", text, flags=re.MULTILINE)
    assert groups == [*dict.fromkeys(flag.group for flag in FLAGS), "Examples"]
    assert max(map(len, text.splitlines())) <= 84


def test_the_examples_of_help_are_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "run").replace("\\\n", "")
    examples = re.findall(r"^    holdfast run (.+)$", text, flags=re.MULTILINE)
    assert len(examples) == 7
    for example in examples:
        assert build_parser().parse_args(example.split()).training_script


@pytest.mark.parametrize(("columns", "most"), [("60", 58), ("500", 98), ("nonsense", 78)])
def test_help_fits_the_width_of_the_terminal(
    columns: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_terminal(_descriptor: int) -> None:
        raise OSError("not a terminal")

    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", no_terminal)
    flags = build_parser().format_help().partition("Examples:")[0].partition("Workers:")[2]
    widths = [len(line) for line in flags.splitlines() if line.startswith("  ")]
    assert most - 12 <= max(widths) <= most


def test_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys)
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert "holdfast-run[dump]" in help_of(capsys, "dump")
    assert "holdfast report logs --json" in help_of(capsys, "report")
    assert main.dispatch(["fly"]) == 2
    assert capsys.readouterr().err == (
        "holdfast: error: 'fly' is not a command; commands: run, coordinator, token, ps, status, "
        "top, dashboard, logs, events, dump, restart, drain, undrain, stop, report, story, "
        "completion\n"
    )
    assert main.dispatch(["train.py"]) == 2
    assert capsys.readouterr().err.endswith("; did you mean holdfast run train.py?\n")


REPORT_MISTAKES = """\
 | FOLDER is missing; usage: holdfast report [--output FILE] [--json] FOLDER ...
nothing | FOLDER: 'nothing' is not a folder; accepted: a log directory
--json empty | FOLDER: no timeline in 'empty'; accepted: a log directory (a job has one if it was started with --log-dir, --redirects or --tee, or failed)
broken | FOLDER: no readable timeline in 'broken'
--html empty | --html: unknown flag; see holdfast report --help
"""


DASHBOARD_MISTAKES = """\
--port 65536 | --port: '65536' is not a valid port; accepted: 0 to 65535
--port x | --port: 'x' is not a valid port; accepted: 0 to 65535
--log-dir nothing | --log-dir: 'nothing' is not a folder; accepted: a log directory
this --rdzv-id that | --rdzv-id: 'that' conflicts with JOB 'this'; accepted: one of the two
"""


@pytest.mark.parametrize("case", DASHBOARD_MISTAKES.splitlines())
def test_dashboard_errors_are_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, _, line = case.partition(" | ")
    assert main.dispatch(["dashboard", *words.split()]) == 2
    assert capsys.readouterr() == ("", f"holdfast dashboard: error: {line}\n")


def test_missing_dashboard_package_is_reported_with_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main.dispatch(["dashboard"]) == 78
    assert capsys.readouterr().err == (
        "holdfast dashboard: error: uvicorn is not installed (pip install 'holdfast-run[dashboard]')\n"
    )


OTHER_MISTAKES = """\
statsu | holdfast: error: 'statsu' is not a command; did you mean status?
--vers | holdfast: error: '--vers' is not a command; did you mean --version?
status --jsn | holdfast status: error: --jsn: unknown flag; did you mean --json?
status a b | holdfast status: error: b: unexpected argument; usage: holdfast status [flags] [JOB]
drain | holdfast drain: error: NODE is missing; usage: holdfast drain [flags] NODE [JOB]
logs --rdzv | holdfast logs: error: --rdzv: ambiguous; could be --rdzv-id, --rdzv-backend, --rdzv-endpoint, --rdzv-conf
logs --follow=3 | holdfast logs: error: --follow: does not take a value
logs --tail x | holdfast logs: error: --tail: 'x' is not a whole number; accepted: digits, such as 5
stop --grace x | holdfast stop: error: --grace: 'x' is not a number; accepted: digits, such as 0.5
restart --reason | holdfast restart: error: --reason: needs a value; accepted: TEXT
completion csh | holdfast completion: error: SHELL: 'csh' is not known; accepted: bash, zsh, fish, tcsh
"""


@pytest.mark.parametrize("case", OTHER_MISTAKES.splitlines())
def test_errors_of_other_commands_are_one_line(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, _, line = case.partition(" | ")
    assert main.dispatch(words.split()) == 2
    assert capsys.readouterr() == ("", f"{line}\n")


@pytest.mark.parametrize("case", REPORT_MISTAKES.splitlines())
def test_report_errors_are_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "timeline-x-1.jsonl").write_text("{\n")
    words, _, line = case.partition("| ")
    assert main.dispatch(["report", *words.split()]) == 2
    assert capsys.readouterr() == ("", f"holdfast report: error: {line}\n")
