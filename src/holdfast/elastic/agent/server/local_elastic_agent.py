"""The agent of a real node under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.agent.local import UNINTERRUPTIBLE_ENV as TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT
from holdfast.agent.local import LocalElasticAgent

__all__ = ["TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "LocalElasticAgent"]
