"""An etcd process of this program: it starts, responds, exits with its owner, and leaves nothing behind."""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.etcd.calls import Get, Txn, TxnDone
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.etcd.local_etcd import LocalEtcd, is_healthy, stop_etcd
from holdfast.etcd.runner import BINARY_VARIABLE, EtcdProcess, find_binary, log_tail
from real_coordinators import eventually

PATIENCE_S = 20.0  # Only a failing test waits this long.


OWNER = """
import os, sys, threading, time
from holdfast.etcd.local_etcd import LocalEtcd
server = LocalEtcd()
starting = threading.Thread(target=server.start)
starting.start()
starting.join()
print(server._process.pid, server.get_port(), flush=True)
"""


WAIT = "sys.stdin.readline()\n"


FORK = """
child = os.fork()
if not child:
    sys.exit()  # With all that is done when a program ends.
assert os.waitpid(child, 0)[1] == 0
from holdfast.etcd.local_etcd import is_healthy
assert is_healthy(server.get_port()), "a child's end was the server's, too"
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create temporary folders in one that the test checks afterwards."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Use a script in place of etcd."""
    program = tmp_path / "some-etcd"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(stat.S_IRWXU)
    monkeypatch.setenv(BINARY_VARIABLE, str(program))
    return program


def pid_of(server: LocalEtcd) -> int:
    assert server._process is not None
    return server._process.pid


def put(server: LocalEtcd, key: bytes, value: bytes) -> None:
    client = server.get_client()
    client.put(key, value)
    client.close()


def got(server: LocalEtcd, key: bytes) -> bytes | None:
    client = server.get_client()
    answer = client.call(Txn(success=(Get(key),)))
    client.close()
    assert isinstance(answer, TxnDone)
    return answer.results[0][0].value if answer.results[0] else None


def refuses(port: int) -> bool:
    with socket.socket() as reaching:
        return reaching.connect_ex(("127.0.0.1", port)) != 0


def test_server_responds_from_start_to_stop(temporary: Path) -> None:
    server = LocalEtcd()
    assert server.get_port() == -1
    server.start()
    assert server.get_endpoint() == f"{server.get_host()}:{server.get_port()}"
    put(server, b"key", b"value")
    assert got(server, b"key") == b"value"
    server.stop()
    assert refuses(server.get_port())
    assert not list(temporary.iterdir())


def test_running_server_is_not_started_again() -> None:
    with LocalEtcd() as server:
        with pytest.raises(UsageError, match=server.get_endpoint()):
            server.start()
        assert is_healthy(server.get_port())


def test_callers_folder_and_its_data_are_kept(tmp_path: Path, temporary: Path) -> None:
    folder = tmp_path / "kept" / "data"
    with LocalEtcd(str(folder)) as server:
        put(server, b"key", b"value")
    assert list(folder.iterdir())
    with LocalEtcd(str(folder)) as server:
        assert got(server, b"key") == b"value"
    assert not list(temporary.iterdir())


def test_etcd_that_exits_is_retried_and_then_its_output_is_quoted(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = named(tmp_path, monkeypatch, "echo >&2 out of luck; echo once >> $0.runs; exit 7")
    with pytest.raises(RuntimeError) as died:
        LocalEtcd().start(num_retries=2)
    for part in (str(program), "7", "out of luck"):
        assert part in str(died.value)
    assert Path(f"{program}.runs").read_text() == "once\nonce\n"
    assert not list(temporary.iterdir())


def test_etcd_that_is_never_ready_times_out(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[EtcdProcess] = []

    class Counted(EtcdProcess):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    named(tmp_path, monkeypatch, "exec sleep infinity")
    monkeypatch.setattr("holdfast.etcd.local_etcd.EtcdProcess", Counted)
    with pytest.raises(TimeoutError, match="some-etcd"):
        LocalEtcd().start(timeout=0.3)
    assert len(started) == 1
    assert started[0].returncode is not None
    assert not list(temporary.iterdir())


def test_dropped_server_stops_etcd(temporary: Path) -> None:
    server = LocalEtcd()
    server.start()
    pidfd = os.pidfd_open(pid_of(server))
    del server
    gc.collect()
    assert select.select([pidfd], [], [], 0)[0]
    os.close(pidfd)
    assert not list(temporary.iterdir())


def owned(script: str) -> tuple[subprocess.Popen[str], int]:
    """Run a program that starts a server; return it and a pidfd of its etcd."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER + script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    pid = owner.stdout.readline().split()[0]
    return owner, os.pidfd_open(int(pid))


def field_of(path: str, name: str) -> int:
    return next(
        int(line.split()[1])
        for line in Path(path).read_text().splitlines()
        if line.startswith(name)
    )


def test_killed_owner_leaves_neither_etcd_nor_folder(temporary: Path) -> None:
    owner, pidfd = owned(WAIT)
    with owner:
        assert list(temporary.iterdir())
        owner.send_signal(signal.SIGKILL)
        assert select.select([pidfd], [], [], PATIENCE_S)[0], "etcd still runs"
        os.close(pidfd)
    eventually(lambda: not list(temporary.iterdir()))


def test_etcd_exits_with_its_guard_process() -> None:
    owner, pidfd = owned(WAIT)
    with owner:
        etcd = field_of(f"/proc/self/fdinfo/{pidfd}", "Pid:")
        os.kill(field_of(f"/proc/{etcd}/status", "PPid:"), signal.SIGKILL)
        assert select.select([pidfd], [], [], PATIENCE_S)[0], "etcd still runs"
        os.close(pidfd)
        owner.kill()


def test_exit_of_a_forked_child_does_not_stop_etcd() -> None:
    owner, pidfd = owned(WAIT + FORK)
    with owner:
        owner.communicate("\n", PATIENCE_S)
    os.close(pidfd)
    assert owner.returncode == 0


def test_stop_etcd_stops_a_process_and_removes_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    with subprocess.Popen(["sleep", "infinity"]) as sleeping:
        stop_etcd(sleeping, str(folder))
        assert sleeping.returncode == -signal.SIGTERM
        stop_etcd(sleeping)
    stop_etcd(None)
    assert not folder.exists()


SAY_READY = """
import os, socket, sys
notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notices.connect("\\0" + os.environ["NOTIFY_SOCKET"][1:])
notices.send(b"STATUS=almost\\n" + sys.argv[1].encode())
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program in place of etcd, whose content the test writes."""
    path = tmp_path / "etcd"
    path.touch()
    path.chmod(stat.S_IRWXU)
    return path


def written(program: Path, script: str) -> list[str]:
    say_ready = f"ready() {{ {sys.executable} -c '{SAY_READY}' \"$1\"; }}"
    program.write_text(f"#!/bin/sh\n{say_ready}\n{script}\n")
    return [str(program)]


def started(program: Path, script: str) -> EtcdProcess:
    with (program.parent / "log").open("w") as log:
        return EtcdProcess(written(program, script), log=log)


def test_failed_start_leaves_nothing_behind(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", no_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        started(program, "exec sleep infinity")


def test_etcd_that_ignores_sigterm_is_killed(program: Path) -> None:
    etcd = started(program, "trap '' TERM; ready READY=1; while :; do sleep 0.01; done")
    etcd.wait_ready(PATIENCE_S)
    etcd.stop(limit_s=0.1)
    assert etcd.returncode == -signal.SIGKILL


def test_variable_with_a_missing_program_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(EnvironmentProblem, match=f"{BINARY_VARIABLE}=.*nowhere"):
        find_binary()


def test_too_old_etcd_is_reported_with_the_flag_it_lacks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    usage = "".join(f"  --flag-{number}\n" for number in range(1000))
    log.write_text(f"flag provided but not defined: -logger\nusage: etcd [flags]\n{usage}")
    assert "-logger" in log_tail(log)
    assert "--flag-" not in log_tail(log)
