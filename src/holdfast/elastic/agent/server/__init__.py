"""The agent and its data types under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.agent.spec import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from holdfast.agent.watchdogs import ENABLE_ENV as TORCHELASTIC_ENABLE_FILE_TIMER
from holdfast.agent.watchdogs import FILE_ENV as TORCHELASTIC_TIMER_FILE
from holdfast.elastic._impl.agents import ElasticAgent, SimpleElasticAgent
from holdfast.elastic._impl.submodules import bind_submodules

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_TIMER_FILE",
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

bind_submodules(__name__)
