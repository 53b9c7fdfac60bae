"""Text of workers, nodes and other users is meant to take a console over, and is only shown."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import msgspec
import pytest

from holdfast.core.protocol import Failure, JobSettings, NodeInfo, NodePhase, NodeRole, Status, View
from holdfast.processes.failures.failure import ProcessFailure
from holdfast.processes.failures.report import FailedWorker
from other_users import STRANGER, shared_folder
from real_coordinators import RawClient
from real_jobs import HOLDFAST, PATIENCE_S, Job
from real_teams import OBEY, Cluster

if TYPE_CHECKING:
    from pathlib import Path

# Sets the title, fills the clipboard, clears the screen, turns the order of what follows.
ESCAPES = "\x1b]0;OWNED\x07\x1b]52;c;cm0gLXJmIH4K\x07\x1b[2J\x9b2J\u202e\u200b"
SHOWN = "\\x1b]0;OWNED\\x07"
FORGED = "forged: the job succeeded"
EVIL = f"{ESCAPES}\n[holdfast] {FORGED}\r[holdfast] {FORGED}"

FAIL = f"""
if AGENT == "a":
    raise RuntimeError({EVIL!r})
obey()
"""


def check(said: str, *, beginning: tuple[str, ...] = ("[holdfast] forged", "forged")) -> None:
    """Fail if a console would do more with this than show it, or if a line of it is forged."""
    odd = {one for one in said if not one.isprintable()} - {"\n", "\t"}
    assert not odd, said
    assert not [line for line in said.split("\n") if line.startswith(beginning)], said
    assert SHOWN in said


def test_what_a_worker_raises_is_shown_on_all_nodes(tmp_path: Path) -> None:
    flags = ("--redirects", "3", "--max-restarts", "1")
    with Cluster(tmp_path, FAIL, *flags, nnodes="2") as cluster:
        coordinator = cluster.start_coordinator("coordinator")
        cluster.start_all("a", "b", conf="is_host=0")
        for name in ("a", "b"):
            code, said = cluster.agents[name].end()
            assert code == 1, said
            assert "Root Cause" in said
            check(said)
        check(coordinator.said())


def join(client: RawClient, settings: JobSettings) -> View:
    """Be a node of the job; return its view as a member."""
    info = NodeInfo(node="evil", incarnation=6, address="127.0.0.1", ports=(1,))
    client.say(Status(seq=1, run_id="job", info=info, settings=settings))
    while True:
        view = client.hear()
        if isinstance(view, View) and view.role is NodeRole.MEMBER:
            running = Status(
                seq=2, run_id="job", info=info, settings=settings, phase=NodePhase.RUNNING,
                generation=view.generation,
            )  # fmt: skip
            client.say(running)
            return view


@pytest.mark.parametrize("with_report", [True, False])
def test_what_a_node_reports_forges_no_line(tmp_path: Path, with_report: bool) -> None:
    settings = JobSettings(min_nodes=2, max_nodes=2)
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        coordinator = cluster.start_coordinator("coordinator")
        agent = cluster.start("a", conf="is_host=0")
        with RawClient(cluster.port).shake_hands() as client:
            view = join(client, settings)
            cluster.next_start()
            worker = FailedWorker.from_failure(
                view.first_rank, ProcessFailure(0, 7, 1, "", host="h", detail="d")
            )
            texts = ("host", "detail", "message", "traceback", "stderr_tail", "stdout_file")
            worker = msgspec.structs.replace(worker, **dict.fromkeys(texts, EVIL), error_file=EVIL)
            failed = Status(
                seq=3, run_id="job", settings=settings, phase=NodePhase.FAILED,
                info=NodeInfo(node="evil", incarnation=6, address="127.0.0.1", ports=(1,)),
                generation=view.generation,
                failure=Failure(node="evil", rank=view.first_rank, summary=EVIL, sudden=True),
                report=msgspec.msgpack.encode([worker]) if with_report else b"",
            )  # fmt: skip
            client.say(failed)
            code, said = agent.end()
        assert code != 0
        check(said)
        check(coordinator.said())


def test_what_another_user_calls_a_process_is_shown() -> None:
    """Root sees everybody's workers: whoever names them must not have root's terminal."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    with shared_folder() as folder:
        program = folder / f"{ESCAPES[:4]}\n=="  # It is the name of its thread.
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
                code, said = dumped()
            finally:
                process.kill()
    assert code == 0
    assert sum(f"pid {process.pid}," in line for line in said.split("\n")) == 1
    check(said, beginning=("[holdfast] forged", "forged", "== rank 1"))


def dumped(*pids: str) -> tuple[int, str]:
    """Return the exit code and the output of `holdfast dump`."""
    done = subprocess.run([*HOLDFAST, "dump", *pids], capture_output=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout.decode()


THREADS = f"""
import threading
def named():
    tell("up")
    forever()
threading.Thread(target=named, name={f"{EVIL}{chr(10)}== rank 1, {FORGED}"!r}).start()
"""


def test_what_a_worker_calls_its_threads_is_shown(tmp_path: Path) -> None:
    with Job(tmp_path, THREADS) as job:
        (pid,) = job.news.take(1).values()
        code, said = dumped(str(pid))
    assert code == 0
    check(said, beginning=("== rank 1",))
