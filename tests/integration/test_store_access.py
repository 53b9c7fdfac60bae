"""Other users of this host, and other hosts, attack the workers' store of a job; every attack must fail."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from chaos.machine_network import address
from holdfast.net.addresses import Address
from holdfast.net.listening import is_local
from network_teams import NetworkCluster, finish, wait_for_group
from other_users import STRANGER, as_user
from real_jobs import PATIENCE_S
from real_teams import OBEY, Agent, Cluster

if TYPE_CHECKING:
    from pathlib import Path

    from chaos.machine_network import MachineNetwork

LISTENING = "0A"
SECOND_ADDRESS = "10.77.0.101"
VALIDATE_AND_PING = bytes.fromhex("00 ce f7 85 3c") + b"\x0dping"


def listens_at(agent: Agent) -> list[tuple[str, int]]:
    """Return the addresses and ports on which a process listens."""
    own = {os.readlink(one.path) for one in os.scandir(f"/proc/{agent.pid}/fd")}
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{agent.pid}/net/{table}") as rows:
            for row in [row.split() for row in rows][1:]:
                if row[3] == LISTENING and f"socket:[{row[9]}]" in own:
                    address, _, port = row[1].partition(":")
                    words = [int(one, 16) for one in re.findall(".{8}", address)]
                    packed = b"".join(word.to_bytes(4, "little") for word in words)
                    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
                    found.append((socket.inet_ntop(family, packed), int(port, 16)))
    return found


@pytest.mark.parametrize(
    ("backend", "host", "flags", "expected"),
    [
        ("c10d", "127.0.0.1", (), "127.0.0.1"),
        ("c10d", "::1", (), "::1"),
        ("static", "localhost", (), "127.0.0.1"),
        ("file", "", ("--local-addr", "127.0.0.1"), "127.0.0.1"),
        ("file", "", ("--local-addr", "localhost"), "127.0.0.1"),
        ("file", "", (), "::"),
    ],
)
def test_job_on_one_host_listens_on_loopback_only(
    tmp_path: Path, backend: str, host: str, flags: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "shared").mkdir()
    where: dict[str, Any] = (
        {"endpoint": str(tmp_path / "shared")} if backend == "file" else {"host": host}
    )
    with Cluster(tmp_path, OBEY, *flags, nnodes="2", backend=backend, **where) as cluster:
        for number, name in enumerate("ab"):
            ranks = ("--node-rank", str(number)) if backend == "static" else ()
            cluster.start(name, *ranks)
        starts = cluster.generation(2)
        master_port = int(starts["a"].master_endpoint.rpartition(":")[2])
        listening = {name: listens_at(agent) for name, agent in cluster.agents.items()}
        assert cluster.finish(starts) == {"a": 0, "b": 0}
    stores = {port: one for every in listening.values() for one, port in every}
    stores.pop(cluster.port, None)
    assert {*stores.values()} == {expected}
    assert master_port in stores


def test_reserved_ports_cannot_be_bound_by_another_user(tmp_path: Path) -> None:
    """Otherwise another user of the host could serve the store of the next generation."""

    def listen(port: int) -> str:
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            thief.bind(("127.0.0.1", port))
            thief.listen()
        return "listens"

    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        starts = cluster.form("a", "b")
        ports = [port for agent in cluster.agents.values() for _, port in listens_at(agent)]
        output = {as_user(STRANGER, lambda port=port: listen(port)) for port in ports}  # type: ignore[misc]
        assert cluster.finish(starts) == {"a": 0, "b": 0}
    # Two ports per agent, the coordinator's, and that of the running generation's store.
    assert len(ports) == 6
    assert all("Address already in use" in one for one in output), output


# The worker with rank 0 executes the command of rank 1, which is slow.
TRUST = """
from holdfast.store.from_env import from_environment
store = from_environment()
store.set(f"here{RANK}", AGENT)
store.wait(["here0", "here1"])
send(f"connected {AGENT} {NUMBER}")
if RANK == "1":
    obey()
    store.set("plan", "three-steps")
send(f"plan {store.get('plan').decode()}")
"""
# A process on a machine that is not in the job sets the value before rank 1 does.
BE_RANK_1 = """
import sys
from datetime import timedelta
from holdfast.store import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), timeout=timedelta(seconds=1))
store.set("plan", "curl-evil")
print(store.get("plan").decode())
"""


@pytest.mark.parametrize(("access", "plan"), [("hosts", "three-steps"), ("open", "curl-evil")])
def test_foreign_host_cannot_impersonate_a_rank_unless_the_store_is_open(
    tmp_path: Path, network: MachineNetwork, access: str, plan: str
) -> None:
    with NetworkCluster(tmp_path, network, "2", script=TRUST) as cluster:
        for name in "ab":
            cluster.start_on(name, conf=f"store={access},rank_order=label,label={name}")
        port = cluster.next_start().master_endpoint.rpartition(":")[2]
        pids = wait_for_group(cluster, *"ab")
        attack = [*network.inside(2), sys.executable, "-c", BE_RANK_1, address(0), port]
        attacked = subprocess.run(attack, capture_output=True, text=True, timeout=PATIENCE_S)
        if access == "hosts":
            finish({"b": pids["b"]})
        assert cluster.messages.next()[:2] == ["plan", plan]
        assert (attacked.returncode == 0) == (access == "open"), attacked.stderr
        if access == "open":
            finish({"b": pids["b"]})
        assert cluster.codes() == {"a": 0, "b": 0}


@pytest.mark.parametrize("access", ["hosts", "open"])
def test_another_user_of_the_stores_host_is_refused_at_every_address(
    tmp_path: Path, network: MachineNetwork, access: str
) -> None:
    def attack(source: str, port: int) -> str:
        target = address(0) if source == address(0) else "127.0.0.1"
        with socket.create_connection((target, port), PATIENCE_S, (source, 0)) as one:
            one.sendall(VALIDATE_AND_PING)
            return "served" if one.recv(4) else "refused"

    sources = ("127.0.0.1", "127.0.0.2", address(0), SECOND_ADDRESS)
    with NetworkCluster(tmp_path, network, "2") as cluster:
        network.add_address(0, SECOND_ADDRESS)
        cluster.start_nodes("ab", conf=f"store={access}")
        port = int(cluster.next_start().master_endpoint.rpartition(":")[2])
        pids = wait_for_group(cluster, *"ab")
        inside = cluster.agents["a"].pid
        second = Address(socket.AF_INET, (SECOND_ADDRESS, 0))
        assert as_user(0, lambda: str(is_local(second)), inside) == "True"
        for source in sources:
            output = as_user(STRANGER, lambda source=source: attack(source, port), inside)  # type: ignore[misc]
            assert output == "refused" or output.startswith("ConnectionResetError"), source
            assert as_user(0, lambda source=source: attack(source, port), inside) == "served"  # type: ignore[misc]
        finish(pids)
        assert cluster.codes() == {"a": 0, "b": 0}


def test_another_user_of_a_second_host_is_refused(tmp_path: Path, network: MachineNetwork) -> None:
    def attack(port: int) -> str:
        with socket.create_connection((address(0), port), PATIENCE_S) as one:
            one.sendall(VALIDATE_AND_PING)
            return "served" if one.recv(4) else "refused"

    with NetworkCluster(tmp_path, network, "2") as cluster:
        cluster.start_nodes("ab")
        port = int(cluster.next_start().master_endpoint.rpartition(":")[2])
        pids = wait_for_group(cluster, *"ab")
        inside = cluster.agents["b"].pid
        output = as_user(STRANGER, lambda: attack(port), inside)
        assert output == "refused" or output.startswith("ConnectionResetError"), output
        assert as_user(0, lambda: attack(port), inside) == "served"
        cluster.agents["a"].wait_for_output(f"another user of that host (uid {STRANGER})")
        finish(pids)
        assert cluster.codes() == {"a": 0, "b": 0}


# The worker with rank 1 sets its value and exits immediately; the value must not be lost.
PRIVATE = """
from holdfast.store.from_env import from_environment
store = from_environment()
store.set(f"here{RANK}", AGENT)
store.wait(["here0", "here1"])
send(f"connected {AGENT} {NUMBER}")
obey()
if RANK == "1":
    store.set("large", bytes(range(256)) * 30_000)
    store.set("last", "word")
else:
    assert store.get("large") == bytes(range(256)) * 30_000
    send(f"plan {store.get('last').decode()}")
"""


def test_private_store_serves_workers_only_through_their_agents(
    tmp_path: Path, network: MachineNetwork
) -> None:
    """Other users on a host of the job, and other processes of the job's user there, are refused too."""

    def attack(host: str, port: int) -> str:
        with socket.create_connection((host, port), PATIENCE_S) as one:
            one.sendall(VALIDATE_AND_PING)
            return "served" if one.recv(4) else "refused"

    with NetworkCluster(tmp_path, network, "2", script=PRIVATE) as cluster:
        for name in "ab":
            cluster.start_on(name, conf=f"store=private,rank_order=label,label={name}")
        starts = {
            one.agent: one.master_endpoint for one in (cluster.next_start(), cluster.next_start())
        }
        pids = wait_for_group(cluster, *"ab")
        assert all(where.startswith("127.0.0.1:") for where in starts.values())
        ports = {name: int(where.rpartition(":")[2]) for name, where in starts.items()}
        inside = {name: cluster.agents[name].pid for name in "ab"}
        attempts = [
            (STRANGER, "a", "127.0.0.1", ports["a"]),  # At each agent's own port,
            (STRANGER, "b", "127.0.0.1", ports["b"]),
            (STRANGER, "b", address(0), ports["a"]),  # and at the store itself,
            (0, "b", address(0), ports["a"]),  # which refuses even the job's user.
        ]
        for user, at, host, port in attempts:
            output = as_user(user, lambda host=host, port=port: attack(host, port), inside[at])  # type: ignore[misc]
            assert output == "refused" or output.startswith("ConnectionReset"), (
                user,
                at,
                host,
                output,
            )
        finish(pids)
        assert cluster.messages.next()[:2] == ["plan", "word"]
        assert cluster.codes() == {"a": 0, "b": 0}


@pytest.mark.parametrize("access", ["hosts", "private"])
@pytest.mark.parametrize("backend", ["c10d", "file"])
def test_each_generation_is_attested_separately(
    tmp_path: Path, network: MachineNetwork, backend: str, access: str
) -> None:
    (tmp_path / "shared").mkdir()
    shared = str(tmp_path / "shared") if backend == "file" else ""
    with NetworkCluster(tmp_path, network, "3", "--max-restarts=1", shared=shared) as cluster:
        for node, name in enumerate("abc"):
            cluster.start_on(name, "--local-addr", address(node), conf=f"store={access}")
        first = wait_for_group(cluster, *"abc")
        os.kill(first["b"], signal.SIGUSR2)
        finish(wait_for_group(cluster, *"abc"))
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0}
