from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent import worker_processes
from holdfast.agent.spec import Worker, WorkerGroup, WorkerSpec
from holdfast.errors import UsageError
from holdfast.rendezvous.worker_store import SingleNodeHandler


def group(**settings: Any) -> WorkerGroup:
    """Return the group of node 1 of 3, which is the second of role `trainer`."""
    settings = {"rdzv_handler": SingleNodeHandler("job-7"), **settings}
    spec = WorkerSpec("trainer", 4, entrypoint="train", max_restarts=5, **settings)
    made = WorkerGroup(spec)
    made.group_rank, made.group_world_size = 1, 3
    made.master_addr, made.master_port = "host0", 29511
    return made


def environment_of(
    made: WorkerGroup, local_rank: int = 2, inherited: dict[str, str] | None = None
) -> dict[str, str]:
    worker = Worker(local_rank, 10 + local_rank, 4 + local_rank, 20, 12)
    return worker_processes.worker_environment(
        made, worker, generation=3, restart_count=2, inherited=inherited or {}
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"master_addr": "head"},
        {"master_port": 29500},
        {"rdzv_handler": SingleNodeHandler("job", workers_serve=True)},
    ],
)
def test_workers_get_use_agent_store_false_if_the_agent_serves_none(
    settings: dict[str, Any],
) -> None:
    assert environment_of(group(**settings))["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_users_error_handling_and_thread_count_are_kept() -> None:
    inherited = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "OMP_NUM_THREADS": "8", "OTHER": "x"}
    made = environment_of(group(), inherited=inherited)
    assert made["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert made["OMP_NUM_THREADS"] == "8"
    assert "OTHER" not in made  # Workers inherit it unchanged.


def test_virtual_local_rank_is_0_with_one_visible_device() -> None:
    inherited = {"CUDA_VISIBLE_DEVICES": "GPU-a,5,MIG-c"}
    made = group(virtual_local_rank=True)
    found = [environment_of(made, rank, inherited) for rank in range(3)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["GPU-a", "5", "MIG-c"]
    assert [one["LOCAL_RANK"] for one in found] == ["0"] * 3
    with pytest.raises(UsageError, match="worker 3"):
        environment_of(made, 3, inherited)
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(group(), inherited=inherited)


@pytest.mark.parametrize(
    ("arg", "expected"),
    [
        ("--out=$local_rank/${local_rank}.log", "--out=3/3.log"),
        ("a$local_rank-b", "a3-b"),
        ("$$ and $local_rank", "$$ and 3"),
        ("$local_ranks $local_rank_id ${local_rank", "$local_ranks $local_rank_id ${local_rank"),
        (b"$local_rank", b"$local_rank"),
    ],
)
def test_substitution_replaces_only_local_rank(arg: object, expected: object) -> None:
    assert worker_processes.substitute_local_rank(arg, 3) == expected


@given(st.text(alphabet="${}abc \\1"))
def test_substitution_keeps_other_text(text: str) -> None:
    assert worker_processes.substitute_local_rank(text, 3) == text


def test_prefix_of_a_line_may_name_the_host() -> None:
    template = "${hostname}:${role_name}:${rank}:${local_rank}:${other}"
    prefix = worker_processes.log_line_prefix(template, "trainer", Worker(2, 12, 6, 20, 12))
    assert prefix == f"{os.uname().nodename}:trainer:12:2:${{other}}"
