"""Data over epochs and restarts, under TorchElastic's module path; re-exports only.

`ElasticDistributedSampler` is fetched when it is first used, since it needs torch.
"""

from __future__ import annotations

from holdfast.scripting import __getattr__  # noqa: F401 (finds the sampler)
from holdfast.scripting.cycling_iterator import CyclingIterator

__all__ = ["CyclingIterator"]
