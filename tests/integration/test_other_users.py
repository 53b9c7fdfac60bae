"""Another user of the host attacks a job; every attack must fail."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.etcd.runner import EtcdProcess
from holdfast.processes import stacks
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.logs.std import Std
from holdfast.processes.workers import pages
from holdfast.store.store_errors import DistNetworkError
from holdfast.store.tcp.store_client import TCPStore
from holdfast.wire.frames import FrameReader
from holdfast.wire.handshake import ClientHandshake
from other_users import STRANGER, as_user, shared_folder
from real_jobs import Job
from real_teams import OBEY, Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

KEEP = """
from holdfast.store.from_env import from_environment
store = from_environment()
store.set("plan", "three steps")
send(os.environ["MASTER_PORT"])
store.wait(["go"])
send(store.get("plan").decode().replace(" ", "-"))
"""


def write_to_store(port: int) -> str:
    """Overwrite a worker's value in the store."""
    try:
        store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=5))
        store.set("plan", "curl evil")
        return store.get("plan").decode()
    except (DistNetworkError, OSError) as error:
        return f"refused: {type(error).__name__}"


def complete_handshake(port: int) -> str:
    """Connect to a coordinator as an agent without a token."""
    with socket.socket() as connection:
        connection.settimeout(20)
        connection.connect(("127.0.0.1", port))
        handshake, reader = ClientHandshake(None), FrameReader(1 << 16)
        connection.sendall(handshake.start())
        while not handshake.done:
            for body in reader.feed(connection.recv(65536)):
                connection.sendall(handshake.receive(body))
    return "let in"


def test_workers_store_serves_only_its_own_user(tmp_path: Path) -> None:
    with Job(tmp_path, KEEP, "--nproc-per-node", "1") as job:
        port = int(job.messages.next()[0])
        assert as_user(STRANGER, lambda: write_to_store(port)).startswith("refused")
        store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20))
        store.set("go", "")
        assert job.messages.next()[0] == "three-steps"
        assert job.end()[0] == 0


def test_coordinator_without_a_token_serves_only_its_own_user(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_host("a")
        assert complete_handshake(cluster.port) == "let in"
        output = as_user(STRANGER, lambda: complete_handshake(cluster.port))
        assert output.startswith("HandshakeRefused")
        assert str(STRANGER) in output
        cluster.start("b")
        assert cluster.finish(cluster.generation(2)) == {"a": 0, "b": 0}


# A shared folder that other users can write to.

SECRET = "login failed for user=prod password=hunter2"


def in_folder(tmp_path: Path, shared: Path, script: str, *flags: str) -> Cluster:
    return Cluster(
        tmp_path, script, *flags, nnodes="1:2", backend="file", endpoint=str(shared), run_id="mine"
    )


def plant_folder(job: Path, target: Path) -> str:
    """Create the job's folder before the job does, with links that redirect its writes."""
    job.mkdir()
    job.chmod(0o777)
    (job / "store").mkdir()
    for name in ("state.new", "store/.new"):
        (job / name).symlink_to(target)
    return "planted"


def plant_link(job: Path, target: Path) -> str:
    """Create a link in place of the job's folder, to a folder of the user."""
    job.symlink_to(target.parent)
    return "planted"


@pytest.mark.parametrize("plant", [plant_folder, plant_link])
def test_job_refuses_a_folder_of_another_user(
    tmp_path: Path, plant: Callable[[Path, Path], str]
) -> None:
    private = tmp_path / "private"
    private.mkdir(0o700)
    (private / "keys").write_text("mine")
    with shared_folder() as shared, in_folder(tmp_path, shared, OBEY) as cluster:
        job = shared / "kmine"
        assert as_user(STRANGER, lambda: plant(job, private / "keys")) == "planted"
        code, output = cluster.start("a").end()
        assert (code, output.count("\n")) == (78, 1), output
        assert str(job) in output
        assert "--rdzv-endpoint" in output
        assert (private / "keys").read_text() == "mine"
        assert os.listdir(private) == ["keys"]


def read_all(shared: Path) -> str:
    """Read everything that is readable."""
    found = []
    for folder, _, names in os.walk(shared):
        for name in names:
            try:
                found.append((Path(folder) / name).read_text(errors="replace"))
            except PermissionError:
                continue
    return repr(found)


def test_job_folder_is_readable_only_for_its_user(tmp_path: Path) -> None:
    with (
        shared_folder() as shared,
        in_folder(tmp_path, shared, f"raise RuntimeError({SECRET!r})", "--redirects=3") as cluster,
    ):
        before = os.umask(0)
        try:
            agent = cluster.start("a")
        finally:
            os.umask(before)
        assert agent.end()[0] == 1
        assert SECRET in read_all(shared)
        assert as_user(STRANGER, lambda: read_all(shared)) == "[]"


# Folders and files of another user.


def given_away(path: Path) -> Path:
    """Give a folder to another user and make it writable for everyone."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    path.mkdir()
    path.chmod(0o777)
    os.chown(path, STRANGER, STRANGER)
    return path


def test_logs_are_not_written_to_a_folder_of_another_user(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL)
    first = specs.reify({0: {}})
    assert specs.run_dir is not None
    for how in ("removed", "replaced"):
        taken = Path(specs.run_dir)
        if how == "removed":
            shutil.rmtree(taken)
        else:
            taken.rename(tmp_path / "moved")
        given_away(taken)
        again = specs.reify({0: {}})
        assert os.path.dirname(again.stdouts[0]) != os.path.dirname(first.stdouts[0])
        assert os.listdir(taken) == []
        assert specs.run_dir != str(taken)
        assert Path(specs.run_dir).stat().st_mode & 0o777 == 0o700


def test_folders_of_another_user_do_not_block_the_cleanup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have names like this user's folders, and there are more of them than one cleanup removes."""
    monkeypatch.setattr(pages, "SWEPT_MAX", 1)
    stem = f"{pages.FOLDER_PREFIX}{os.getuid()}-"
    left = tmp_path / f"{stem}left"
    left.mkdir(0o700)
    theirs = [given_away(tmp_path / f"{stem}{number}") for number in range(40)]
    for folder in (left, *theirs):
        os.utime(folder, (0, 0))
    pages._sweep(str(tmp_path))
    assert not left.exists()
    assert all(folder.exists() for folder in theirs)


def test_dump_calls_no_socket_named_by_another_users_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment names a socket of root, and root runs the dump."""
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    path = str(tmp_path / "roots.sock")
    with (
        socket.socket(socket.AF_UNIX) as server,
        subprocess.Popen(
            ["sleep", "600"],
            env={"PATH": os.environ["PATH"], "TORCH_WORKER_SERVER_SOCKET": path},
            user=STRANGER if os.geteuid() == 0 else None,
        ) as process,
    ):
        server.bind(path)
        server.listen()
        server.settimeout(0)
        try:
            text = stacks.dump_stacks(process.pid)
            if os.geteuid() == 0:
                with pytest.raises(BlockingIOError):
                    server.accept()
        finally:
            process.kill()
    assert text.startswith("command: sleep 600\n")


def say_ready(address: bytes) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.sendto(b"READY=1", address)
    return "sent"


def test_another_user_cannot_pretend_that_etcd_is_ready() -> None:
    checks: list[bool] = []

    def healthy() -> bool:
        checks.append(True)
        return len(checks) == 3

    process = EtcdProcess(["/bin/sleep", "600"], log=subprocess.DEVNULL)
    try:
        address = process._notices.getsockname()
        assert as_user(STRANGER, lambda: say_ready(address)) == "sent"
        process.wait_ready(20.0, healthy)
        assert len(checks) == 3
        assert say_ready(address) == "sent"
        process.wait_ready(20.0)
    finally:
        process.kill()
