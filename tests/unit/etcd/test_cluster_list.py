"""The list of `--ha`: machines, ports, and how they are protected."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from holdfast.defaults import PROTOCOL_VERSION
from holdfast.errors import UsageError
from holdfast.etcd.cluster_list import (
    DEFAULT_PORT,
    Certificates,
    ClusterRecord,
    advice,
    cluster_list,
    parse_machines,
    read_record,
)

TOKEN = {"HOLDFAST_TOKEN": "a token that was drawn for this"}
FILES = ("ca.pem", "cert.pem", "key.pem")


def test_each_machine_uses_a_port_and_the_next_one() -> None:
    machines = parse_machines("node0, node1:7000,[fd00::1]:7000,fd00::2")
    assert machines == (
        ("node0", DEFAULT_PORT),
        ("node1", 7000),
        ("fd00::1", 7000),
        ("fd00::2", DEFAULT_PORT),
    )
    listed = cluster_list(machines, "job", environ=TOKEN)
    assert listed.peer_urls()["[fd00::1]:7000"] == "https://[fd00::1]:7001"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node0,",
        "node0,node0",
        "a:7000,a:7001",
        "localhost,127.0.0.1",
        "a:0",
        "a:65535",
        "a:x",
        "a b",
        "a,b,c,d,e,f,g,h",
    ],
)
def test_invalid_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="accepted"):
        parse_machines(text)


def test_even_number_of_machines_causes_a_warning() -> None:
    assert [count for count in range(1, 8) if advice(count)] == [2, 4, 6]


@pytest.mark.parametrize(
    ("machines", "how", "scheme"),
    [
        ("node0", {}, "https"),
        ("localhost", {}, "https"),
        ("node0", {"tls": FILES, "environ": {}}, "https"),
        ("localhost,127.0.0.1:7000", {"environ": {}}, "https"),
        ("localhost", {"auth": "none", "environ": {}}, "http"),
        ("node0", {"auth": "none", "environ": {}}, "http"),
    ],
)
def test_list_is_protected_by_token_or_certificates(
    machines: str,
    how: dict[str, object],
    scheme: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    chosen = {"environ": TOKEN, **how}
    assert cluster_list(parse_machines(machines), "job", **chosen).scheme == scheme  # type: ignore[arg-type]


def test_list_with_other_hosts_uses_the_users_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cluster_list(parse_machines("localhost,node1"), "job", environ={}).token is not None
    assert (tmp_path / ".holdfast" / "token").exists()


def test_jobs_with_one_master_token_do_not_trust_each_other() -> None:
    one, other = (cluster_list(parse_machines("node0"), job, environ=TOKEN) for job in ("a", "b"))
    assert one.token != other.token


def test_incomplete_set_of_certificates_is_refused() -> None:
    with pytest.raises(UsageError, match="tls_ca"):
        cluster_list(parse_machines("node0"), "job", environ=TOKEN, tls=(None, "cert", "key"))


def test_certificates_are_not_on_disk_and_are_removed_on_close() -> None:
    certificates = Certificates(cluster_list(parse_machines("node0"), "job", environ=TOKEN))
    assert certificates.certificate_files is not None
    path = Path(certificates.certificate_files.key)
    assert b"PRIVATE KEY" in path.read_bytes()
    assert "memfd:" in os.readlink(path)
    assert certificates.client_context() is not None
    certificates.close()
    assert not path.exists()


@pytest.mark.parametrize("change", [{"version": PROTOCOL_VERSION + 1}, {"at_ms": "then"}])
def test_cluster_of_another_version_is_refused_with_a_hint(change: dict[str, object]) -> None:
    record = ClusterRecord(PROTOCOL_VERSION, "job", "f", 1)
    assert read_record(msgspec.json.encode(record)) == record
    other = msgspec.to_builtins(record) | change
    with pytest.raises(ValueError, match="install the same Holdfast on all nodes"):
        read_record(msgspec.json.encode(other))
