"""The agent to derive from, and its nouns, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.agent.elastic_agent import ElasticAgent
from holdfast.agent.simple import SimpleElasticAgent
from holdfast.agent.workers import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
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
]
