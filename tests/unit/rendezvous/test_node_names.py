"""Default node ids: from the host's name, and different for each agent of a job on a machine."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.core.protocol import UNRESERVED
from holdfast.rendezvous import job_access, node_names
from holdfast.rendezvous.handler import host_label
from holdfast.rendezvous.handler_registry import get_rendezvous_handler
from holdfast.rendezvous.membership_handler import MembershipHandler
from holdfast.rendezvous.node_names import NodeName, reserve_name
from holdfast.rendezvous.rdzv_conf import RendezvousParameters

if TYPE_CHECKING:
    from pathlib import Path

HERE = host_label()


@pytest.mark.parametrize(
    ("host", "label"),
    [
        ("gpu7", "gpu7"),
        ("gpu-7.rack3.example.com", "gpu-7"),
        ("ip-10-0-0-5.ec2.internal", "ip-10-0-0-5"),
        ("10.0.0.5", "10-0-0-5"),
        ("fe80::1", "fe80-1"),
        ("Ann's laptop", "Ann-s-laptop"),
        ("-\x1b[2J-", "2J"),
        ("7", "node-7"),
        ("...", "node"),
        ("a" * 64, "a" * 64),
    ],
)
def test_label_is_a_short_printable_name(host: str, label: str) -> None:
    assert host_label(host) == label


def handler(run_id: str, endpoint: str, backend: str = "c10d", **conf: str) -> MembershipHandler:
    params = RendezvousParameters(backend, endpoint, run_id, 1, 2, **conf)
    made = get_rendezvous_handler(params)
    assert isinstance(made, MembershipHandler)
    return made


@pytest.mark.parametrize("backend", ["c10d", "etcd", "ha", "file"])
def test_agents_of_a_job_on_one_machine_have_different_ids(backend: str, tmp_path: Path) -> None:
    run_id = os.urandom(8).hex()
    endpoint = str(tmp_path) if backend == "file" else "localhost:29400"
    first, second = handler(run_id, endpoint, backend), handler(run_id, endpoint, backend)
    assert [first.node_id, second.node_id] == [HERE, f"{HERE}-2"]

    first.access.free_name(first.node_id)
    successor = handler(run_id, endpoint, backend)
    assert successor.node_id == HERE
    assert successor.access.name.reserved_on == second.access.name.reserved_on
    assert first.access.name[:2] == (HERE, UNRESERVED)
    for one in (first, second, successor):
        one.shutdown()


def test_other_job_and_other_spelling_of_the_endpoint() -> None:
    run_id = os.urandom(8).hex()
    first, second = handler(run_id, "localhost:29400"), handler(run_id, "127.0.0.1")
    other_job, other_port = handler(f"{run_id}x", "localhost"), handler(run_id, "localhost:29401")
    names = [one.node_id for one in (first, second, other_job, other_port)]
    assert names == [HERE, f"{HERE}-2", HERE, HERE]


def test_chosen_id_and_unknown_port_reserve_nothing() -> None:
    run_id = os.urandom(8).hex()
    given = handler(run_id, "localhost", node_id=HERE)
    assert (given.node_id, given.access.name.reserved_on) == (HERE, "")
    static = handler(run_id, "localhost:29500", "static", rank="1")
    assert (static.node_id, static.access.name.reserved_on) == ("rank-1", "")
    free_port = handler(run_id, "localhost:0")
    assert (free_port.node_id, free_port.access.name.reserved_on) == (HERE, UNRESERVED)


def test_deleted_handler_frees_its_id() -> None:
    run_id = os.urandom(8).hex()
    first = handler(run_id, "localhost")
    del first
    gc.collect()
    assert handler(run_id, "localhost").node_id == HERE


def test_id_is_unique_if_the_machine_cannot_reserve_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = os.urandom(8).hex()
    monkeypatch.setattr(node_names, "TRIES_MAX", 2)
    first, second = reserve_name(scope), reserve_name(scope)
    assert second.id.startswith(f"{HERE}-")
    assert second.reserved_on == UNRESERVED
    first.free()
    monkeypatch.setattr(node_names, "BOOT_ID", "/nowhere")
    assert reserve_name(scope) == (HERE, UNRESERVED, second.free)


@pytest.mark.parametrize("backend", ["c10d", "file"])
def test_machines_with_one_host_name_get_different_ids(
    backend: str, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter([NodeName("host", "machine 1"), NodeName("host", "machine 2")])
    monkeypatch.setattr(job_access, "reserve_name", lambda *_: next(names))
    endpoint = str(tmp_path) if backend == "file" else f"127.0.0.1:{port}"
    first, second = (
        get_rendezvous_handler(RendezvousParameters(backend, endpoint, "job", 2, 2))
        for _ in range(2)
    )
    joining = threading.Thread(target=second.next_rendezvous)
    joining.start()
    first.next_rendezvous()
    joining.join()
    assert isinstance(first, MembershipHandler)
    assert isinstance(second, MembershipHandler)
    assert sorted([first.node_id, second.node_id]) == ["host", "host-2"]
    second.shutdown()
    first.shutdown()
