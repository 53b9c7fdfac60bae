"""The sampler for elastic jobs, under TorchElastic's module path; re-exports only. Needs torch."""

from __future__ import annotations

from holdfast.elastic._impl.elastic_sampler import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler"]
