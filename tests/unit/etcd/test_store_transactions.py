"""Changes that others make impossible, and problems in the words of stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.etcd.calls import Problem, ProblemKind, Request, Txn
from holdfast.etcd import store as store_transactions
from holdfast.etcd.async_client import CLOSED
from holdfast.etcd.settings import EtcdSettings
from holdfast.etcd.store import EtcdStore, as_store_error
from holdfast.etcd.sync_client import EtcdClient, EtcdError
from holdfast.store import DistNetworkError, DistStoreError
from real_etcd import Etcd, running_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class DisturbedClient(EtcdClient):
    """A client that is always too late: somebody else adds 10 just before it changes a key."""

    def __init__(self, etcd: Etcd) -> None:
        super().__init__(EtcdSettings(endpoints=(("127.0.0.1", etcd.port),)))
        self.disturbances = 0
        self.transactions = 0
        self.place = b""
        self._etcd = etcd

    def call(self, request: Request, limit_s: float | None = None) -> Any:
        if isinstance(request, Txn):
            self.transactions += 1
            if request.compare and self.disturbances:
                self.disturbances -= 1
                now = int(self._etcd.get(self.place) or b"0")
                self._etcd.put(self.place, b"%d" % (now + 10))
        return super().call(request, limit_s)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[DisturbedClient]:
    with running_etcd(tmp_path) as etcd, DisturbedClient(etcd) as made:
        made.place = b"/some/\x1fkcount\x1fv"
        yield made


def test_a_change_is_made_again_from_what_is_there_then(client: DisturbedClient) -> None:
    store = EtcdStore(client, "/some")
    client.disturbances = 3
    assert store.add("count", 1) == 31
    assert store.get("count") == b"31"


def test_a_change_that_others_make_impossible_is_given_up(
    client: DisturbedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_transactions, "ATTEMPTS_MAX", 4)
    client.disturbances = 100
    with pytest.raises(DistStoreError, match=r"count.* could not be changed in 4 attempts"):
        EtcdStore(client, "/some").add("count", 1)
    assert client.disturbances == 96


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (Problem(ProblemKind.UNREACHABLE, "it is gone"), DistNetworkError),
        (CLOSED, DistStoreError),
        (Problem(ProblemKind.NO_SPACE, "it is full"), DistStoreError),
        (Problem(ProblemKind.DENIED, "no"), DistStoreError),
    ],
)
def test_problems_are_those_of_stores(problem: Problem, kind: type[Exception]) -> None:
    error = as_store_error(EtcdError(problem, "host:1"))
    assert type(error) is kind
    assert str(error) == f"etcd at host:1: {problem.why}"
