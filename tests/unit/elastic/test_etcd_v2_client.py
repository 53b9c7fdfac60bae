"""Paths as python-etcd has them, on a real etcd's API v3."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from holdfast.elastic._impl.etcd_backend import EtcdRendezvousBackend
from holdfast.elastic._impl.etcd_v2_client import (
    EtcdAlreadyExist,
    EtcdCompareFailed,
    EtcdKeyNotFound,
    EtcdNotFile,
    EtcdV2Client,
    adapted,
)
from holdfast.elastic.rendezvous.etcd_server import EtcdServer
from holdfast.errors import UsageError
from holdfast.etcd.etcd_settings import EtcdSettings
from holdfast.rendezvous.rendezvous_errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from real_etcd import Etcd


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdV2Client]:
    settings = EtcdSettings(endpoints=(("127.0.0.1", etcd.port),), call_s=7.0)
    with EtcdV2Client(settings) as made:
        yield made
        for lease in etcd.leases():
            made.revoke(lease)


def test_values_are_written_read_listed_and_deleted_by_path(client: EtcdV2Client) -> None:
    written = client.write("/some/a", "1")
    assert (written.value, written.newKey, written.dir) == ("1", True, False)
    again = client.set("some/a", 2)
    assert again.modifiedIndex > again.createdIndex == written.createdIndex
    assert client.get("/some/a").value == client.read("/some/a").value == "2"
    assert "/some/a" in client
    client.write("/some/b/c", "3")
    assert [(one.key, one.value) for one in client.read("/some").children] == [
        ("/some/a", "2"),
        ("/some/b/c", "3"),
    ]
    with pytest.raises(EtcdNotFile):
        client.delete("/some")
    assert client.delete("/some/a").value == "2"
    client.delete("/some", recursive=True)
    assert "/some" not in client
    with pytest.raises(EtcdKeyNotFound):
        client.delete("/some", recursive=True, dir=True)


def test_unmet_condition_rejects_a_change(client: EtcdV2Client) -> None:
    at = client.write("/key", "1", prevExist=False).modifiedIndex
    for wrong, problem in (
        ({"prevExist": False}, EtcdAlreadyExist),
        ({"prevValue": "0"}, EtcdCompareFailed),
        ({"prevIndex": at - 1}, EtcdCompareFailed),
    ):
        with pytest.raises(problem):
            client.write("/key", "2", **wrong)
    with pytest.raises(EtcdKeyNotFound):
        client.write("/none", "2", prevExist=True)
    with pytest.raises(EtcdCompareFailed):
        client.delete("/key", prevValue="2")
    assert client.write("/key", "2", prevIndex=at).value == "2"
    assert client.test_and_set("/key", "3", "2", ttl=60).ttl == 60
    client.delete("/key", prevValue="3")


def test_errors_have_python_etcds_types_if_it_is_loaded(
    client: EtcdV2Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Theirs(Exception):
        pass

    package = ModuleType("etcd")
    package.EtcdKeyNotFound = Theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "etcd", package)
    with pytest.raises(Theirs) as caught:
        client.read("/none")
    assert isinstance(caught.value, EtcdKeyNotFound)


def test_backend_accepts_both_kinds_of_client(etcd: Etcd, client: EtcdV2Client) -> None:
    theirs = SimpleNamespace(host="127.0.0.1", port=etcd.port, protocol="http", read_timeout=3)
    assert adapted(client) is client
    assert adapted(theirs).settings.call_s == 3
    backend = EtcdRendezvousBackend(theirs, "job", "/pre")  # type: ignore[arg-type]
    assert backend.set_state(b"state") is not None
    client.write("/pre/job", "of another program")
    with pytest.raises(RendezvousStateError):
        EtcdRendezvousBackend(client, "job", "/pre").get_state()
    client.delete("/pre/job")
    with pytest.raises(UsageError):
        adapted(object())


def test_program_can_start_its_own_etcd_server() -> None:
    server = EtcdServer()
    with pytest.raises(UsageError):
        server.get_client()
    with server, server.get_client() as client:
        assert server.get_endpoint() == f"localhost:{server.get_port()}"
        assert (client.host, client.port) == ("localhost", server.get_port())
        assert client.version.count(".") == 2
        assert client.read_timeout == 60
