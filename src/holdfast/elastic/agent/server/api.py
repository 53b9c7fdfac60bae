"""The agent to derive from, and its data types, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.agent.spec import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from holdfast.elastic._impl.agents import (  # Subclasses of others import the last two as well.
    ElasticAgent,
    SimpleElasticAgent,
    _get_fq_hostname,
    _RoleInstanceInfo,
)

__all__ = [
    "DEFAULT_ROLE",
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "_RoleInstanceInfo",
    "_get_fq_hostname",
]
