"""Data over epochs and restarts, under TorchElastic's module path; re-exports only.

`ElasticDistributedSampler` is fetched when it is first used, since it needs torch.
"""

from __future__ import annotations

from holdfast.elastic._impl.data import __getattr__  # noqa: F401 (finds the sampler)
from holdfast.elastic._impl.scripts import CyclingIterator
from holdfast.elastic.utils.data import cycling_iterator  # noqa: F401 (also an attribute)

__all__ = ["CyclingIterator"]
