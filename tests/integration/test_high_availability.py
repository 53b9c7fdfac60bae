"""Real jobs whose own machines run their etcd (`--ha`).

In tests of machines, each machine has its own network: 0, 1 and 2 are in the list of `--ha`, 3 is not. The name of an
agent is its machine and a letter: `0a` and `0b` are two consecutive agents on machine 0.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import ssl
import subprocess
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from certificates import make_ca, make_certificate
from chaos.machine_network import address
from holdfast.etcd.cluster_list import Certificates, cluster_list, parse_machines
from holdfast.etcd.job_records import read_job
from holdfast.etcd.runner import BINARY_VARIABLE
from holdfast.etcd.sync_client import EtcdClient
from holdfast.net.token_certificates import make_certificate as make_token_certificate
from holdfast.processes.local_workers import local_workers
from real_etcd import UNSAFE, etcd_that_reports
from real_jobs import HOLDFAST, PATIENCE_S, Watched
from real_teams import OBEY, QUICK, Agent, Cluster, descendants, finish_all, reserved_port_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from chaos.machine_network import MachineNetwork
    from holdfast.wire.messages import JobSummary


LISTED = 3
MACHINES = 4
# Well above the time in which etcd elects another leader.
SOON_LOST = "keep_alive_interval=0.6,keep_alive_max_attempt=5"
JOINED = "is a member of the cluster"


class OwnCluster(Cluster):
    """Agents with `--ha`."""

    def __init__(
        self,
        folder: Path,
        nnodes: str,
        listed: str,
        script: str = OBEY,
        conf: str = "",
        lost_after: str = SOON_LOST,
    ) -> None:
        every = ",".join(filter(None, (QUICK, lost_after, conf)))
        super().__init__(folder, script, nnodes=nnodes, backend="ha", endpoint=listed, conf=every)

    def folders(self) -> list[str]:
        """Return the folders of members for temporary files."""
        return sorted(one.name for one in self._temporary.glob("holdfast-ha-*"))

    def _run(self, name: str, command: list[str], env: Mapping[str, str]) -> Agent:
        return super()._run(name, command, {"LOGLEVEL": "INFO", **env})

    def start_member(self, name: str) -> Agent:
        """Start a member without an agent."""
        command = [*HOLDFAST, "coordinator", "--ha", self.endpoint, "--rdzv-id", self.run_id]
        return self._run(name, command, {})


class Machines(OwnCluster):
    """Each agent runs on the machine with which its name begins."""

    def __init__(self, folder: Path, network: MachineNetwork, nnodes: str, conf: str = "") -> None:
        super().__init__(folder, nnodes, ",".join(map(address, range(LISTED))), conf=conf)
        self._network = network

    def start_on(self, *names: str) -> None:
        for name in names:
            self.start(name, before=self._network.inside(int(name[0])))

    def lose(self, name: str) -> None:
        """Kill all processes of a machine, and remove its files."""
        self.agents.pop(name).kill()


@pytest.fixture
def listed() -> Iterator[str]:
    """Three places on this machine, each with its two ports."""
    with reserved_port_pairs(LISTED) as ports:
        yield ",".join(f"127.0.0.1:{port}" for port in ports)


def etcd_of(agent: Agent) -> int:
    """Return the pid of the etcd that an agent runs."""
    return next(pid for pid in descendants(agent.pid) if name_of(pid) == "etcd")


def name_of(pid: int) -> str:
    with open(f"/proc/{pid}/comm") as name:
        return name.read().strip()


def test_cluster_survives_replacing_each_machine_and_a_cut_of_the_majority(
    tmp_path: Path, network: MachineNetwork
) -> None:
    with Machines(tmp_path, network, "2:4") as cluster:
        cluster.start_on("0a", "1a", "2a", "3a")
        numbers = [cluster.generation(4)["3a"].generation]
        for machine in range(LISTED):
            cluster.lose(f"{machine}a")
            if machine == 0:
                numbers.append(cluster.generation(3)["3a"].generation)
            cluster.start_on(f"{machine}b")
            numbers.append(cluster.generation(4)["3a"].generation)
            cluster.agents[f"{machine}b"].wait_for_output(JOINED)
        for machine in (0, 1):
            network.cut(machine)
        for name in ("0b", "1b", "2b", "3a"):
            cluster.agents[name].wait_for_output("the keeper killed the workers")
        for machine in (0, 1):
            network.heal(machine)
        starts = cluster.generation(4)
        numbers.append(starts["3a"].generation)
        assert numbers == sorted(set(numbers))
        assert cluster.finish(starts) == {"0b": 0, "1b": 0, "2b": 0, "3a": 0}


def test_loss_of_the_majority_ends_the_job_before_new_machines_start(
    tmp_path: Path, network: MachineNetwork
) -> None:
    """The new machines could form a cluster immediately, but the last old machine may still run workers."""
    with Machines(tmp_path, network, "1:3", "coordinator_timeout=3") as cluster:
        cluster.start_on("0a", "1a", "2a")
        before = cluster.generation(3)
        for name in ("0a", "1a"):
            cluster.lose(name)
        cluster.start_on("0b", "1b")
        code, output = cluster.agents.pop("2a").end()
        assert code == 78, output
        assert address(0) in output
        Watched(before["2a"].pid).assert_exited()
        starts = cluster.generation(2)
        assert starts.keys() == {"0b", "1b"}
        assert cluster.finish(starts) == {"0b": 0, "1b": 0}


@pytest.fixture
def unsafe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have members run an etcd that may damage its data when it is killed."""
    monkeypatch.setenv(BINARY_VARIABLE, etcd_that_reports(UNSAFE, tmp_path))


@pytest.mark.usefixtures("unsafe")
def test_failed_member_restarts_no_worker_and_a_killed_agent_leaves_nothing(
    tmp_path: Path, listed: str
) -> None:
    with OwnCluster(tmp_path, "2:3", listed) as cluster:
        starts = cluster.form("a", "b", "c")
        assert len(cluster.folders()) == LISTED
        hung = etcd_of(cluster.agents["a"])
        with open(f"/proc/{hung}/cmdline") as command:
            assert "--experimental-corrupt-check-time=1m\0" in command.read()
        assert hung not in {one.pid for one in local_workers()}
        os.kill(hung, signal.SIGSTOP)
        # Now the majority is down for a moment.
        os.kill(etcd_of(cluster.agents["b"]), signal.SIGKILL)
        # This etcd may have damaged its data, so another member's are copied.
        cluster.agents["b"].wait_for_output("so it starts without data")
        os.kill(hung, signal.SIGCONT)
        cluster.agents["b"].wait_for_output(JOINED, times=2)
        assert cluster.is_quiet()
        agent = cluster.agents.pop("c")
        member = Watched(etcd_of(agent))
        agent.signal(signal.SIGKILL)
        agent.process.wait(PATIENCE_S)
        member.wait_until_exited()
        after = cluster.generation(2)
        assert len(cluster.folders()) == 2
        assert after["a"].generation > starts["a"].generation
        assert cluster.finish(after) == {"a": 0, "b": 0}
        assert cluster.folders() == []


@pytest.mark.usefixtures("unsafe")
def test_unsafe_etcd_killed_on_a_majority_restarts_no_member_with_its_data(
    tmp_path: Path, listed: str
) -> None:
    """The data of the last member may lack decisions that only the other two had stored, so the job cannot go on."""
    with OwnCluster(tmp_path, "2:3", listed) as cluster:
        before = cluster.form("a", "b", "c")
        for name in ("a", "b"):
            os.kill(etcd_of(cluster.agents[name]), signal.SIGKILL)
        lost = "2 of 3 machines of --ha have lost the data of the cluster"
        assert "the job ends after 60 s" in cluster.agents["c"].wait_for_output(lost)
        for start in before.values():
            Watched(start.pid).wait_until_exited()
        for agent in cluster.agents.values():
            agent.signal(signal.SIGTERM)
        assert set(cluster.codes().values()) == {128 + signal.SIGTERM}
        assert cluster.folders() == []


def test_nodes_learn_whether_the_job_survives_a_loss(tmp_path: Path, listed: str) -> None:
    with OwnCluster(tmp_path, "2:3", listed) as cluster:
        cluster.form("a", "b")
        missing = listed.rsplit(",", maxsplit=1)[-1]
        for agent in cluster.agents.values():
            agent.wait_for_output(f"the job is not protected: {missing} is not a member")
        assert summary_of(cluster).missing == missing
        cluster.start("c")
        for agent in cluster.agents.values():
            if agent.name != "c":  # It joins when the job is protected, or just before.
                agent.wait_for_output("the job is protected")
        assert summary_of(cluster).missing == ""
        assert set(cluster.finish(cluster.generation(3)).values()) == {0}


def summary_of(cluster: OwnCluster) -> JobSummary:
    of = cluster_list(parse_machines(cluster.endpoint), cluster.run_id, environ={})
    with (
        closing(Certificates(of)) as made,
        EtcdClient(of.client_settings(made.certificate_files)) as client,
    ):
        summary, _ = read_job(client, cluster.run_id)
    assert summary is not None
    return summary


def test_leader_killed_with_its_member_is_detected_immediately(tmp_path: Path, listed: str) -> None:
    """Leases last for five minutes. The others detect the closed connection once etcd has a new leader."""
    with OwnCluster(tmp_path, "2:3", listed, lost_after="keep_alive_interval=60") as cluster:
        for name in ("a", "b", "c"):
            cluster.start(name, conf=f"node_id={name}", env={"LOGLEVEL": "debug"})
        starts = cluster.generation(3)
        of = cluster_list(parse_machines(listed), cluster.run_id, environ={})
        with (
            closing(Certificates(of)) as made,
            EtcdClient(of.client_settings(made.certificate_files)) as client,
        ):
            leader = read_job(client, cluster.run_id)[1]
        for agent in cluster.agents.values():
            agent.wait_for_output(": seen", times=2 if agent.name == leader else 1)
        cluster.agents.pop(leader).kill()
        after = cluster.generation(2)
        assert after.keys() == starts.keys() - {leader}
        assert set(cluster.finish(after).values()) == {0}


def test_clients_without_the_token_are_refused_and_another_job_learns_who_holds_the_ports(
    tmp_path: Path, listed: str
) -> None:
    with OwnCluster(tmp_path, "1", listed.partition(",")[0]) as cluster:
        agent = cluster.start("a")
        starts = cluster.generation(1)
        port = int(cluster.endpoint.rpartition(":")[2])
        for one in (port, port + 1):
            for certificate in (None, b"another token, as long as it should be"):
                assert not lets_in(tmp_path, one, certificate)
        other = subprocess.run(
            [*HOLDFAST, "run", "--ha", cluster.endpoint, "--rdzv-id", "other", "train.py"],
            capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S,
        )  # fmt: skip
        assert other.returncode == 78
        assert re.search(rf"port {port}\b.* pid {etcd_of(agent)},", other.stderr), other.stderr
        assert cluster.finish(starts) == {"a": 0}


def test_without_authentication_web_pages_cannot_read_the_cluster(
    tmp_path: Path, listed: str
) -> None:
    """A page of another site sends its origin, or has a name that resolves to the member's address."""
    with OwnCluster(tmp_path, "1", listed.partition(",")[0], conf="auth=none") as cluster:
        agent = cluster.start("a")
        starts = cluster.generation(1)
        assert "auth=none" in agent.output()
        connection = http.client.HTTPConnection(cluster.endpoint, timeout=PATIENCE_S)
        connection.request("GET", "/version", headers={"Origin": "http://site.example"})
        answer = connection.getresponse()
        assert (answer.read() != b"", answer.getheader("Access-Control-Allow-Origin")) == (
            True,
            None,
        )
        connection.request("GET", "/version", headers={"Host": "site.example"})
        assert connection.getresponse().status == http.HTTPStatus.MISDIRECTED_REQUEST
        connection.close()
        assert cluster.finish(starts) == {"a": 0}


def lets_in(folder: Path, port: int, token: bytes | None) -> bool:
    """Whether etcd responds to a client with this token's certificate, or without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if token is not None:
        made = make_token_certificate(token)
        for name in ("cert", "key"):
            (folder / f"other.{name}").write_bytes(getattr(made, name))
        context.load_cert_chain(folder / "other.cert", folder / "other.key")
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    try:
        connection.request("GET", "/version")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def test_users_certificates_protect_both_ports(tmp_path: Path, listed: str) -> None:
    ca = make_ca(tmp_path)
    pair = make_certificate(ca, "machine")
    conf = f"tls_cert={pair.cert},tls_key={pair.key},tls_ca={ca.cert}"
    two = ",".join(listed.split(",")[:2])
    with OwnCluster(tmp_path, "2", two, conf=conf) as cluster:
        starts = cluster.form("a", "b")
        port = int(two.rpartition(":")[2])
        assert not lets_in(tmp_path, port, None)
        assert cluster.finish(starts) == {"a": 0, "b": 0}


SAVE = """
def save(*_):
    if AGENT == "slow":
        time.sleep(3.5)  # Longer than a cut-off node may run its workers.
    send(f"{AGENT} saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
send(f"{AGENT} ready")
forever()
"""


def test_member_runs_until_workers_of_other_nodes_have_stopped(tmp_path: Path, listed: str) -> None:
    """All nodes stop at once. If the fast nodes stopped their members, the slow node would be killed."""
    with OwnCluster(tmp_path, "3", listed, SAVE) as cluster:
        cluster.start_all("quick", "quicker", "slow")
        names = {"quick", "quicker", "slow"}
        steps_of: dict[str, set[str]] = {name: set() for name in names}
        received = False
        while not all("saved" in words for words in steps_of.values()):
            name, what, *_ = cluster.messages.next()
            steps_of[name].add(what)
            if not received and all("ready" in words for words in steps_of.values()):
                received = True
                for agent in cluster.agents.values():
                    agent.signal(signal.SIGTERM)
        assert set(cluster.codes().values()) == {128 + signal.SIGTERM}


@pytest.mark.parametrize("machines", [1, LISTED])
def test_standalone_member_serves_consecutive_jobs(
    tmp_path: Path, listed: str, machines: int
) -> None:
    listed = ",".join(listed.split(",")[:machines])
    with OwnCluster(tmp_path, "2", listed) as cluster:
        alone = cluster.start_member("alone")
        fences = []
        for number, run in enumerate(("first", "second"), 1):
            alone.wait_for_output("member of the etcd cluster of job", times=number)
            names = [f"{run}-{one}" for one in "ab"]
            cluster.start_all(*names)
            starts = cluster.generation(2)
            fences.append(fence_of(starts[names[0]].pid))
            finish_all(starts.values())
            for name in names:
                code, output = cluster.agents.pop(name).end()
                assert code == 0, output
        assert fences[0] < fences[1]
        alone.signal(signal.SIGTERM)
        assert cluster.codes() == {"alone": 128 + signal.SIGTERM}
        assert cluster.folders() == []


def fence_of(pid: int) -> int:
    with open(f"/proc/{pid}/environ", "rb") as variables:
        found = re.search(rb"HOLDFAST_FENCE=(\d+)", variables.read())
    assert found is not None
    return int(found[1])
