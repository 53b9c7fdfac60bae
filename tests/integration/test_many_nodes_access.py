"""Access to a real job: tokens, TLS, and peers that send invalid data."""

from __future__ import annotations

import os
import random
import socket
import ssl
from typing import TYPE_CHECKING

import pytest

from certificates import make_ca, make_certificate
from observed_jobs import until
from other_users import STRANGER
from real_jobs import PATIENCE_S
from real_teams import OBEY, Cluster

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "7d1c2f5b9a64e08383b1"
# A server that closes without a response may be a coordinator that is exiting, so the agent retries.
SOON = "join_timeout=1"

SECRETS = """
with open("unfinished-" + RANK, "w") as seen:
    seen.write(repr(dict(E)))
os.rename("unfinished-" + RANK, "environ-" + RANK)
obey()
"""


def one_line_from(cluster: Cluster, name: str) -> str:
    """Wait until an agent that could not join exits; return its only line of output."""
    code, output = cluster.agents[name].end()
    assert code == 78, output
    lines = output.splitlines()
    assert len(lines) == 1, output
    assert lines[0].startswith("holdfast run: error: ")
    assert TOKEN not in output
    return lines[0]


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as words:
        return int(words.read().rpartition(")")[2].split()[1])


def undisturbed(cluster: Cluster, *names: str) -> None:
    """Fail unless these agents and their workers are unchanged."""
    assert cluster.is_quiet()
    assert [cluster.agents[name].process.poll() for name in names] == [None] * len(names)


def test_only_nodes_with_the_token_can_join(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    with Cluster(tmp_path, SECRETS, nnodes="2") as cluster:
        cluster.start("a", env={"HOLDFAST_TOKEN": TOKEN})
        cluster.start("b", env={"HOLDFAST_TOKEN_FILE": str(file)})
        starts = cluster.generation(2)
        cluster.start("wrong", env={"HOLDFAST_TOKEN": "another-token-altogether"})
        cluster.start("none")
        assert "token" in one_line_from(cluster, "wrong")
        assert "token" in one_line_from(cluster, "none")
        # Neither the process list nor the environment of workers, which run the user's code, contains the token.
        for agent in (cluster.agents["a"], cluster.agents["b"]):
            with open(f"/proc/{agent.pid}/cmdline", "rb") as words:
                assert TOKEN.encode() not in words.read()
        for start in starts.values():
            for pid in (
                start.pid,
                parent_of(start.pid),
            ):  # A worker can read its keeper's environment.
                with open(f"/proc/{pid}/environ", "rb") as variables:
                    assert b"HOLDFAST_TOKEN" not in variables.read()
            seen = tmp_path / f"environ-{start.rank}"
            until(lambda seen=seen: seen.exists() or None)  # type: ignore[misc]
            assert "HOLDFAST_TOKEN" not in seen.read_text()
        undisturbed(cluster, "a", "b")
        assert cluster.finish(starts) == {"a": 0, "b": 0, "wrong": 78, "none": 78}


def test_token_can_be_read_from_a_configured_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_all("a", "b", conf=f"token_file={file}")
        assert cluster.finish(cluster.generation(2)) == {"a": 0, "b": 0}


@pytest.mark.parametrize("key", ["tls_cacert=/no/such/ca.pem", "token=secret", "tls_verify=1"])
def test_job_does_not_run_without_the_requested_protection(tmp_path: Path, key: str) -> None:
    with Cluster(tmp_path, OBEY, nnodes="1:2") as cluster:
        cluster.start("a", conf=key)
        code, output = cluster.agents["a"].end()
        assert code == 2
        assert output.count("\n") == 1
        assert key.partition("=")[0] in output
        assert cluster.is_quiet()


def test_token_file_of_another_user_is_refused(tmp_path: Path) -> None:
    """The file's owner would know the token and could join the job."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    os.chown(file, STRANGER, STRANGER)
    with Cluster(tmp_path, OBEY, nnodes="1:2") as cluster:
        cluster.start("a", env={"HOLDFAST_TOKEN_FILE": str(file)})
        assert str(STRANGER) in one_line_from(cluster, "a")
        assert cluster.is_quiet()


def test_token_missing_at_the_coordinator_is_reported(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_host("a")
        cluster.start("eager", env={"HOLDFAST_TOKEN": TOKEN})
        assert "token" in one_line_from(cluster, "eager")
        cluster.start("b")
        assert cluster.finish(cluster.generation(2)) == {"a": 0, "eager": 78, "b": 0}


def test_only_nodes_with_tls_can_join_a_tls_coordinator(tmp_path: Path) -> None:
    ca = make_ca(tmp_path)
    pair = make_certificate(ca, "head")
    (tmp_path / "other").mkdir()
    other = make_ca(tmp_path / "other", "other-ca")
    serving = f"tls_cert={pair.cert},tls_key={pair.key},tls_ca={ca.cert}"
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_host("a", conf=serving)
        cluster.start("plain", conf=SOON)
        assert "TLS" in one_line_from(cluster, "plain")
        cluster.start("distrustful", conf=f"tls_ca={other.cert}")
        assert "certificate" in one_line_from(cluster, "distrustful")
        cluster.start("b", conf=serving)
        assert cluster.finish(cluster.generation(2)) == {
            "a": 0,
            "plain": 78,
            "distrustful": 78,
            "b": 0,
        }


def test_nodes_encrypt_with_their_token_if_python_supports_psk(tmp_path: Path) -> None:
    token = {"HOLDFAST_TOKEN": TOKEN}
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        if not getattr(ssl, "HAS_PSK", False):
            code, output = cluster.start("a", conf="tls=psk", env=token).end()
            assert code == 2
            assert len(output.splitlines()) == 1
            assert "3.13" in output
            return
        cluster.await_coordinator(cluster.start("a", conf="tls=psk", env=token))
        cluster.start("plain", conf=SOON, env=token)
        assert "tls=psk" in one_line_from(cluster, "plain")
        cluster.start(
            "wrong", conf=f"{SOON},tls=psk", env={"HOLDFAST_TOKEN": "another-token-altogether"}
        )
        assert "token" in one_line_from(cluster, "wrong")
        cluster.start("b", conf="tls=psk", env=token)
        assert cluster.finish(cluster.generation(2)) == {"a": 0, "plain": 78, "wrong": 78, "b": 0}


def test_tls_client_of_a_plain_coordinator_gets_an_explanation(tmp_path: Path) -> None:
    ca = make_ca(tmp_path)
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_host("a")
        cluster.start("tls", conf=f"{SOON},tls_ca={ca.cert}")
        assert "TLS" in one_line_from(cluster, "tls")
        cluster.start("b")
        assert cluster.finish(cluster.generation(2)) == {"a": 0, "tls": 78, "b": 0}


NONSENSE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "torch's store": b"\x00\xce\xf7\x85\x3c" + bytes(64),
    "an oversized frame": b"\xff\xff\xff\xff" + bytes(64),
    "an oversized first frame": b"\x00\x00\xff\xff" + bytes(65535),
    "no message": b"\x00\x00\x01\x00" + b"\xc1" * 256,
    "empty frames": bytes(4000),
    "noise": random.Random(1).randbytes(65536),
}


def test_invalid_data_at_the_port_does_not_affect_the_job(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        starts = cluster.form("a", "b")
        for sent in NONSENSE.values():
            with socket.create_connection((cluster.host, cluster.port), PATIENCE_S) as peer:
                try:
                    peer.sendall(sent)
                    while peer.recv(65536):
                        pass  # Until the coordinator closes the connection.
                except ConnectionError:
                    pass  # The coordinator closed before it had read everything.
        undisturbed(cluster, "a", "b")
        assert cluster.finish(starts) == {"a": 0, "b": 0}
        assert cluster.is_quiet()
