"""The agent of a real node under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.agent.assembly import (
    UNINTERRUPTIBLE_ENV as TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT,
)
from holdfast.agent.side_services import HEALTH_PORT_ENV as TORCHELASTIC_HEALTH_CHECK_PORT
from holdfast.agent.watchdogs import ENABLE_ENV as TORCHELASTIC_ENABLE_FILE_TIMER
from holdfast.agent.watchdogs import FILE_ENV as TORCHELASTIC_TIMER_FILE
from holdfast.elastic._impl.agents import LocalElasticAgent

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "LocalElasticAgent",
]
