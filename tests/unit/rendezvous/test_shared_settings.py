"""What a node brings to a job in a backend, and what is refused."""

from __future__ import annotations

import os

import pytest

from holdfast.elastic._impl.c10d_backend import C10dRendezvousBackend
from holdfast.errors import UsageError
from holdfast.rendezvous.backend import DynamicRendezvousHandler, this_node
from holdfast.store.memory import MemoryStore


@pytest.mark.parametrize(
    ("run_id", "least", "most", "named"),
    [("", 1, 1, "--rdzv-id"), ("job", 0, 1, "--nnodes"), ("job", 2, 1, "--nnodes")],
)
def test_what_no_job_can_have_is_refused(run_id: str, least: int, most: int, named: str) -> None:
    store = MemoryStore()
    backend = C10dRendezvousBackend(store, "job")
    with pytest.raises(UsageError, match=f"^{named}: "):
        DynamicRendezvousHandler.from_backend(run_id, store, backend, least, most)
    with pytest.raises(UsageError, match="keep_alive_interval"):
        DynamicRendezvousHandler.from_backend("job", store, backend, 1, 1, keep_alive_interval=0)


def test_a_node_has_the_address_it_was_given_and_a_name_of_its_own() -> None:
    one, other = this_node("10.0.0.1"), this_node("10.0.0.1")
    assert one.address == "10.0.0.1"
    assert one.node != other.node
    assert this_node(None, node_id="n", label="rack").node == "n"


def test_a_node_without_an_address_is_known_by_its_hosts_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    assert this_node(None).address == os.uname().nodename
    assert "--local-addr" in caplog.text
