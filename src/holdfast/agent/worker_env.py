"""The environment variables of each worker. Names and values are TorchElastic's.

Two are Holdfast's own. `HOLDFAST_GENERATION` counts the starts of the workers over the whole job,
whatever the reason, and is the same on every node; `TORCHELASTIC_RESTART_COUNT` counts failures only.
`HOLDFAST_FENCE` is the same on every node, too, and grows with every generation. Unlike the
generation it keeps growing if the coordinator loses its state and counts from 0 again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from holdfast.agent.spec import Worker, WorkerGroup


def worker_environment(
    group: WorkerGroup,
    worker: Worker,
    *,
    generation: int,
    restart_count: int,
    fence: int = 0,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables that a worker gets on top of the agent's environment."""
    spec = group.spec
    # If the caller sets the address, something else serves the store.
    serves = spec.rdzv_handler.use_agent_store and not (spec.master_addr or spec.master_port)
    env = {
        "LOCAL_RANK": str(worker.local_rank),
        "RANK": str(worker.global_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(serves),
        "HOLDFAST_GENERATION": str(generation),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if fence:
        env["HOLDFAST_FENCE"] = str(fence)
    if "OMP_NUM_THREADS" in inherited:
        env["OMP_NUM_THREADS"] = inherited["OMP_NUM_THREADS"]
    if spec.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        from holdfast.numa.visible_devices import one_device_each

        env.update(one_device_each(inherited, worker.local_rank))
    return env


def substitute_local_rank(arg: Any, local_rank: int | str) -> Any:
    """Replace `${local_rank}` and `$local_rank` in a text argument; leave other values unchanged."""
    if not isinstance(arg, str) or "local_rank" not in arg:
        return arg
    import re

    return re.sub(r"\$(?:\{local_rank\}|local_rank\b)", str(local_rank), arg)


def log_line_prefix(template: str, role: str, worker: Worker) -> str:
    """Fill a prefix template; unknown names stay unchanged."""
    from string import Template

    return Template(template).safe_substitute(
        role_name=role, rank=worker.global_rank, local_rank=worker.local_rank
    )


def timeout_from_environment(name: str) -> float | None:
    """Return the seconds in a variable; None if it is unset, not a number, or not positive."""
    try:
        seconds = float(os.environ.get(name, ""))
    except ValueError:
        return None
    return seconds if seconds > 0 else None
