"""Terminal escapes in text of workers, nodes and other users are escaped when the text is shown."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from etcd_teams import EtcdTeam
from holdfast.core import rounds
from holdfast.core.etcd.keys import JobRecord, NodeRecord, pack
from holdfast.core.job_settings import JobSettings
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import Failure, NodeInfo, Status, View
from holdfast.processes.failures.failure import ProcessFailure
from holdfast.processes.failures.failure_report import FailedWorker
from other_users import STRANGER, shared_folder
from real_coordinators import RawClient
from real_jobs import Job, holdfast
from real_teams import OBEY, Cluster

if TYPE_CHECKING:
    from pathlib import Path

    from real_etcd import Etcd

# Sets the title, fills the clipboard, clears the screen, reverses the text direction.
ESCAPES = "\x1b]0;OWNED\x07\x1b]52;c;cm0gLXJmIH4K\x07\x1b[2J\x9b2J\u202e\u200b"
SHOWN = "\\x1b]0;OWNED\\x07"
FORGED = "forged: the job succeeded"
EVIL = f"{ESCAPES}\n[holdfast] {FORGED}\r[holdfast] {FORGED}"

FAIL = f"""
if AGENT == "a":
    raise RuntimeError({EVIL!r})
obey()
"""


def check(output: str, *, beginning: tuple[str, ...] = ("[holdfast] forged", "forged")) -> None:
    """Fail if a console would interpret any of this, or if it contains a forged line."""
    odd = {one for one in output if not one.isprintable()} - {"\n", "\t"}
    assert not odd, output
    assert not [line for line in output.split("\n") if line.startswith(beginning)], output
    assert SHOWN in output


def test_hostile_exception_is_escaped_on_all_nodes(tmp_path: Path) -> None:
    flags = ("--redirects", "3", "--max-restarts", "1")
    with Cluster(tmp_path, FAIL, *flags, nnodes="2") as cluster:
        coordinator = cluster.start_coordinator("coordinator")
        cluster.start_all("a", "b", conf="is_host=0")
        for name in ("a", "b"):
            code, output = cluster.agents[name].end()
            assert code == 1, output
            assert "Root Cause" in output
            check(output)
        check(coordinator.output())


INFO = NodeInfo(node="evil", incarnation=6, address="127.0.0.1", ports=(1,))


def join(client: RawClient, settings: JobSettings) -> View:
    """Join as a node of the job; return its view as a member."""
    client.send_message(Status(seq=1, run_id="job", info=INFO, settings=settings))
    while True:
        view = client.receive()
        if isinstance(view, View) and view.role is NodeRole.MEMBER:
            running = Status(
                seq=2,
                run_id="job",
                info=INFO,
                settings=settings,
                phase=NodePhase.RUNNING,
                generation=view.generation,
            )
            client.send_message(running)
            return view


def evil_report() -> bytes:
    """Return the report of a worker with hostile text in every field."""
    worker = FailedWorker.from_failure(1, ProcessFailure(0, 7, 1, "", host="h", detail="d"))
    texts = ("host", "detail", "message", "traceback", "stderr_tail", "stdout_file", "error_file")
    return msgspec.msgpack.encode([msgspec.structs.replace(worker, **dict.fromkeys(texts, EVIL))])


@pytest.mark.parametrize(
    "report",
    [evil_report(), b"", b"\x91\x81\xa4host\xa2\xff\xfe", b"\x91" * 100_000 + b"\x90"],
    ids=["a report", "no report", "not UTF-8", "too deep"],
)
def test_hostile_report_of_a_node_forges_no_line(tmp_path: Path, report: bytes) -> None:
    """The agents of other nodes exit only because the job failed."""
    settings = JobSettings(min_nodes=2, max_nodes=2)
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        coordinator = cluster.start_coordinator("coordinator")
        agent = cluster.start("a", conf="is_host=0")
        with RawClient(cluster.port).complete_handshake() as client:
            view = join(client, settings)
            cluster.next_start()
            failure = Failure(
                node="evil", rank=view.first_rank, summary=EVIL, exitcode=1, sudden=True
            )
            failed = Status(
                seq=3,
                run_id="job",
                info=INFO,
                settings=settings,
                phase=NodePhase.FAILED,
                generation=view.generation,
                failure=failure,
                report=report,
            )
            client.send_message(failed)
            code, output = agent.end()
        assert code == 1, output
        check(output)
        check(coordinator.output())


def test_foreign_records_in_etcd_are_reported_and_ignored(tmp_path: Path, etcd: Etcd) -> None:
    """The node of such a record would be the first of the round, and choose the address of the workers' store."""
    honest = NodeInfo(node="honest", incarnation=7, address="203.0.113.66")
    odd: list[dict[str, Any]] = [{"host": EVIL}, {"ports": ()}, {"label": "x" * 1000}]
    infos = [
        msgspec.structs.replace(honest, node=f"evil{number}", incarnation=number, **more)
        for number, more in enumerate(odd)
    ]
    with EtcdTeam(tmp_path, OBEY, etcd=etcd, nnodes="2:5") as cluster:
        for info in infos:
            settings = JobSettings(min_nodes=2, max_nodes=5)
            status = Status(seq=1, run_id="job", info=info, settings=settings)
            put(cluster, f"nodes/{info.node}/{info.incarnation:x}", NodeRecord(status))
        status = msgspec.structs.replace(status, info=honest)
        put(cluster, "nodes/another/6", NodeRecord(status))
        leader = cluster.start_host("a")
        cluster.start("b")
        starts = cluster.generation(2)
        output = leader.output()
        for node in (*(info.node for info in infos), "another"):
            lines = [line for line in output.split("\n") if f"{node!r}" in line]
            assert len(lines) == 1, output
        check(output)
        assert cluster.finish(starts) == {"a": 0, "b": 0}


def test_foreign_job_in_etcd_is_reported_in_one_line(tmp_path: Path, etcd: Etcd) -> None:
    member = NodeInfo(node="evil", incarnation=6, host=EVIL, ports=())
    with EtcdTeam(tmp_path, OBEY, etcd=etcd, nnodes="1:2") as cluster:
        put(cluster, "job", JobRecord(rounds.Job(run_id="job", members=[member]), 1))
        code, output = cluster.start("a").end()
    assert (code, output.count("\n")) == (78, 1), output
    assert f"{cluster.root}job" in output
    assert output[:-1].isprintable()


def put(cluster: EtcdTeam, key: str, record: NodeRecord | JobRecord) -> None:
    cluster.etcd.put(f"{cluster.root}{key}".encode(), pack(record))


def test_hostile_process_name_of_another_user_is_escaped() -> None:
    """Root sees the processes of all users, whose names must not control root's terminal."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    with shared_folder() as folder:
        program = folder / f"{ESCAPES[:4]}\n=="  # The kernel uses it as the name of the thread.
        shutil.copy("/bin/sleep", program)
        with subprocess.Popen(
            [f"{EVIL}\n== rank 1, {FORGED}", "600"],
            executable=program,
            env={"TORCHELASTIC_RUN_ID": f"another's{EVIL}", "RANK": "0"},
            user=STRANGER,
            group=STRANGER,
            extra_groups=[],
        ) as process:
            try:
                code, output = dumped(str(process.pid))
            finally:
                process.kill()
    assert code == 0
    assert sum(f"pid {process.pid}," in line for line in output.split("\n")) == 1
    check(output, beginning=("[holdfast] forged", "forged", "== rank 1"))


def dumped(pid: str) -> tuple[int, str]:
    """Return the exit code and the output of `holdfast dump`."""
    done = holdfast("dump", pid)
    return done.returncode, done.stdout


THREADS = f"""
import threading
def named():
    send("up")
    forever()
threading.Thread(target=named, name={f"{EVIL}{chr(10)}== rank 1, {FORGED}"!r}).start()
"""


def test_hostile_thread_name_is_escaped(tmp_path: Path) -> None:
    with Job(tmp_path, THREADS) as job:
        (pid,) = job.messages.take(1).values()
        code, output = dumped(str(pid))
    assert code == 0
    check(output, beginning=("== rank 1",))
