from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import sys
import termios
import textwrap
from typing import TYPE_CHECKING

import pytest

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
        what, args = ("sh", ("-c", script)) if method == "command" else (work, (script,))
        how = {} if method == "command" else {"start_method": method}
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


@pytest.mark.parametrize("method", ["command", "fork"])
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
    if method == "command":
        tail = "".join(f"{line}\\n" for line in (*expected, "33 77"))
        assert result_in(tmp_path) == f"3  '{tail}'"


def stdio(dest: LogsDest, **how: Any) -> WorkerStdio:
    return WorkerStdio(dest, prefixes={0: "<0>", 1: "<1>"}, **how)


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
