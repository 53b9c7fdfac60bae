"""Real agents with networks of their own, joined by a bridge that can be cut and healed.

Each node is a network namespace, held by a process that sleeps in it, and one more is the switch
between them. The kernel removes a namespace with the last process in it, and the sleepers die with
this process, so nothing is left whatever happens; the machine's own network is never touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from real_jobs import PATIENCE_S, Watched
from real_teams import LOOK_AGAIN_S, QUICK, SOON_SILENT, Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from real_teams import Agent

NODES = 3
PORT = 29400
NOWHERE = "02:00:00:00:00:99"  # No interface has this address.
LISTENING = "0A"
CUTTING = f"{QUICK},{SOON_SILENT}"


def missing() -> str:
    """Return why there can be no networks here, or nothing."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    for tool in ("ip", "nsenter", "setpriv", "unshare"):
        if shutil.which(tool) is None:
            return f"the command {tool} is not installed"
    probe = subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True, text=True)
    return f"namespaces are not allowed here: {probe.stderr.strip()}" if probe.returncode else ""


class Network:
    """Nodes 0, 1, 2 ... at 10.77.0.1, .2, .3 ..., behind one switch."""

    def __init__(self, nodes: int) -> None:
        self._sleepers: list[subprocess.Popen[bytes]] = []
        try:
            self._switch = self._make_namespace()
            self._run(self._switch, "ip link add bridge type bridge")
            self._run(self._switch, "ip link set bridge up")
            self._nodes = [self._make_namespace() for _ in range(nodes)]
            for node, pid in enumerate(self._nodes):
                link = f"ip link add port{node} type veth peer name eth0 netns {pid}"
                self._run(self._switch, link)
                self._run(self._switch, f"ip link set port{node} master bridge up")
                self._run(pid, f"ip address add {address(node)}/24 dev eth0")
                self._run(pid, "ip link set eth0 up")
                self._run(pid, "ip link set lo up")
        except BaseException:
            self.close()
            raise

    def inside(self, node: int) -> tuple[str, ...]:
        """Return what goes before a command that is to run on a node."""
        return ("nsenter", "-t", str(self._nodes[node]), "-n", "-m")

    def cut(self, node: int) -> None:
        """Unplug a node."""
        self._run(self._switch, f"ip link set port{node} down")

    def heal(self, node: int) -> None:
        """Plug it in again."""
        self._run(self._switch, f"ip link set port{node} up")

    def silence(self, node: int, to: int) -> None:
        """Lose all that one node sends to another; the other direction works."""
        self._neighbour("replace", node, to, f"lladdr {NOWHERE} nud permanent")

    def unsilence(self, node: int, to: int) -> None:
        self._neighbour("delete", node, to, "")

    def name(self, node: int, host: str, at: str) -> None:
        """Let a node, and no other, know a host by this address."""
        hosts = f"echo {at} {host} > /run/hosts && mount --bind /run/hosts /etc/hosts"
        self._run(self._nodes[node], "mount -t tmpfs none /run")
        subprocess.run([*self.inside(node), "sh", "-c", hosts], check=True)

    def close(self) -> None:
        for sleeper in self._sleepers:
            sleeper.kill()
            sleeper.wait(PATIENCE_S)

    def _neighbour(self, verb: str, node: int, to: int, how: str) -> None:
        self._run(self._nodes[node], f"ip neighbour {verb} {address(to)} {how} dev eth0")

    def _make_namespace(self) -> int:
        """Return the process that holds a network of its own, and mounts of its own."""
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "-n", "-m", "sleep", "infinity"]
        sleeper = subprocess.Popen(command)
        self._sleepers.append(sleeper)
        deadline = time.monotonic() + PATIENCE_S
        while os.readlink(f"/proc/{sleeper.pid}/exe").rpartition("/")[2] != "sleep":
            assert time.monotonic() < deadline
            time.sleep(LOOK_AGAIN_S)
        return sleeper.pid

    def _run(self, pid: int, command: str) -> None:
        words = ["nsenter", "-t", str(pid), "-n", "-m", *command.split()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{command}: {done.stderr}"


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


class NetworkCluster(Cluster):
    """Agents of which each is on a node of its own: `a` on node 0, which coordinates, and so on."""

    def __init__(self, folder: Path, network: Network, nnodes: str, host: str = "") -> None:
        where = host or address(0)
        super().__init__(folder, MEET, nnodes=nnodes, host=where, port=PORT, conf=CUTTING)
        self._network = network

    def start_on(self, name: str, conf: str = "") -> Agent:
        return self.start(name, conf=conf, before=self._network.inside(ord(name) - ord("a")))

    def start_nodes(self, names: str, conf: str = "") -> None:
        """Start agents, and the first of them first."""
        self.await_coordinator(self.start_on(names[0], conf))
        for name in names[1:]:
            self.start_on(name, conf)

    def await_coordinator(self, agent: Agent) -> None:
        """Wait until the agent listens, as its own network tells."""
        deadline = time.monotonic() + PATIENCE_S
        wanted = f":{PORT:04X}"
        while True:
            assert agent.process.poll() is None, agent.said()
            assert time.monotonic() < deadline, agent.said()
            for table in ("tcp", "tcp6"):
                with open(f"/proc/{agent.pid}/net/{table}") as sockets:
                    rows = [row.split() for row in sockets][1:]
                if any(row[1].endswith(wanted) and row[3] == LISTENING for row in rows):
                    return
            time.sleep(LOOK_AGAIN_S)

    def check_port_is_free(self) -> None:
        """The port is in a network that ends with its node."""


# All workers of a generation meet before they wait for orders, in the store that an agent serves.
MEET = """
from holdfast.store.from_env import from_environment
store = from_environment()
store.set(f"here{RANK}", AGENT)
store.wait([f"here{rank}" for rank in range(int(E["WORLD_SIZE"]))])
tell(f"met {AGENT} {NUMBER}")
obey()
"""


def meeting(cluster: NetworkCluster, *names: str) -> dict[str, int]:
    """Wait until these agents' workers have met in one generation; return their processes."""
    met: dict[str, dict[str, int]] = {}
    while True:
        words = cluster.news.next()
        cluster.workers.append(Watched(int(words[-1])))
        if words[0] != "met":
            continue
        _, agent, generation, pid = words
        mates = met.setdefault(generation, {})
        mates[agent] = int(pid)
        if set(mates) == set(names):
            return mates


def finish(pids: dict[str, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)


@pytest.fixture
def network() -> Iterator[Network]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    made = Network(NODES)
    yield made
    made.close()


def test_workers_on_several_machines_meet(tmp_path: Path, network: Network) -> None:
    with NetworkCluster(tmp_path, network, "3") as cluster:
        cluster.start_nodes("abc")
        finish(meeting(cluster, *"abc"))
        ends = cluster.end()
        assert {name: code for name, (code, _) in ends.items()} == {"a": 0, "b": 0, "c": 0}
        assert "the coordinator at 10.77.0.1:29400 has no token" in ends["a"][1]


@pytest.mark.parametrize("alias", ["127.0.0.1", "127.0.1.1"])
def test_a_host_that_knows_itself_as_loopback_can_be_met_by_the_others(
    tmp_path: Path, network: Network, alias: str
) -> None:
    """`/etc/hosts` of many systems says so of a machine's own name; the others must not be told."""
    network.name(0, "head", alias)
    for node in (1, 2):
        network.name(node, "head", address(0))
    with NetworkCluster(tmp_path, network, "3", host="head") as cluster:
        cluster.start_nodes("abc")
        finish(meeting(cluster, *"abc"))
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0}


def test_a_node_that_is_cut_off_is_lost_and_joins_again_when_healed(
    tmp_path: Path, network: Network
) -> None:
    with NetworkCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc")
        old = meeting(cluster, *"abc")
        network.cut(2)
        meeting(cluster, *"ab")
        gone = Watched(old["c"])
        network.heal(2)
        after = meeting(cluster, *"abc")
        gone.gone_already()
        assert "fenced" in cluster.agents["c"].said()
        finish(after)
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0}


@pytest.mark.parametrize("direction", ["to the coordinator", "from the coordinator"])
def test_a_cut_of_one_direction_is_a_cut(tmp_path: Path, network: Network, direction: str) -> None:
    ways = (2, 0) if direction == "to the coordinator" else (0, 2)
    with NetworkCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc")
        meeting(cluster, *"abc")
        network.silence(*ways)
        meeting(cluster, *"ab")
        network.unsilence(*ways)
        after = meeting(cluster, *"abc")
        finish(after)
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0}


def test_the_coordinators_machine_may_be_cut_off_and_healed(
    tmp_path: Path, network: Network
) -> None:
    with NetworkCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc")
        meeting(cluster, *"abc")
        network.cut(0)
        cluster.agents["a"].says("the round is broken")
        network.heal(0)
        after = meeting(cluster, *"abc")
        finish(after)
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0}


def test_nodes_whose_coordinator_stays_cut_off_end(tmp_path: Path, network: Network) -> None:
    with NetworkCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc", conf="coordinator_timeout=3")
        meeting(cluster, *"abc")
        network.cut(0)
        for name in "bc":
            code, said = cluster.agents[name].end()
            assert code == 78
            assert f"the coordinator at {cluster.endpoint} could not be reached since" in said
        cluster.agents["a"].signal(signal.SIGTERM)
        assert cluster.codes()["a"] == 128 + signal.SIGTERM
