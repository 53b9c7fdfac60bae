"""Real agents with separate networks, connected by a switch that can cut and restore their links."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from chaos.machine_network import MachineNetwork, address
from network_teams import PORT, NetworkCluster, finish, wait_for_group
from real_jobs import HOLDFAST, PATIENCE_S, Watched

if TYPE_CHECKING:
    from pathlib import Path


def test_workers_on_several_machines_connect(tmp_path: Path, network: MachineNetwork) -> None:
    """Two of the machines have the same host name, so one of them gets another id."""
    names = {node: f"node{node}" for node in (1, 2)}
    try:
        for node in names:
            subprocess.run([*network.inside(node), "hostname", "clone.example"], check=True)
        with NetworkCluster(tmp_path, network, "3") as cluster:
            cluster.start_nodes("abc")
            finish(wait_for_group(cluster, *"abc"))
            assert cluster.codes() == {"a": 0, "b": 0, "c": 0}
            output = cluster.agents["a"].output()
            assert {*re.findall(r"\d on ([^, \n]+)", output)} == {"node0", "clone", "clone-2"}
            outputs = "".join(cluster.agents[name].output() for name in "bc")
            assert outputs.count("this node joins as clone-2\n") == 1
    finally:
        for node, name in names.items():
            subprocess.run([*network.inside(node), "hostname", name], check=True)


def test_nodes_with_a_shared_home_share_a_token_and_others_are_refused(
    tmp_path: Path, network: MachineNetwork
) -> None:
    """The stranger knows everything except the token; it has another home, or no token."""
    shared, other = tmp_path / "shared", tmp_path / "other"
    for folder in (shared, other):
        folder.mkdir()
    with NetworkCluster(tmp_path, network, "2") as cluster:
        home = {"HOME": str(shared)}
        first = cluster.start_on("a", conf="node_id=victim", env=home)
        cluster.await_coordinator(first)
        cluster.start_on("b", env=home)
        workers = wait_for_group(cluster, *"ab")
        token = shared / ".holdfast" / "token"
        assert first.output().count(str(token)) == 1
        assert str(token) not in cluster.agents["b"].output()
        attack = "node_id=victim,is_host=0,join_timeout=1"
        for name, conf in (("guess", attack), ("bare", f"{attack},auth=none")):
            inside = network.inside(2)
            cluster.start(name, conf=conf, env={"HOME": str(other)}, before=inside)
            code, output = cluster.agents[name].end()
            assert code == 78
            assert "token" in output.splitlines()[-1]
        assert cluster.is_quiet()
        finish(workers)
        assert cluster.codes() == {"a": 0, "b": 0, "guess": 78, "bare": 78}


def test_node_accepted_without_a_token_cannot_replace_a_live_node(
    tmp_path: Path, network: MachineNetwork
) -> None:
    """With `auth=none`, such a node could otherwise become rank 0 and serve the workers' store."""
    with NetworkCluster(tmp_path, network, "2") as cluster:
        cluster.await_coordinator(cluster.start_on("a", conf="auth=none,node_id=victim"))
        cluster.start_on("b", conf="auth=none")
        workers = wait_for_group(cluster, *"ab")
        attack = "auth=none,node_id=victim,is_host=0"
        cluster.start(
            "stranger", "--local-addr=203.0.113.66", conf=attack, before=network.inside(2)
        )
        cluster.agents["stranger"].wait_for_output("already has the node id victim")
        assert cluster.agents["stranger"].end()[0] == 78
        assert cluster.is_quiet()
        finish(workers)
        assert cluster.codes() == {"a": 0, "b": 0, "stranger": 78}


@pytest.mark.parametrize("alias", ["127.0.0.1", "127.0.1.1"])
def test_host_whose_name_is_loopback_is_reachable_for_others(
    tmp_path: Path, network: MachineNetwork, alias: str
) -> None:
    """`/etc/hosts` of many systems maps a machine's own name to loopback, which other nodes must not use."""
    network.name(0, "head", alias)
    for node in (1, 2):
        network.name(node, "head", address(0))
    with NetworkCluster(tmp_path, network, "3", host="head") as cluster:
        cluster.start_nodes("abc")
        finish(wait_for_group(cluster, *"abc"))
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0}


def test_node_with_a_loopback_endpoint_is_reachable_for_others(
    tmp_path: Path, network: MachineNetwork
) -> None:
    token = {"HOLDFAST_TOKEN": "a token that all of them were given"}
    with NetworkCluster(tmp_path, network, "2") as cluster:
        endpoint = f"{address(0)}:{PORT}"
        command = [*network.inside(0), *HOLDFAST, "coordinator", "--endpoint", endpoint]
        cluster.await_coordinator(cluster._run("coordinator", command, token))
        for name, host in (("a", "localhost"), ("b", address(0))):
            cluster.host = host
            first = f"rank_order=label,label={name}"  # This makes `a` the first node.
            cluster.start_on(name, conf=first, env=token)
        finish(wait_for_group(cluster, *"ab"))
        for name in "ab":
            assert cluster.agents[name].end()[0] == 0


def test_cut_off_node_is_lost_and_rejoins_after_the_cut(
    tmp_path: Path, network: MachineNetwork
) -> None:
    with NetworkCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc")
        old = wait_for_group(cluster, *"abc")
        network.cut(2)
        wait_for_group(cluster, *"ab")
        gone = Watched(old["c"])
        network.heal(2)
        after = wait_for_group(cluster, *"abc")
        gone.assert_exited()
        assert "fenced" in cluster.agents["c"].output()
        finish(after)
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0}


def test_cut_off_node_stops_its_workers_before_they_are_replaced(
    tmp_path: Path, network: MachineNetwork
) -> None:
    with NetworkCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc", conf="on_lost=stop")
        old = wait_for_group(cluster, *"abc")
        gone = Watched(old["c"])
        network.cut(2)
        wait_for_group(cluster, *"ab")
        gone.assert_exited()
        network.heal(2)
        after = wait_for_group(cluster, *"abc")
        assert "no response from the coordinator" in cluster.agents["c"].output()
        finish(after)
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0}


@pytest.mark.parametrize("direction", ["to the coordinator", "from the coordinator"])
def test_node_cut_off_in_one_direction_is_lost(
    tmp_path: Path, network: MachineNetwork, direction: str
) -> None:
    ways = (2, 0) if direction == "to the coordinator" else (0, 2)
    with NetworkCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc")
        wait_for_group(cluster, *"abc")
        network.silence(*ways)
        wait_for_group(cluster, *"ab")
        network.unsilence(*ways)
        after = wait_for_group(cluster, *"abc")
        finish(after)
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0}


def test_job_survives_a_cut_of_the_coordinators_machine(
    tmp_path: Path, network: MachineNetwork
) -> None:
    """The other nodes detect only its silence. With default settings, they must report it within 10 s."""
    by_default = "keep_alive_interval=1,keep_alive_max_attempt=5"
    with NetworkCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc", conf=by_default)
        wait_for_group(cluster, *"abc")
        network.cut(0)
        for name in "bc":
            output = cluster.agents[name].wait_for_output("(coordinator_timeout=60)")
            left = re.search(r"(\d+) s more \(coordinator_timeout", output)
            assert left is not None
            assert 60 - int(left[1]) <= 10
        cluster.agents["a"].wait_for_output("the round is broken")
        network.heal(0)
        after = wait_for_group(cluster, *"abc")
        for name in "bc":
            cluster.agents[name].wait_for_output(
                f"reconnected to the coordinator at {cluster.endpoint}"
            )
        finish(after)
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0}


def test_nodes_exit_if_the_coordinator_stays_cut_off(
    tmp_path: Path, network: MachineNetwork
) -> None:
    with NetworkCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc", conf="coordinator_timeout=3")
        wait_for_group(cluster, *"abc")
        network.cut(0)
        for name in "bc":
            code, output = cluster.agents[name].end()
            assert code == 78
            assert f"the coordinator at {cluster.endpoint} has been unreachable since" in output
        cluster.agents["a"].signal(signal.SIGTERM)
        assert cluster.codes()["a"] == 128 + signal.SIGTERM


# A worker whose failure report has the maximum size.
LONG_FAILURE = """
signal.sigwaitinfo(ORDERS)
for at in range(1500):
    print(f"line {at} of very many that go before the reason of this failure", file=sys.stderr)
raise RuntimeError("the reason of this failure" + " and its details" * 4000)
"""


@pytest.mark.parametrize("link", ["slow", "narrow"])
def test_long_failure_report_arrives_over_a_slow_link(
    tmp_path: Path, network: MachineNetwork, link: str
) -> None:
    """Sending takes longer than a node may be silent, but its heartbeats still arrive."""
    if shutil.which("tc") is None:
        pytest.skip("the command tc is not installed")
    with NetworkCluster(tmp_path, network, "2", script=LONG_FAILURE) as cluster:
        cluster.start_nodes("ab")
        starts = cluster.generation(2)
        if link == "slow":
            network.throttle(1, kbit_s=320)
        else:
            network.narrow(1, bytes_max=1280)
        starts["b"].fail()
        ends = cluster.end()
        assert {name: code for name, (code, _) in ends.items()} == {"a": 1, "b": 1}
        assert all(
            "RuntimeError: the reason of this failure" in output for _, output in ends.values()
        )


# A job on one machine. A job on another machine may use its store, as replica groups do.
HOSTS_A_STORE = """\
import os, sys
print(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
sys.stdin.readline()
"""
VISITS_IT = """\
import sys
from datetime import timedelta
from holdfast.store import TCPStore
TCPStore(sys.argv[1], int(sys.argv[2]), timeout=timedelta(seconds=0.5)).set("visited", "yes")
"""


@pytest.mark.parametrize(
    ("flags", "host", "is_open"),
    [
        ("--rdzv_backend=c10d --rdzv_endpoint=localhost:0 --nnodes=1", "node0", True),
        ("--standalone", "127.0.0.1", False),
        ("--nnodes=1", "127.0.0.1", False),
    ],
)
def test_store_of_a_one_node_job_is_reachable_only_if_configured(
    tmp_path: Path, network: MachineNetwork, flags: str, host: str, is_open: bool
) -> None:
    for node in (0, 1):
        network.name(node, "node0", address(0))
    script = tmp_path / "train.py"
    script.write_text(HOSTS_A_STORE)
    command = [*network.inside(0), *HOLDFAST, "run", *flags.split(), str(script)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        received, port = job.stdout.readline().split()
        visit = [*network.inside(1), sys.executable, "-c", VISITS_IT, "node0", port]
        visited = subprocess.run(visit, capture_output=True, timeout=PATIENCE_S).returncode == 0
        job.communicate("go on\n", timeout=PATIENCE_S)
    assert (received, visited, job.returncode) == (host, is_open, 0)
