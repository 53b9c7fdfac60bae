"""The commands for running jobs, without jobs: the input that they accept, and their wording."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from typing import TYPE_CHECKING

import pytest

from holdfast.cli import main, operate
from holdfast.cli.commands import COMMANDS
from holdfast.cli.completion_command import flags_of_commands, for_tcsh, script_for
from holdfast.control.discovery import AgentDirectory, JobChoice, find_job
from holdfast.control.job_client import (
    ControlProblem,
    JobClient,
    JobNotFound,
    JobOver,
    JobUnreachable,
    RequestRefused,
)
from holdfast.control.job_logs import parse_ranks
from holdfast.control.stack_groups import grouped, innermost_frame
from holdfast.core.phases import JobOutcome
from holdfast.core.requests import RequestRefusal
from holdfast.core.rounds import Job, JobPhase
from holdfast.core.shared_state import encode
from holdfast.defaults import SHELLS
from holdfast.errors import UsageError
from holdfast.rendezvous.file_backend import STATE_NAME, FileRendezvousBackend
from holdfast.store.file_store import SharedFolder, file_name
from holdfast.views import tables
from holdfast.wire.messages import LogLines

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "ranks"), [("", []), ("3", [3]), ("0,8-10", [0, 8, 9, 10]), (" 1 ,2", [1, 2])]
)
def test_parse_ranks_accepts_numbers_and_spans(text: str, ranks: list[int]) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["x", "1-", "-1", "1,,2", "3-1", "0-99999999"])
def test_parse_ranks_rejects_everything_else(text: str) -> None:
    with pytest.raises(UsageError):
        parse_ranks(text)


@pytest.mark.parametrize("grace", ["-1", "nan", "1e9"])
def test_stop_rejects_an_invalid_grace(grace: str) -> None:
    with pytest.raises(UsageError, match="--grace"):
        operate.request(operate.build_parser("stop").parse_args(["--grace", grace]))


OVER = RequestRefused("the job is about to end", RequestRefusal.OVER.value)
GONE = JobUnreachable("connection reset")


@pytest.mark.parametrize(
    ("problems", "shown"),
    [
        ([OVER], "job 'j': the job is about to end"),
        ([JobOver("the job is over: stopped", "stopped", "")], "job 'j': the job is over: stopped"),
        ([GONE, OVER], "job 'j': the job is about to end"),
        ([GONE, JobNotFound("no such job")], "job 'j': the job has ended"),
    ],
)
def test_stop_of_a_job_that_another_stop_ends_succeeds(
    problems: list[ControlProblem],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waiting = [*problems]

    async def connect(_: object) -> JobClient:
        raise waiting.pop(0)

    monkeypatch.setattr(operate, "connect", connect)
    operate.request(operate.build_parser("stop").parse_args(["--rdzv-id", "j"]))
    assert capsys.readouterr().out == f"{shown}\n"
    assert not waiting


def test_stop_of_an_unreachable_job_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(_: object) -> JobClient:
        raise GONE

    monkeypatch.setattr(operate, "connect", connect)
    with pytest.raises(JobUnreachable):
        operate.request(operate.build_parser("stop").parse_args(["--rdzv-id", "j"]))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rdzv-backend", "zookeeper"], "--rdzv-backend"),
        (["--rdzv-backend", "file"], "--rdzv-endpoint"),
        (["--rdzv-backend", "file", "--rdzv-endpoint", "/no/such/folder"], "--rdzv-endpoint"),
        (["--rdzv-backend", "etcd", "--rdzv-endpoint", "ftp://a"], "--rdzv-endpoint"),
        (["--ha", "a,b,c"], "--rdzv-id"),
        (["--ha", "a,b,c", "--rdzv-id", "x", "--rdzv-endpoint", "a"], "--rdzv-endpoint"),
        (["--ha", "a,b,c", "--rdzv-id", "x", "--rdzv-backend", "etcd"], "--rdzv-backend"),
        (["--ha", "a:1,a:1", "--rdzv-id", "x"], "--ha"),
    ],
)
def test_invalid_endpoint_is_rejected_with_the_name_of_its_flag(
    flags: list[str], named: str
) -> None:
    with pytest.raises(UsageError, match=f"^{named}: "):
        operate.show_status(operate.build_parser("status").parse_args(flags))


@pytest.mark.parametrize(("flags", "said"), [([], True), (["--json"], False)])
def test_ps_without_jobs_says_so_unless_a_program_reads_it(
    flags: list[str],
    said: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", folder)  # A socket's path must be short.
        operate.list_jobs(operate.build_parser("ps").parse_args(flags))
    notice = "holdfast: no job of yours runs on this machine\n" if said else ""
    assert capsys.readouterr() == ("", notice)


def test_ps_omits_ended_jobs_and_folders_of_other_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = {"runs": None, "ended": JobOutcome.SUCCEEDED, "foreign": None}
    for run_id, outcome in jobs.items():
        folder = SharedFolder(str(tmp_path / file_name(run_id)))
        path = os.path.join(folder.path, STATE_NAME)
        backend = FileRendezvousBackend(path, folder=folder)
        phase = JobPhase.CLOSED if outcome else JobPhase.FORMING
        assert backend.set_state(encode(Job(run_id=run_id, phase=phase, outcome=outcome)))
    (tmp_path / file_name("foreign")).chmod(0o777)  # Other users can write to it.
    flags = ["--rdzv-backend", "file", "--rdzv-endpoint", str(tmp_path)]
    operate.list_jobs(operate.build_parser("ps").parse_args(flags))
    printed = capsys.readouterr()
    [_, row] = printed.out.splitlines()
    assert row.split()[0] == "runs"
    [problem] = printed.err.splitlines()
    assert file_name("foreign") in problem
    named = JobChoice(backend="file", endpoint=str(tmp_path), run_id="ended")
    location, _ = asyncio.run(find_job(named))
    assert isinstance(location, AgentDirectory)
    assert location.run_id == "ended"


PY_SPY = """Process 7: python train.py
Thread 7 (idle): "MainThread"
    all_reduce (lib/dist.py:88)
    <module> (train.py:3)
"""
OF_PYTHON = """Thread 0x1 (most recent call first):
  File "/a/b.py", line 1 in other
Current thread 0x2 (most recent call first):
  File "/x/data.py", line 12 in read
"""


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        (PY_SPY, "all_reduce, dist.py:88"),
        (OF_PYTHON, "read, data.py:12"),
        ("process 7 has exited\n", "process 7 has exited"),
        ("", "unknown"),
    ],
)
def test_stacks_are_grouped_by_the_main_threads_innermost_frame(text: str, frame: str) -> None:
    assert innermost_frame(text) == frame


def test_equal_stacks_are_one_group() -> None:
    stacks = [(rank, OF_PYTHON if rank == 2 else PY_SPY) for rank in (4, 3, 2, 1, 0)]
    many, one = grouped(stacks)
    assert (many.ranks_text, many.frame) == ("4 ranks (0-1, 3-4)", "all_reduce, dist.py:88")
    assert (one.ranks_text, one.frame) == ("rank 2", "read, data.py:12")


def test_lines_of_ranks_are_not_mixed(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    printer = tables.LogPrinter(prefixed=True, coloured=False, escaped=False)
    for rank, text in ((0, b"a\nb"), (1, b"c\n"), (0, b"d\ne\n")):
        printer.show(LogLines(rank=rank, text=text))
    assert capfdbinary.readouterr().out == b"[0] a\n[0] b\n[1] c\n[0] d\n[0] e\n"


def test_workers_cannot_control_the_terminal_of_an_operator(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    printer = tables.LogPrinter(prefixed=True, coloured=False, escaped=True)
    chunks = (
        b"\x1b]52;c;ZXZpbA==\x07\x1b[2J",  # Fills the clipboard, clears the screen.
        b"\x1b[1;31mred\x1b",  # The next chunk completes the sequence.
        b"[0m plain\r\n",
        b"50%\r[1] forged \xe2\x80",
        b"\xae\xff\n",
    )
    for chunk in chunks:
        printer.show(LogLines(rank=0, text=chunk))
    assert capfdbinary.readouterr().out == (
        b"[0] \\x1b]52;c;ZXZpbA==\\x07\\x1b[2J\x1b[1;31mred\x1b[0m\x1b[0m plain\x1b[0m\n"
        b"[0] 50%\n[0] [1] forged \\u202e\\xff\n"
    )


def test_completion_knows_every_command_and_flag() -> None:
    flags = flags_of_commands()
    assert set(flags) == set(COMMANDS)
    for shell in SHELLS:
        script = script_for(shell)
        assert all(name in script for name in COMMANDS)
        if shell == "tcsh":
            script = "".join(one for name in COMMANDS for one in for_tcsh(f"holdfast {name} -"))
        assert all(flag.lstrip("-") in script for those in flags.values() for flag in those)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["holdfast", "un"], {"undrain"}),
        (["holdfast", "stop", "--gr"], {"--grace"}),
        (["holdfast", "logs", "--no"], {"--node", "--no-prefix"}),
    ],
)
def test_bash_completes_commands_and_flags(words: list[str], offered: set[str]) -> None:
    typed = " ".join(words)
    ask = f'COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _holdfast; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", f"{script_for('bash')}\n{ask}"], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == offered


def test_run_prints_completion_like_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command(["--print-completion", "tcsh"]) == 0
    assert capsys.readouterr().out == script_for("tcsh")
