"""Jobs without a coordinator are watched and steered from every machine: by their agents.

Each agent has a runtime folder of its own, so that none finds the socket of another, as on machines
of their own; `ELSEWHERE` is a machine that has no agent at all.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from etcd_teams import EtcdTeam
from holdfast.core.etcd.keys import NodeRecord, read_record
from real_jobs import HOLDFAST, PATIENCE_S
from real_teams import QUICK, TOGETHER, Cluster, held_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from real_etcd import Etcd

STOPPED = 143
TOKEN, WRONG = "e" * 32, "f" * 32
ELSEWHERE = "x"
SAYS = """
    print("first", NUMBER, "of", RANK, flush=True)
    obey()
"""
SILENT = 200
LOOK_AGAIN_S = 0.02


class Machines:
    """The machines of one job, and one more; commands are run on each of them."""

    def __init__(self, cluster: Cluster, *place: str, env: dict[str, str] | None = None) -> None:
        self.cluster = cluster
        self.place = (*place, "--rdzv-id", cluster.run_id)
        self._env = env or {}

    def env(self, name: str) -> dict[str, str]:
        folder = self.cluster.folder / name
        folder.mkdir(exist_ok=True)
        return {**self._env, "XDG_RUNTIME_DIR": str(folder)}

    def start(self, *names: str) -> None:
        for name in names:
            self.cluster.start(name, conf=f"node_id={name}", env=self.env(name))

    def await_sockets(self, *names: str) -> None:
        """Wait until these agents can be found on their own machines."""
        deadline = time.monotonic() + PATIENCE_S
        for name in names:
            while not [*(self.cluster.folder / name).glob("holdfast/*.sock")]:
                assert time.monotonic() < deadline, self.cluster.agents[name].said()
                time.sleep(LOOK_AGAIN_S)

    def command(self, at: str, *words: str) -> list[str]:
        return [*HOLDFAST, *words, *(self.place if at == ELSEWHERE else ())]

    def run(self, at: str, *words: str, code: int = 0, token: str = "") -> tuple[str, str]:
        """Run a command on a machine; return what it printed and complained of."""
        done = subprocess.run(
            self.command(at, *words),
            capture_output=True, text=True, timeout=PATIENCE_S,
            env={**os.environ, **self.env(at), **({"HOLDFAST_TOKEN": token} if token else {})},
        )  # fmt: skip
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout, done.stderr

    def follow(self, at: str, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(at, *words),
            stdout=subprocess.PIPE, text=True, env={**os.environ, **self.env(at)},
        )  # fmt: skip

    def status(self, at: str, *flags: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run(at, "status", "--json", *flags)[0])
        return found

    def reporting(self, at: str) -> set[str]:
        """Return the nodes whose agents reported their workers."""
        return {one["node"] for one in self.status(at)["nodes"] if one["report"]}

    def stop(self, at: str) -> None:
        self.run(at, "stop", "--reason", "enough")
        ends = self.cluster.end()
        assert {code for code, _ in ends.values()} == {STOPPED}


def lines_of(stream: subprocess.Popen[str], count: int) -> set[str]:
    assert stream.stdout is not None
    return {stream.stdout.readline() for _ in range(count)}


def control_ports(team: EtcdTeam) -> dict[str, int]:
    records = (
        read_record(NodeRecord, one.value)
        for one in team.left().values()
        if one.name.startswith("nodes/")
    )
    return {one.status.info.node: one.control.port for one in records if one.control is not None}


def test_on_etcd_every_node_is_seen_and_steered_from_every_machine(
    tmp_path: Path, etcd: Etcd
) -> None:
    flags = ("--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    with EtcdTeam(tmp_path, SAYS, *flags, etcd=etcd, nnodes="2:3", conf=TOGETHER) as team:
        machines = Machines(
            team, "--rdzv-backend", "etcd", "--rdzv-endpoint", team.endpoint,
            "--rdzv-conf", f"etcd_prefix={team.prefix}",
        )  # fmt: skip
        machines.start("a", "b", "c")
        team.generation(3)
        machines.await_sockets("a", "b", "c")
        first = {f"[{rank}] first 0 of {rank}\n" for rank in range(3)}
        streams = [machines.follow(at, "logs", "--follow") for at in ("a", ELSEWHERE)]
        streams += [machines.follow(ELSEWHERE, "status", "--watch", "--json")]
        streams += [machines.follow(at, "events", "--follow", "--json") for at in ("b", ELSEWHERE)]
        try:
            for one in streams[:2]:
                assert lines_of(one, 3) == first
            for at in ("b", ELSEWHERE):
                assert machines.reporting(at) == {"a", "b", "c"}
            summary = machines.run("c", "dump", "--all-nodes")[0].splitlines()[0]
            assert re.fullmatch(r"3 ranks \(0-2\): .*", summary)
            assert team.run_id in machines.run(ELSEWHERE, "ps")[0]
            machines.run(ELSEWHERE, "drain", "b", "--reason", "look at it")
            team.generation(2)
            again = {f"[{rank}] first 1 of {rank}\n" for rank in range(2)}
            for one in streams[:2]:
                assert lines_of(one, 2) == again
            assert streams[2].stdout is not None
            while json.loads(streams[2].stdout.readline())["generation"] < 1:
                pass
            for one in streams[3:]:
                seen: set[str] = set()
                assert one.stdout is not None
                while seen != {"a", "b", "c"}:
                    event = json.loads(one.stdout.readline())
                    if "look at it" in event["text"]:
                        seen.add(event["source"])
            told = [
                json.loads(line)
                for line in machines.run("c", "events", "--json")[0].split("\n")
                if line
            ]
            assert {one["source"] for one in told} == {"a", "b", "c"}
            assert [one["wall"] for one in told] == sorted(one["wall"] for one in told)
            machines.stop(ELSEWHERE)
            assert [one.wait(PATIENCE_S) for one in streams[:2]] == [0, 0]
            assert machines.run(ELSEWHERE, "status", code=1)[0] == ""
        finally:
            for one in streams:
                one.kill()
                one.communicate()


def test_an_agent_that_is_stopped_hides_no_other_and_silent_strangers_harm_none(
    tmp_path: Path, etcd: Etcd
) -> None:
    flags = ("--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    patient = f"{TOGETHER},keep_alive_interval=20"
    with EtcdTeam(tmp_path, SAYS, *flags, etcd=etcd, nnodes="3", conf=patient) as team:
        machines = Machines(
            team, "--rdzv-backend", "etcd", "--rdzv-endpoint", team.endpoint,
            "--rdzv-conf", f"etcd_prefix={team.prefix}", env={"HOLDFAST_TOKEN": TOKEN},
        )  # fmt: skip
        machines.start("a", "b", "c")
        team.generation(3)
        machines.await_sockets("a", "b")
        ports = control_ports(team)
        with ExitStack() as strangers:
            for said in (b"", b"\0"):
                for _ in range(SILENT // 2):
                    one = strangers.enter_context(
                        socket.create_connection(("127.0.0.1", ports["b"]))
                    )
                    one.sendall(said)
            assert machines.reporting(ELSEWHERE) == {"a", "b", "c"}
        looking, _ = machines.run("a", "token", "--read-only", "--job", team.run_id)
        machines.run(ELSEWHERE, "logs", token=looking.strip())
        machines.run(ELSEWHERE, "stop", code=1, token=looking.strip())
        machines.run(ELSEWHERE, "status", code=69, token=WRONG)
        team.agents["c"].freeze()
        shown, why = machines.run("a", "status", "--json")
        reports = {one["node"]: one["report"] for one in json.loads(shown)["nodes"]}
        assert {node for node, report in reports.items() if report} == {"a", "b"}
        assert re.search(rf"\bc: .*:{ports['c']}\b", why), why
        team.agents["c"].signal(signal.SIGCONT)
        machines.stop("b")


@pytest.fixture
def listed() -> Iterator[str]:
    """Two places on this machine, each with its two ports."""
    with held_pairs(2) as ports:
        yield ",".join(f"127.0.0.1:{port}" for port in ports)


@pytest.mark.parametrize("backend", ["ha", "file"])
def test_with_its_own_cluster_or_a_shared_folder_it_is_the_same(
    tmp_path: Path, listed: str, backend: str
) -> None:
    (tmp_path / "shared").mkdir(0o700)
    endpoint = listed if backend == "ha" else str(tmp_path / "shared")
    guard = "auth=token" if backend == "ha" else ""
    place = (
        ("--ha", endpoint)
        if backend == "ha"
        else ("--rdzv-backend", backend, "--rdzv-endpoint", endpoint)
    )
    conf = ",".join(filter(None, (QUICK, guard)))
    flags = ("--redirects", "3", "--log-dir", str(tmp_path / "logs"), "--local-addr", "127.0.0.1")
    with Cluster(
        tmp_path, SAYS, *flags, nnodes="2", backend=backend, endpoint=endpoint, conf=conf
    ) as cluster:
        env = {"HOLDFAST_TOKEN": TOKEN} if backend == "ha" else {}
        conf_flag = ("--rdzv-conf", guard) if guard else ()
        machines = Machines(cluster, *place, *conf_flag, env=env)
        machines.start("a", "b")
        cluster.generation(2)
        machines.await_sockets("a", "b")
        first = {f"[{rank}] first 0 of {rank}" for rank in range(2)}
        for at in ("a", ELSEWHERE):
            assert machines.reporting(at) == {"a", "b"}
            assert set(machines.run(at, "logs")[0].splitlines()) == first
        if backend == "ha":
            machines.run(ELSEWHERE, "status", code=69, token=WRONG)
        assert cluster.run_id in machines.run(ELSEWHERE, "ps")[0]
        machines.run("b", "restart")
        cluster.generation(2)
        machines.stop(ELSEWHERE)
