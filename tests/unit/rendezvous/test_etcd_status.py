"""The state of a job on etcd, as somebody who is no part of it reads it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.etcd.settings import EtcdSettings
from holdfast.etcd.sync_client import EtcdClient
from holdfast.rendezvous.config import RendezvousParameters
from holdfast.rendezvous.etcd import read_job
from holdfast.rendezvous.registry import get_rendezvous_handler
from real_etcd import running_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.rendezvous.handler import RendezvousHandler
    from real_etcd import Etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdClient]:
    client = EtcdClient(EtcdSettings(endpoints=(("127.0.0.1", etcd.port),)))
    yield client
    client.close()


def node(etcd: Etcd, name: str) -> RendezvousHandler:
    return get_rendezvous_handler(
        RendezvousParameters("etcd", etcd.endpoint, "job/1", 2, 2, node_id=name)
    )


def test_a_job_that_is_not_there(client: EtcdClient) -> None:
    assert read_job(client, "no such job") == (None, "")


def test_nodes_ranks_and_the_leader_of_a_job(etcd: Etcd, client: EtcdClient) -> None:
    first, second = node(etcd, "a"), node(etcd, "b")
    meeting = threading.Thread(target=second.next_rendezvous)
    meeting.start()
    round_ = first.next_rendezvous()
    meeting.join()
    summary, leader = read_job(client, "job/1")
    assert summary is not None
    assert (summary.phase, summary.round, summary.generation) == ("active", 0, 0)
    assert leader in ("a", "b")
    ranks = {one.node: one.rank for one in summary.nodes}
    assert sorted(ranks.values()) == [0, 1]
    assert ranks["a"] == round_.rank
    assert summary.history == ["all nodes are here"]
    second.shutdown()
    first.set_closed()
    first.shutdown()
    ended, _ = read_job(client, "job/1")
    assert ended is not None
    assert ended.phase == "closed"
