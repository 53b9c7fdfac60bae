"""Operators watch and steer real jobs: with one node, with a coordinator and on etcd."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from dashboards import await_agents
from real_jobs import HOLDFAST, PATIENCE_S, Job, holdfast
from real_teams import OBEY, Cluster, free_port

if TYPE_CHECKING:
    from pathlib import Path

    from etcd_teams import MakeTeam

STOPPED = 143
TOKEN = "f" * 32
POLL_S = 0.05
SAYS = """
    print("first", NUMBER, "of", RANK, flush=True)
    obey()
"""


def printed(*words: str, env: dict[str, str] | None = None, code: int = 0) -> tuple[str, str]:
    """Run a command; return its standard output and standard error."""
    done = holdfast(*words, env=env)
    assert done.returncode == code, done
    return done.stdout, done.stderr


def await_text(path: Path, text: str) -> None:
    """Wait until a file, which another thread writes, contains this text."""
    deadline = time.monotonic() + PATIENCE_S
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(POLL_S)


def status_of(run_id: str, *flags: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    text, _ = printed("status", "--json", "--rdzv-id", run_id, *flags, env=env)
    found: dict[str, Any] = json.loads(text)
    return found


def test_job_can_be_restarted_drained_and_stopped(tmp_path: Path, team: MakeTeam) -> None:
    run_id = f"steered-{team.backend}"
    about = ("--rdzv-id", run_id[:-1])  # Names are accepted shortened.
    with team(tmp_path, OBEY, "--max-restarts", "1", nnodes="2:3", run_id=run_id) as cluster:
        for name in "abc":
            cluster.start(name, conf=f"node_id={name}")
        cluster.generation(3)
        await_agents(*(agent.pid for agent in cluster.agents.values()))
        printed("restart", *about, "--reason", "new data")
        again = cluster.generation(3)
        assert {start.restarts for start in again.values()} == {0}
        number = str(next(one["rank"] for one in status_of(run_id)["nodes"] if one["node"] == "b"))
        assert printed("drain", number, *about)[0] == f"job {run_id!r}: drain b accepted\n"
        assert set(cluster.generation(2)) == {"a", "c"}
        job = status_of(run_id)
        assert {one["node"] for one in job["nodes"] if one["drained"]} == {"b"}
        assert (job["restarts"], job["members"], job["present"]) == (0, 2, 3)
        _, why = printed("drain", "a", *about, code=1)
        assert "needs 2" in why
        printed("undrain", "b", *about)
        cluster.generation(3)
        printed("stop", *about, "--reason", "enough", "--grace", "20")
        ends = cluster.end()
        assert {code for code, _ in ends.values()} == {STOPPED}
        for _, output in ends.values():
            assert "new data" in output
            assert "enough" in output


def test_job_with_one_node_can_be_watched_and_steered(tmp_path: Path) -> None:
    script = """
        from holdfast import worker
        print("generation", os.environ["HOLDFAST_GENERATION"], "of", RANK, flush=True)
        worker.progress(7, total=9, loss=float("nan"))
        send(RANK)
        forever()
    """
    flags = ("--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs"))
    with Job(tmp_path, script, *flags, "--max-restarts", "0") as job:
        job.messages.take(2)
        run_id = await_agents(job.agent.pid)
        about = ("--rdzv-id", run_id)
        following = subprocess.Popen(
            [*HOLDFAST, "logs", "--follow", *about], stdout=subprocess.PIPE, text=True
        )
        try:
            assert following.stdout is not None
            lines = {following.stdout.readline() for _ in range(2)}
            assert lines == {"[0] generation 0 of 0\n", "[1] generation 0 of 1\n"}
            workers = status_of(run_id)["nodes"][0]["report"]["workers"]
            assert [(one["rank"], one["step"], one["state"]) for one in workers] == [
                (0, 7, "running"),
                (1, 7, "running"),
            ]
            assert {(one["total"], one["loss"], one["eta_s"]) for one in workers} == {
                (9, "nan", -1.0)
            }
            assert "step 7 of 9 (77.8 %), ETA -, loss nan" in printed("status", *about)[0]
            printed("drain", "x", *about, code=1)
            printed("restart", *about, "--reason", "why not")
            job.messages.take(2)
            lines = {following.stdout.readline() for _ in range(2)}
            assert lines == {"[0] generation 1 of 0\n", "[1] generation 1 of 1\n"}
            assert printed("logs", *about, "--rank", "1", "--no-prefix")[0] == (
                "generation 1 of 1\n"
            )
            received = [
                json.loads(line) for line in printed("events", "--json", *about)[0].splitlines()
            ]
            assert any("why not" in one["text"] for one in received)
            assert "workers-failed" not in {one["kind"] for one in received}
            [recorded] = (tmp_path / "logs").rglob("events-*.jsonl")
            await_text(recorded, "holdfast.request")
            printed("stop", *about, "--reason", "enough")
            code, _, output = job.end()
            assert (code, "enough" in output) == (STOPPED, True)
            report, _ = printed("report", "--json", "--output", "-", str(tmp_path / "logs"))
            assert json.loads(report)["outcome"]["state"] == "stopped"
            assert following.wait(PATIENCE_S) == 0
        finally:
            following.kill()
            following.communicate()
    assert run_id not in printed("ps")[0]


@pytest.fixture
def guarded(tmp_path: Path) -> Cluster:
    """A job with three nodes whose agents have a token."""
    flags = ("--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    cluster = Cluster(tmp_path, SAYS, *flags, nnodes="3", run_id="guarded")
    for name in "abc":
        cluster.start(name, conf=f"node_id={name}", env={"HOLDFAST_TOKEN": TOKEN})
    return cluster


def test_read_only_token_can_watch_but_not_change(guarded: Cluster) -> None:
    with guarded as cluster:
        cluster.generation(3)
        place = ("--rdzv-endpoint", cluster.endpoint, "--rdzv-id", "guarded")
        own = {"HOLDFAST_TOKEN": TOKEN}
        looking, _ = printed("token", "--read-only", "--job", "guarded", env=own)
        all_jobs, _ = printed("token", "--read-only", env=own)
        other, _ = printed("token", "--read-only", "--job", "other", env=own)
        for token in (looking, all_jobs):
            reader = {"HOLDFAST_TOKEN": token.strip()}
            job = status_of("guarded", *place[:2], env=reader)
            assert all(node["report"]["workers"] for node in job["nodes"])
            text, _ = printed("logs", *place, "--tail", "1", env=reader)
            assert set(text.splitlines()) == {f"[{rank}] first 0 of {rank}" for rank in range(3)}
            for words in (("restart",), ("drain", "a"), ("undrain", "a"), ("stop",)):
                _, why = printed(*words, *place, env=reader, code=1)
                assert "read-only" in why
            start = ("run", "--rdzv-backend", "c10d", *place, "--nnodes", "3", __file__)
            printed(*start, env=reader, code=2)
        printed("status", *place, env={"HOLDFAST_TOKEN": other.strip()}, code=69)
        printed("status", *place, env={"HOLDFAST_TOKEN": TOKEN[::-1] + "x"}, code=69)
        assert cluster.is_quiet()
        printed("stop", *place, env=own)
        assert set(cluster.codes().values()) == {STOPPED}


def test_stacks_of_all_nodes_are_grouped(tmp_path: Path) -> None:
    script = """
        from holdfast.elastic.control_plane import worker_main
        def reading():
            signal.sigwaitinfo(ORDERS)
        def reducing():
            signal.sigwaitinfo(ORDERS)
        @worker_main()
        def main():
            started()
            reading() if RANK == "2" else reducing()
        main()
    """
    with Cluster(tmp_path, "started()\n", nnodes="3", run_id="stacks") as cluster:
        (tmp_path / "train.py").write_text(
            (tmp_path / "train.py").read_text().replace("started()\n", "")
            + "\n".join(line.removeprefix("        ") for line in script.splitlines())
        )
        env = {"TORCH_WORKER_SERVER_SOCKET": str(tmp_path / "s")}
        for name in "abc":
            sockets = {"TORCH_WORKER_SERVER_SOCKET": f"{env['TORCH_WORKER_SERVER_SOCKET']}{name}"}
            cluster.start(name, conf=f"node_id={name}", env=sockets)
        starts = cluster.generation(3)
        await_agents(*(agent.pid for agent in cluster.agents.values()))
        text, _ = printed("dump", "--all-nodes", "--rdzv-id", "stacks")
        summary = text.splitlines()[0]
        assert "2 ranks (0-1): reducing, train.py:" in summary
        assert "rank 2: reading, train.py:" in summary
        assert set(cluster.finish(starts).values()) == {0}


@pytest.mark.parametrize("backend", ["c10d", "etcd"])
def test_node_that_cannot_join_is_seen_and_names_the_problem(tmp_path: Path, backend: str) -> None:
    flags = ("--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    conf = ("--rdzv-conf", "is_host=false") if backend == "c10d" else ()
    with Job(tmp_path, "", "--nnodes", "2:3", "--rdzv-id", "early", *flags, *conf) as job:
        await_agents(job.agent.pid)
        text, _ = printed("status", "early")
        assert "job 'early': forming, generation -" in text
        assert re.search(r"no connection to \S+ .*: connection refused", text)
        _, problem = printed("stop", "early", code=69)
        assert "this node has not joined the job: no connection to" in problem
        assert problem.endswith(f"only a signal stops this agent: kill {job.agent.pid}\n")
        job.signal(signal.SIGTERM)
        assert job.end()[0] == STOPPED


def test_killed_agent_is_not_listed(tmp_path: Path) -> None:
    with Job(tmp_path, "send('up')\nforever()") as job:
        job.messages.take(1)
        run_id = await_agents(job.agent.pid)
        job.signal(signal.SIGKILL)
        job.agent.wait(PATIENCE_S)
        assert run_id not in printed("ps")[0]
