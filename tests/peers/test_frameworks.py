"""Lightning Fabric and Accelerate read rank, size and master address from Holdfast's variables.

The variables that they read, as of the versions that `make test` installs:

| framework | variable | purpose |
|---|---|---|
| Lightning | `TORCHELASTIC_RUN_ID` (by `is_torchelastic_launched`) | not starting workers itself |
| Lightning | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `GROUP_RANK` | ranks, and the number of its node |
| Lightning | `MASTER_ADDR`, `MASTER_PORT` | its properties for the master address |
| Accelerate | `LOCAL_RANK` other than -1, or `WORLD_SIZE` above 1 | detecting a distributed job |
| Accelerate | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | ranks; it sets them again |
| Accelerate | `MASTER_ADDR`, `MASTER_PORT`, `OMP_NUM_THREADS` | checking that they are set |

Both leave the rest to `init_process_group`. Without a GPU, Accelerate must be configured to use CPUs, under any
launcher (`cpu=True`, or `ACCELERATE_USE_CPU` for its `Accelerator`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from launchers import Launchers

pytestmark = pytest.mark.torch

# Generation 0 uses Lightning, generation 1 Accelerate, so that each has its own process group.
FRAMEWORKS = """\
import json, os, sys
import torch
given = dict(os.environ)
generation = given["HOLDFAST_GENERATION"]
if generation == "0":
    from lightning_fabric import Fabric
    workers, nodes = int(given["LOCAL_WORLD_SIZE"]), int(given["GROUP_WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=workers, num_nodes=nodes)
    fabric.launch()
    environment = fabric.strategy.cluster_environment
    seen = {
        "kind": type(environment).__name__,
        "rank": fabric.global_rank,
        "world_size": fabric.world_size,
        "local_rank": fabric.local_rank,
        "node_rank": fabric.node_rank,
        "address": environment.main_address,
        "port": environment.main_port,
        "sum": fabric.all_reduce(torch.tensor(fabric.global_rank + 1.0), reduce_op="sum").item(),
    }
else:
    from accelerate import PartialState
    from accelerate.utils import reduce
    state = PartialState(cpu=True)
    seen = {
        "kind": str(state.distributed_type),
        "rank": state.process_index,
        "world_size": state.num_processes,
        "local_rank": state.local_process_index,
        "node_rank": int(os.environ["GROUP_RANK"]),
        "address": os.environ["MASTER_ADDR"],
        "port": int(os.environ["MASTER_PORT"]),
        "sum": reduce(torch.tensor(state.process_index + 1.0), reduction="sum").item(),
    }
with open(f"probe-{generation}-{given['RANK']}.json", "w") as file:
    json.dump({"seen": seen, "given": given}, file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
sys.exit(9 if (generation, given["RANK"]) == ("0", "1") else 0)
"""
KINDS = {"0": "TorchElasticEnvironment", "1": "DistributedType.MULTI_CPU"}


def test_lightning_and_accelerate_read_the_launchers_variables(launchers: Launchers) -> None:
    launchers.script("frameworks.py", FRAMEWORKS)
    outcome = launchers.holdfast(["--nproc-per-node=2", "--max-restarts=1", "../frameworks.py"])
    assert outcome.code == 0, outcome.err
    probes = outcome.probes()
    names = {f"probe-{generation}-{rank}.json" for generation in "01" for rank in "01"}
    assert set(probes) == names, outcome.err
    for name, probe in probes.items():
        _, generation, rank = name.removesuffix(".json").split("-")
        assert probe["seen"] == expected(probe["given"]) | {"kind": KINDS[generation]}
        assert probe["given"]["LOCAL_RANK"] == rank
    # Accelerate warns only if a launcher does not set the variable.
    assert "OMP_NUM_THREADS" not in outcome.err


def expected(given: dict[str, str]) -> dict[str, Any]:
    world_size = int(given["WORLD_SIZE"])
    return {
        "rank": int(given["RANK"]),
        "world_size": world_size,
        "local_rank": int(given["LOCAL_RANK"]),
        "node_rank": int(given["GROUP_RANK"]),
        "address": given["MASTER_ADDR"],
        "port": int(given["MASTER_PORT"]),
        "sum": sum(range(world_size + 1)),
    }
