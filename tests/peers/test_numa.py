"""Workers are bound to exactly the CPUs that PyTorch would select, on machines of many shapes."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from packaging.version import Version

from holdfast.numa.affinity import MODES
from holdfast.numa.binding import AffinityMode, NumaOptions, cpus_of_workers
from synthetic_machines import GPU_BUSES, MACHINES, Shape

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch

# The allowed CPUs of a machine.
ALLOWED: dict[str, Callable[[range], list[int]]] = {
    "all": list,
    "every third": lambda cpus: list(cpus[::3]),
    "no second threads of half": lambda cpus: list(cpus[: len(cpus) * 3 // 4]),
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: shape.build(tmp_path_factory.mktemp("machine")) for name, shape in MACHINES.items()
    }


def theirs(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, root: Path, allowed: list[int]
) -> ModuleOfTorch:
    """Return torch's module as if on another machine."""
    binding: Any = importlib.import_module("torch.numa.binding")

    def elsewhere(path: str, *args: Any) -> Any:
        return open(f"{root}{path}", *args)

    machine = SimpleNamespace(
        path=os.path,
        listdir=lambda path: os.listdir(f"{root}{path}"),
        sched_getaffinity=lambda _pid: set(allowed),
    )
    # PyTorch 2.13 asks `cuda`; newer versions ask `accelerator`, and the module of the device that it names.
    devices = SimpleNamespace(
        is_available=lambda: True,
        current_accelerator=lambda: "cuda",
        device_count=lambda: len(shape.gpus),
        get_device_properties=lambda gpu: SimpleNamespace(
            pci_domain_id=0, pci_bus_id=GPU_BUSES[gpu], pci_device_id=0
        ),
    )
    monkeypatch.setattr(binding, "open", elsewhere, raising=False)
    monkeypatch.setattr(binding, "os", machine)
    torch = SimpleNamespace(
        cuda=devices, accelerator=devices, get_device_module=lambda _device: devices
    )
    monkeypatch.setattr(binding, "torch", torch)
    return binding


ModuleOfTorch = Any


@pytest.mark.parametrize("allowed", ALLOWED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MACHINES)
def test_each_worker_gets_the_same_cpus(
    name: str, mode: str, allowed: str, roots: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, root = MACHINES[name], roots[name]
    may = ALLOWED[allowed](shape.cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(may))
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    ranks = range(len(shape.gpus))
    ours = cpus_of_workers(NumaOptions(AffinityMode(mode)), ranks, root=str(root))
    torch = theirs(monkeypatch, shape, root, may)
    options = torch.NumaOptions(torch.AffinityMode(mode))
    select = torch._get_logical_cpus_to_bind_to
    (index,) = inspect.signature(select).parameters.keys() - {"numa_options"}  # Newer: device_index
    for rank in ranks:
        assert set(ours[rank]) == select(**{index: rank}, numa_options=options)


def test_torchs_options_are_accepted(
    roots: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(128)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    torch = importlib.import_module("torch.numa.binding")
    root = str(roots["two sockets"])
    for mode in torch.AffinityMode:
        ours = NumaOptions(AffinityMode(mode.value))
        both = [
            cpus_of_workers(one, range(8), root=root) for one in (torch.NumaOptions(mode), ours)
        ]
        assert both[0] == both[1]


@pytest.mark.parametrize("visible", [None, "4,5,6,7", "GPU-a, GPU-b,2,3"])
def test_virtual_local_ranks_show_the_same_device(
    visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from holdfast.numa.visible_devices import device_variables

    agent: Any = importlib.import_module(
        "torch.distributed.elastic.agent.server.local_elastic_agent"
    )
    # Older versions ignore AMD's variable.
    hip = [None, "", "0,1,6,7"] if Version(torch.__version__) >= Version("2.15") else [None]
    for rank, amd in itertools.product(range(4), hip):
        for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("HIP_VISIBLE_DEVICES", amd)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        env: dict[str, str] = {}
        spec = SimpleNamespace(virtual_local_rank=True)
        agent.LocalElasticAgent._set_local_rank_env(None, env, rank, spec)
        assert env == {"LOCAL_RANK": "0", **device_variables(os.environ, rank)}
