from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.agent import spec
from holdfast.agent.spec import Worker, WorkerGroup, WorkerSpec, WorkerState
from holdfast.errors import UsageError
from holdfast.rendezvous.worker_store import SingleNodeHandler


def made(**settings: Any) -> WorkerSpec:
    how = {"role": "trainer", "local_world_size": 2, "entrypoint": "train", **settings}
    return WorkerSpec(rdzv_handler=SingleNodeHandler("job"), **how)


@pytest.mark.torch
def test_spec_types_match_torchs() -> None:
    from torch.distributed.elastic.agent import server

    def fields(kind: Any) -> list[Any]:
        return [(one.name, one.default, one.default_factory) for one in dataclasses.fields(kind)]

    def states(kind: Any) -> list[Any]:
        return [(s.name, s.value, str(s), f"{s}", kind.is_running(s)) for s in kind]

    for name in ("WorkerSpec", "RunResult"):
        assert fields(getattr(spec, name)) == fields(getattr(server, name))
    assert states(WorkerState) == states(server.WorkerState)
    assert set(Worker.__slots__) == set(server.Worker.__slots__)
    slots = set(WorkerGroup.__slots__)
    assert slots == set(server.WorkerGroup.__slots__)
    assert str(Worker(1, 5, 4, 8, 6)) == str(server.Worker(1, 5, 4, 8, 6))


@pytest.mark.parametrize(
    "wrong",
    [{"local_world_size": 0}, {"monitor_interval": 0}, {"entrypoint": None}, {"entrypoint": ""}],
)
def test_invalid_spec_is_rejected_with_the_field_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}: "):
        made(**wrong)
