from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent import worker_env
from holdfast.agent.spec import Worker, WorkerGroup, WorkerSpec
from holdfast.errors import UsageError
from holdfast.rendezvous.single_node import SingleNodeHandler


def group(**settings: Any) -> WorkerGroup:
    """Return the group of node 1 of 3, which is the second of role `trainer`."""
    spec = WorkerSpec(
        **{
            "role": "trainer",
            "local_world_size": 4,
            "rdzv_handler": SingleNodeHandler("job-7"),
            "entrypoint": "train",
            "max_restarts": 5,
            **settings,
        }
    )
    made = WorkerGroup(spec)
    made.group_rank, made.group_world_size = 1, 3
    made.master_addr, made.master_port = "host0", 29511
    return made


def environment_of(
    made: WorkerGroup, local_rank: int = 2, inherited: dict[str, str] | None = None
) -> dict[str, str]:
    worker = Worker(local_rank, 10 + local_rank, 4 + local_rank, 20, 12)
    return worker_env.worker_environment(
        made, worker, generation=3, restart_count=2, inherited=inherited or {}
    )


def test_all_that_a_worker_is_given() -> None:
    assert environment_of(group()) == {
        "RANK": "12",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "1",
        "ROLE_RANK": "6",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "20",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "12",
        "MASTER_ADDR": "host0",
        "MASTER_PORT": "29511",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "job-7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "HOLDFAST_GENERATION": "3",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_workers_learn_that_they_are_to_serve_the_store() -> None:
    made = environment_of(group(rdzv_handler=SingleNodeHandler("job", worker_store=True)))
    assert made["TORCHELASTIC_USE_AGENT_STORE"] == "False"


@pytest.mark.parametrize("named", [{"master_addr": "head"}, {"master_port": 29500}])
def test_at_an_address_that_the_caller_names_the_agent_serves_nothing(
    named: dict[str, Any],
) -> None:
    assert environment_of(group(**named))["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_a_choice_of_error_handling_and_of_threads_is_passed_on() -> None:
    inherited = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "OMP_NUM_THREADS": "8", "OTHER": "x"}
    made = environment_of(group(), inherited=inherited)
    assert made["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert made["OMP_NUM_THREADS"] == "8"
    assert "OTHER" not in made  # It is inherited as it is.


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "2", "3"]),
        ("4,5,6,7", ["4", "5", "6", "7"]),
        ("3, 2, 1, 0, 9", ["3", "2", "1", "0"]),
        ("GPU-a,GPU-b,MIG-c,GPU-d", ["GPU-a", "GPU-b", "MIG-c", "GPU-d"]),
    ],
)
def test_with_virtual_local_ranks_each_worker_is_0_and_sees_one_device(
    visible: str | None, expected: list[str]
) -> None:
    made = group(virtual_local_rank=True)
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    environments = [environment_of(made, rank, inherited) for rank in range(4)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments] == expected
    assert [env["LOCAL_RANK"] for env in environments] == ["0"] * 4
    assert [env["RANK"] for env in environments] == ["10", "11", "12", "13"]


def test_devices_are_left_alone_without_virtual_local_ranks() -> None:
    made = environment_of(group(), inherited={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "CUDA_VISIBLE_DEVICES" not in made


def test_too_few_devices_are_told_of() -> None:
    with pytest.raises(
        UsageError, match=r"worker 2 has no device, CUDA_VISIBLE_DEVICES='0,1' names 2$"
    ):
        environment_of(group(virtual_local_rank=True), 2, {"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize(
    ("arg", "expected"),
    [
        ("$local_rank", "3"),
        ("${local_rank}", "3"),
        ("--out=$local_rank/${local_rank}.log", "--out=3/3.log"),
        ("a$local_rank-b", "a3-b"),
        # Nothing else is touched.
        ("local_rank", "local_rank"),
        ("$local_ranks", "$local_ranks"),
        ("$local_rank_id", "$local_rank_id"),
        ("${local_rank", "${local_rank"),
        ("$LOCAL_RANK ${LOCAL_RANK}", "$LOCAL_RANK ${LOCAL_RANK}"),
        ("$$ costs $5 in $HOME, ${rank}", "$$ costs $5 in $HOME, ${rank}"),
        ("$$ and $local_rank", "$$ and 3"),
        ("", ""),
        ("\\$HOME \\n", "\\$HOME \\n"),
    ],
)
def test_only_the_local_rank_is_substituted(arg: str, expected: str) -> None:
    assert worker_env.substitute_local_rank(arg, 3) == expected


@given(st.text(alphabet="${}abc \\1"))
def test_any_other_text_stays_as_it_is(text: str) -> None:
    assert worker_env.substitute_local_rank(text, 3) == text


@pytest.mark.parametrize("arg", [7, None, b"$local_rank", ["$local_rank"]])
def test_arguments_that_are_no_text_stay_as_they_are(arg: object) -> None:
    assert worker_env.substitute_local_rank(arg, 3) is arg


def test_a_log_line_prefix_is_filled_in() -> None:
    worker = Worker(2, 12, 6, 20, 12)
    template = "[${role_name} $rank/$local_rank] ${other} $$ "
    assert worker_env.log_line_prefix(template, "trainer", worker) == ("[trainer 12/2] ${other} $ ")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2.5", 2.5), ("3", 3), (None, None), ("", None), ("soon", None), ("0", None), ("-1", None)],
)
def test_a_time_of_the_environment(
    text: str | None, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("A_TIME", raising=False)
    if text is not None:
        monkeypatch.setenv("A_TIME", text)
    assert worker_env.timeout_from_environment("A_TIME") == seconds


@pytest.mark.torch
@pytest.mark.parametrize("arg", ["$local_rank", "x${local_rank}y", *string.printable[:5]])
def test_substitution_agrees_with_torch_where_nothing_is_escaped(arg: str) -> None:
    from torch.distributed.elastic.utils import macros

    assert worker_env.substitute_local_rank(arg, 3) == macros.substitute([arg], "3")[0]
