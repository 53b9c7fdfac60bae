"""Small things that scripts written for TorchElastic use; `holdfast.elastic.utils` has them too.

`ElasticDistributedSampler` alone needs torch, and is fetched when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from holdfast.scripting.elastic_sampler import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler"]


def __getattr__(name: str) -> Any:
    if name != "ElasticDistributedSampler":
        raise AttributeError(f"module 'holdfast.scripting' has no attribute {name!r}")
    from holdfast.scripting.elastic_sampler import ElasticDistributedSampler

    return ElasticDistributedSampler
