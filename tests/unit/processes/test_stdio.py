from __future__ import annotations

import errno
import fcntl
import io
import os
import struct
import subprocess
import sys
import termios
import textwrap
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.logs import specs
from holdfast.processes.logs.specs import LogsDest, WorkerStdio

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any


PATIENCE_S = 60

# An agent as a separate program: it runs a worker, and writes its result to a file.
AGENT = """
    import os, sys
    from holdfast.processes.logs.specs import DefaultLogsSpecs
    from holdfast.processes.workers.group import GroupSpec, start_group
    def work(script):
        if os.system(script): raise RuntimeError("the script failed")
    def main():
        method, folder, script = sys.argv[1:4]
        logs = DefaultLogsSpecs(log_dir=folder + "/logs")
        is_command = method in ("command", "tail")
        what, args = ("sh", ("-c", script)) if is_command else (work, (script,))
        how = {"log_tail": 1 << 20 if method == "tail" else 0} if is_command else {"start_method": method}
        os.environ["FOLDER"] = folder
        context = start_group(GroupSpec("x", what, {0: args}, {0: {}}, logs, **how))
        result = context.wait(60)
        context.close()
        with open(folder + "/result", "w") as stream:
            for failure in result.failures.values():
                stream.write(f"{failure.exitcode} {failure.detail} {failure.stderr_tail!r}")
    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def agent(tmp_path: Path) -> Any:
    path = tmp_path / "agent.py"
    path.write_text(textwrap.dedent(AGENT))

    def command(method: str, script: str) -> list[str]:
        return [sys.executable, str(path), method, str(tmp_path), script]

    return command


def result_in(folder: Path) -> str:
    return (folder / "result").read_text()


TELLS_STREAMS = """
streams=
for fd in 0 1 2; do streams="$streams $(readlink /proc/$$/fd/$fd)"; done
echo $streams > $FOLDER/streams
"""


@pytest.mark.parametrize(
    ("method", "closed"),
    [
        *(("command", closed) for closed in ("<&-", ">&-", "2>&-")),
        *((method, "<&- >&- 2>&-") for method in ("command", "spawn", "fork", "forkserver")),
    ],
)
def test_agent_works_without_standard_streams(
    agent: Any, tmp_path: Path, closed: str, method: str
) -> None:
    script = f"set -e; {TELLS_STREAMS} echo to out; echo to err >&2; cat"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *agent(method, script)]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S
    )
    assert done.returncode == 0
    assert result_in(tmp_path) == ""
    assert done.stdout == ("to out\n" if " >&-" not in f" {closed}" else "")
    assert done.stderr == ("to err\n" if "2>&-" not in closed else "")
    streams = (tmp_path / "streams").read_text().split()
    assert streams[0] == os.devnull
    assert all(stream.startswith("pipe:") for stream in streams[1:])


def read_all(master: int) -> bytes:
    output = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError as problem:
            if problem.errno != errno.EIO:
                raise
            return output  # The last process with the terminal open has exited.
        if not piece:
            return output
        output += piece


@pytest.mark.parametrize("method", ["command", "fork", "tail"])
def test_workers_see_the_agents_terminal(agent: Any, tmp_path: Path, method: str) -> None:
    script = (
        "for fd in 0 1 2; do test -t $fd && echo $fd is a terminal >&2; done; "
        "stty size <&2 >&2; echo to out; exit 3"
    )
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    started = subprocess.Popen(
        agent(method, script), stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    output = read_all(master)
    os.close(master)
    assert started.wait(PATIENCE_S) == 0
    lines = output.decode().split("\r\n")
    assert "\r" not in "".join(lines), "carriage returns were doubled"
    assert "\n" not in "".join(lines)
    assert lines[-1] == ""
    expected = [f"{fd} is a terminal" for fd in range(3)]
    received = [line for line in lines if line in (*expected, "33 77", "to out")]
    assert sorted(received) == sorted([*expected, "33 77", "to out"])
    if method == "tail":
        [kept] = tmp_path.glob("logs/*/*/0/stdout.tail")
        assert kept.read_text() == "to out\n"
    if method != "fork":
        tail = "".join(f"{line}\\n" for line in (*expected, "33 77"))
        assert result_in(tmp_path) == f"3  '{tail}'"


def test_workers_see_a_new_size_of_the_terminal(agent: Any, tmp_path: Path) -> None:
    script = 'exec 3>&1; until [ "$(stty size <&3)" = "33 77" ]; do echo; done'
    master, slave = os.openpty()
    started = subprocess.Popen(
        agent("tail", script), stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.read(master, 1)  # The worker runs.
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    os.close(slave)
    read_all(master)
    os.close(master)
    assert started.wait(PATIENCE_S) == 0
    assert result_in(tmp_path) == ""


def stdio(dest: LogsDest, **how: Any) -> WorkerStdio:
    return WorkerStdio(dest, prefixes={0: "<0>", 1: "<1>"}, **how)


def open_with_tails(folder: Path, stdouts: dict[int, str], **how: Any) -> WorkerStdio:
    return stdio(
        LogsDest(
            stdouts=stdouts,
            stderrs=stdouts,
            tail_stdouts={rank: str(folder / f"out{rank}") for rank in stdouts},
            tail_stderrs={rank: str(folder / f"err{rank}") for rank in stdouts},
        ),
        log_tail=1 << 20,
        **how,
    )


def write_and_finish(here: WorkerStdio, written: dict[int, dict[int, bytes]]) -> None:
    opened = {rank: here.open(rank) for rank in written}
    here.begin_following()
    for rank, fds in opened.items():
        for which, text in written[rank].items():
            os.write(fds[which], text)
        for fd in fds.values():
            os.close(fd)
    here.finish()
    here.close()


def test_tails_have_the_output_of_shown_and_hidden_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stdout = os.fdopen(os.dup(1), "w")
    monkeypatch.setattr(sys, "stdout", stdout)
    here = open_with_tails(tmp_path, {0: "", 1: os.devnull})
    write_and_finish(here, {0: {1: b"out 0\n", 2: b"err 0\n"}, 1: {1: b"out 1", 2: b"err 1\n"}})
    stdout.close()
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {
        "out0": "out 0\n", "err0": "err 0\n", "out1": "out 1", "err1": "err 1\n",
    }  # fmt: skip
    assert here.tail_files == {
        (rank, which): str(tmp_path / f"{name}{rank}")
        for rank in (0, 1)
        for which, name in ((1, "out"), (2, "err"))
    }
    assert capfd.readouterr().out == "out 0\n"


def test_a_tail_that_cannot_be_created_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = open_with_tails(tmp_path / "missing", {0: ""}, capture_stderr=False)
    fds = here.open(0)
    assert here.tail_files == {}
    assert len(caplog.messages) == 1
    assert "No such file or directory" in caplog.text
    for fd in fds.values():
        os.close(fd)
    here.begin_following()
    here.close()


def test_without_a_thread_for_tails_output_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_thread() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(specs, "TailWriter", no_thread)
    console = io.StringIO()
    monkeypatch.setattr(sys, "stdout", console)
    write_and_finish(open_with_tails(tmp_path, {0: ""}), {0: {1: b"out\n"}})
    assert console.getvalue() == "out\n"
    assert caplog.messages == ["holdfast logs may lack output: can't start new thread"]


def test_hidden_stderr_is_kept_for_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    here = stdio(LogsDest(stdouts={0: os.devnull}, stderrs={0: os.devnull}))
    fds = here.open(0)
    here.begin_following()
    os.write(fds[1], b"out\n")
    os.write(fds[2], b"why it failed\n")
    for fd in fds.values():
        os.close(fd)
    here.finish()
    assert here.stderr_tail(0) == "why it failed\n"
    here.close()
    assert capfd.readouterr() == ("", "")
