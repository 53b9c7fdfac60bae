"""The behaviour of this backend only; tests/contract tests all backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.elastic._impl.etcd_backend import MAGIC, EtcdRendezvousBackend, create_backend
from holdfast.etcd import lease as leases
from holdfast.etcd.etcd_settings import EtcdSettings
from holdfast.etcd.sync_client import EtcdClient
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.rendezvous.rendezvous_errors import RendezvousConnectionError, RendezvousStateError
from real_etcd import Etcd, running_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdClient]:
    with EtcdClient(EtcdSettings(endpoints=(("127.0.0.1", etcd.port),))) as made:
        yield made
        for lease in etcd.leases():
            made.revoke(lease)


def won(backend: EtcdRendezvousBackend, state: bytes, token: object = None) -> Any:
    answer = backend.set_state(state, token)
    assert answer is not None
    assert answer[0::2] == (state, True)
    return answer[1]


def test_state_is_stored_at_the_prefixed_key_and_its_token_is_the_revision(
    etcd: Etcd, client: EtcdClient
) -> None:
    backend = EtcdRendezvousBackend(client, "job", "/some")
    assert backend.name == "etcd-v2"
    token = won(backend, b"\x00state")
    assert etcd.get(b"/some/job") == MAGIC + b"\x00state"
    found = client.get(b"/some/job")
    assert found is not None
    assert token == found.mod_revision
    won(EtcdRendezvousBackend(client, "without"), b"")
    assert etcd.get(b"without") == MAGIC


def test_foreign_value_is_an_error(etcd: Etcd, client: EtcdClient) -> None:
    revision = etcd.put(b"/foreign/job", b"c3RhdGU=")
    backend = EtcdRendezvousBackend(client, "job", "/foreign")
    for call in (backend.get_state, lambda: backend.set_state(b"mine")):
        with pytest.raises(RendezvousStateError, match="/foreign/job"):
            call()
    won(backend, b"mine", revision)


def ttl_of(etcd: Etcd, lease: int) -> int:
    return int(etcd.raw("/v3/lease/timetolive", {"ID": str(lease)})["grantedTTL"])


@pytest.mark.parametrize(("ttl", "granted"), [(None, 7200), (0, 7200), (-5, 7200), (60, 60)])
def test_state_expires_with_its_lease(
    etcd: Etcd, client: EtcdClient, ttl: int | None, granted: int
) -> None:
    won(EtcdRendezvousBackend(client, "job", "/ttl", ttl), b"one")
    (lease,) = etcd.leases()
    assert ttl_of(etcd, lease) == granted
    client.revoke(lease)
    assert etcd.keys(b"/ttl") == []


@pytest.mark.parametrize("renewals", [1, float("inf")])
def test_lost_lease_is_replaced(
    etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch, renewals: float
) -> None:
    """The renewal detects the loss, or else the next write."""
    monkeypatch.setattr(leases, "WRITES_PER_TTL", renewals)
    backend = EtcdRendezvousBackend(client, "job", "/lost")
    won(backend, b"one")
    client.revoke(etcd.leases()[0])
    assert backend.get_state() is None
    won(backend, b"two")
    assert len(etcd.leases()) == 1


def test_backend_recovers_after_an_etcd_outage(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd:
        params = RendezvousParameters("etcd-v2", etcd.endpoint, "job", 1, 2)
        backend, store = create_backend(params)
        with store:
            token = won(backend, b"one")
            etcd.stop()
            for call in (backend.get_state, lambda: backend.set_state(b"two", token)):
                with pytest.raises(
                    RendezvousConnectionError,
                    match=rf"'/torch/elastic/rendezvous/job'.*{etcd.endpoint}",
                ) as caught:
                    call()
                assert "\n" not in str(caught.value)
            etcd.start()
            assert backend.get_state() == (b"one", token)
            won(backend, b"two", token)


def test_the_client_of_the_store_has_the_read_timeout(etcd: Etcd) -> None:
    endpoint = f"127.0.0.1:{etcd.port}"
    for given, expected in (({"read_timeout": "10"}, 10), ({}, 60)):
        params = RendezvousParameters("etcd-v2", endpoint, "timed", 1, 1, **given)
        with create_backend(params)[1] as store:
            assert store.client.read_timeout == expected  # type: ignore[attr-defined]
