"""Jobs without a coordinator can be watched and steered from every machine, through their agents.

Each agent has its own runtime folder, so that it does not find the sockets of others, as on separate machines.
`ELSEWHERE` is a machine without an agent.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from chaos.machine_network import address
from etcd_teams import EtcdTeam
from holdfast.control.job_client import open_contact
from holdfast.control.node_server import QUERIES_MAX
from holdfast.core.etcd.keys import NodeRecord, read_record
from holdfast.net.agent_port import ControlCredentials
from holdfast.wire import messages
from holdfast.wire.messages import Query
from real_jobs import HOLDFAST, PATIENCE_S
from real_teams import TOGETHER, Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from chaos.machine_network import MachineNetwork
    from holdfast.core.protocol import ControlPort
    from real_etcd import Etcd

STOPPED = 143
TOKEN, WRONG = "e" * 32, "f" * 32
ELSEWHERE = "x"
MACHINES = 4  # One each for `a`, `b` and `c`, and one without an agent.
PRINTS = """
    print("first", NUMBER, "of", RANK, flush=True)
    obey()
"""
SILENT = 200
POLL_S = 0.02


class Machines:
    """The machines of one job, and one more; a test runs commands on each of them."""

    def __init__(
        self,
        cluster: Cluster,
        *place: str,
        env: dict[str, str] | None = None,
        network: MachineNetwork | None = None,
    ) -> None:
        self.cluster = cluster
        self._network = network
        self.place = (*place, "--rdzv-id", cluster.run_id)
        self._env = env or {}

    def env(self, name: str) -> dict[str, str]:
        folder = self.cluster.folder / name
        folder.mkdir(exist_ok=True)
        return {**self._env, "HOLDFAST_RUNTIME_DIR": str(folder)}

    def start(self, *names: str) -> None:
        for name in names:
            before = self.inside(name)
            self.cluster.start(name, conf=f"node_id={name}", env=self.env(name), before=before)

    def inside(self, name: str) -> tuple[str, ...]:
        """Return the prefix of a command that runs on a machine."""
        number = 3 if name == ELSEWHERE else ord(name) - ord("a")
        return self._network.inside(number) if self._network is not None else ()

    def await_sockets(self, *names: str) -> None:
        """Wait until these agents can be discovered on their own machines."""
        deadline = time.monotonic() + PATIENCE_S
        for name in names:
            while not [*(self.cluster.folder / name).glob("holdfast-*/*.sock")]:
                assert time.monotonic() < deadline, self.cluster.agents[name].output()
                time.sleep(POLL_S)

    def command(self, at: str, *words: str) -> list[str]:
        return [*self.inside(at), *HOLDFAST, *words, *(self.place if at == ELSEWHERE else ())]

    def run(self, at: str, *words: str, code: int = 0, token: str = "") -> tuple[str, str]:
        """Run a command on a machine; return its standard output and standard error."""
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

    def await_reports(self, at: str, *nodes: str) -> str:
        """Wait until exactly the agents of these nodes report; return the standard error."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            shown, why = self.run(at, "status", "--json")
            reporting = {one["node"] for one in json.loads(shown)["nodes"] if one["report"]}
            if reporting == {*nodes}:
                return why
            assert time.monotonic() < deadline, (shown, why)

    def stop(self, at: str) -> None:
        self.run(at, "stop", "--reason", "enough")
        ends = self.cluster.end()
        assert {code for code, _ in ends.values()} == {STOPPED}


def lines_of(stream: subprocess.Popen[str], count: int) -> set[str]:
    assert stream.stdout is not None
    return {stream.stdout.readline() for _ in range(count)}


def outcome_shown(watch: subprocess.Popen[str]) -> str:
    """Wait until `status --watch --json` ends by itself; return the outcome that it showed."""
    out, _ = watch.communicate(timeout=PATIENCE_S)
    assert watch.returncode == 0
    outcome: str = json.loads(out.splitlines()[-1])["outcome"]
    return outcome


def control_ports(team: EtcdTeam) -> dict[str, ControlPort]:
    records = (
        read_record(NodeRecord, one.value)
        for one in team.left().values()
        if one.name.startswith("nodes/")
    )
    return {one.status.info.node: one.control for one in records if one.control is not None}


async def request_stacks_until_closed(team: EtcdTeam) -> None:
    """Request stacks from an agent without reading them, until it closes the connection."""
    access = ControlCredentials(run_id=team.run_id, token=TOKEN.encode())
    found = access.contacts(("", "127.0.0.1", one) for one in control_ports(team).values())
    connection = await open_contact(found.contacts[0], team.run_id, found, None)
    try:
        for number in range(2 * QUERIES_MAX):
            connection.send(Query(id=number, what=messages.STACKS, run_id=team.run_id))
        async with asyncio.timeout(PATIENCE_S):
            while not connection.problem:  # noqa: ASYNC110 (no event reports it)
                await asyncio.sleep(POLL_S)
    finally:
        connection.close()


@contextmanager
def three_on_etcd(tmp_path: Path, etcd: Etcd) -> Iterator[tuple[EtcdTeam, Machines]]:
    """Nodes `a`, `b` and `c` of one job with control ports, each on its own machine."""
    flags = ("--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    with EtcdTeam(tmp_path, PRINTS, *flags, etcd=etcd, nnodes="2:3", conf=TOGETHER) as team:
        machines = Machines(
            team, "--rdzv-backend", "etcd", "--rdzv-endpoint", team.endpoint,
            "--rdzv-conf", f"etcd_prefix={team.prefix}",
        )  # fmt: skip
        machines.start("a", "b", "c")
        team.generation(3)
        machines.await_sockets("a", "b", "c")
        yield team, machines


def test_every_node_on_etcd_can_be_watched_and_steered_from_every_machine(
    tmp_path: Path, etcd: Etcd
) -> None:
    with three_on_etcd(tmp_path, etcd) as (team, machines):
        first = {f"[{rank}] first 0 of {rank}\n" for rank in range(3)}
        streams = [machines.follow(at, "logs", "--follow") for at in ("a", ELSEWHERE)]
        streams += [machines.follow(ELSEWHERE, "status", "--watch", "--json")]
        streams += [machines.follow(at, "events", "--follow", "--json") for at in ("b", ELSEWHERE)]
        try:
            for one in streams[:2]:
                assert lines_of(one, 3) == first
            for at in ("b", ELSEWHERE):
                machines.await_reports(at, "a", "b", "c")
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
            received = [
                json.loads(line)
                for line in machines.run("c", "events", "--json")[0].split("\n")
                if line
            ]
            assert {one["source"] for one in received} == {"a", "b", "c"}
            assert [one["wall"] for one in received] == sorted(one["wall"] for one in received)
            machines.stop(ELSEWHERE)
            assert [one.wait(PATIENCE_S) for one in streams[:2]] == [0, 0]
            assert machines.run(ELSEWHERE, "status", code=1)[0] == ""
            assert team.run_id not in machines.run(ELSEWHERE, "ps")[0]
        finally:
            for one in streams:
                one.kill()
                one.communicate()


def test_watching_from_another_machine_survives_the_loss_of_the_leader(
    tmp_path: Path, etcd: Etcd
) -> None:
    with three_on_etcd(tmp_path, etcd) as (team, machines):
        logs = machines.follow(ELSEWHERE, "logs", "--follow")
        status = machines.follow(ELSEWHERE, "status", "--watch", "--json")
        try:
            assert lines_of(logs, 3) == {f"[{rank}] first 0 of {rank}\n" for rank in range(3)}
            lines_of(status, 1)
            team.agents[team.leader()].kill()
            team.generation(2)
            assert lines_of(logs, 2) == {f"[{rank}] first 1 of {rank}\n" for rank in range(2)}
            assert status.stdout is not None
            while json.loads(status.stdout.readline())["generation"] < 1:
                pass
            machines.run(ELSEWHERE, "stop")
            assert logs.wait(PATIENCE_S) == 0
            assert outcome_shown(status) == "stopped"
        finally:
            for one in (logs, status):
                one.kill()
                one.communicate()


def test_silent_clients_do_not_affect_an_agent_and_a_set_token_is_required(
    tmp_path: Path, etcd: Etcd
) -> None:
    flags = ("--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    with EtcdTeam(tmp_path, PRINTS, *flags, etcd=etcd, nnodes="2", conf=TOGETHER) as team:
        machines = Machines(
            team, "--rdzv-backend", "etcd", "--rdzv-endpoint", team.endpoint,
            "--rdzv-conf", f"etcd_prefix={team.prefix}", env={"HOLDFAST_TOKEN": TOKEN},
        )  # fmt: skip
        machines.start("a", "b")
        team.generation(2)
        machines.await_sockets("a", "b")
        ports = control_ports(team)
        with ExitStack() as connections:
            for data in (b"", b"\0"):
                for _ in range(SILENT // 2):
                    one = connections.enter_context(
                        socket.create_connection(("127.0.0.1", ports["b"].port))
                    )
                    one.sendall(data)
            machines.await_reports(ELSEWHERE, "a", "b")
        asyncio.run(request_stacks_until_closed(team))
        machines.await_reports(ELSEWHERE, "a", "b")
        read_only_token, _ = machines.run("a", "token", "--read-only", "--job", team.run_id)
        machines.run(ELSEWHERE, "logs", token=read_only_token.strip())
        machines.run(ELSEWHERE, "stop", code=1, token=read_only_token.strip())
        machines.run(ELSEWHERE, "status", code=69, token=WRONG)
        machines.stop("b")


def test_every_node_in_a_shared_folder_can_be_watched_and_steered(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(0o700)
    flags = ("--redirects", "3", "--log-dir", str(tmp_path / "logs"), "--local-addr", "127.0.0.1")
    with Cluster(
        tmp_path, PRINTS, *flags, nnodes="2", backend="file", endpoint=str(shared)
    ) as cluster:
        machines = Machines(cluster, "--rdzv-backend", "file", "--rdzv-endpoint", str(shared))
        machines.start("a", "b")
        cluster.generation(2)
        machines.await_sockets("a", "b")
        first = {f"[{rank}] first 0 of {rank}" for rank in range(2)}
        for at in ("a", ELSEWHERE):
            machines.await_reports(at, "a", "b")
            assert set(machines.run(at, "logs")[0].splitlines()) == first
        assert cluster.run_id in machines.run(ELSEWHERE, "ps")[0]
        machines.run("b", "restart")
        cluster.generation(2)
        machines.stop(ELSEWHERE)


def test_with_ha_any_machine_can_steer_and_a_silent_agent_is_named(
    tmp_path: Path, network: MachineNetwork
) -> None:
    listed = ",".join(map(address, range(3)))
    flags = ("--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    patient = f"{TOGETHER},keep_alive_interval=20"
    with Cluster(
        tmp_path, PRINTS, *flags, nnodes="2:3", backend="ha", endpoint=listed, conf=patient
    ) as cluster:
        machines = Machines(cluster, "--ha", listed, network=network)
        machines.start("a", "b", "c")
        cluster.generation(3)
        machines.await_sockets("a", "b", "c")
        network.silence(2, to=3)
        assert machines.await_reports("a", "a", "b", "c") == ""
        why = machines.await_reports(ELSEWHERE, "a", "b")
        assert re.search(rf"\bc: .*{address(2)}\b", why), why
        network.unsilence(2, to=3)
        printed, _ = machines.run(ELSEWHERE, "logs")
        assert set(printed.splitlines()) == {f"[{rank}] first 0 of {rank}" for rank in range(3)}
        machines.run(ELSEWHERE, "status", code=69, token=WRONG)
        machines.run(ELSEWHERE, "drain", "b")
        cluster.generation(2)
        status = machines.follow(ELSEWHERE, "status", "--watch", "--json")
        try:
            lines_of(status, 1)
            machines.stop(ELSEWHERE)
            assert outcome_shown(status) == "stopped"
        finally:
            status.kill()
            status.communicate()
