"""`ElasticDistributedSampler`, which needs torch and is therefore imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from holdfast.elastic._impl.elastic_sampler import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler"]


def __getattr__(name: str) -> Any:
    if name != "ElasticDistributedSampler":
        raise AttributeError(f"module 'holdfast.elastic._impl.data' has no attribute {name!r}")
    from holdfast.elastic._impl.elastic_sampler import ElasticDistributedSampler

    return ElasticDistributedSampler
