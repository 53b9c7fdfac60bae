from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.etcd.settings import EtcdSettings
from holdfast.etcd.sync_client import EtcdClient
from holdfast.rendezvous.etcd import GenerationStores
from holdfast.store import DistStoreError
from real_etcd import PATIENCE_S, Etcd, running_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def stores(etcd: Etcd, request: pytest.FixtureRequest) -> Iterator[GenerationStores]:
    with EtcdClient(EtcdSettings(endpoints=(("127.0.0.1", etcd.port),))) as client:
        made = GenerationStores(client, f"/{request.node.name}/".encode())
        yield made
        made.close()


def keepers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "holdfast-etcd-lease"]


def test_a_store_and_its_parts_know_nothing_of_other_generations(stores: GenerationStores) -> None:
    first = stores.store("1/0/0")
    assert first is stores.store("1/0/0")
    part = stores.store("1/0/0", "part")
    part.set("key", "of the part")
    assert not first.check(["key"])
    assert not stores.store("1/0/1", "part").check(["key"])
    assert stores.store("1/0/0", "part").get("key") == b"of the part"


def test_only_the_newest_generation_is_kept_alive(stores: GenerationStores) -> None:
    for generation in range(3):
        before = keepers()
        stores.store(f"1/0/{generation}").set("key", "value")
        for one in before:
            one.join(PATIENCE_S)
        assert len(keepers()) == 1


def test_an_older_store_stays_for_whoever_has_it_until_all_are_closed(
    stores: GenerationStores,
) -> None:
    older = stores.store("1/0/0")
    newest = stores.store("1/0/1")
    older.set("key", "value")
    newest.set("key", "value")
    stores.close()
    assert keepers() == []
    for one in (older, newest):
        with pytest.raises(DistStoreError, match="closed"):
            one.set("key", "other")
