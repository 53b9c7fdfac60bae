"""Distributes the rest of an epoch after a restart with more or fewer workers.

Its class is one of torch's samplers, so this module imports torch. `start_index` is a position in the
dataset, not in the shuffled order of an epoch. The caller must ensure that all samples before it have
been used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.distributed import DistributedSampler

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


class ElasticDistributedSampler(DistributedSampler):  # type: ignore[misc]
    """One worker's share of the indices from `start_index` on, shuffled for each epoch.

    Together the workers get every index. Each gets the same number: if the indices do not divide
    evenly, some of the first ones are repeated at the end.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        start_index: int = 0,
    ) -> None:
        super().__init__(dataset=dataset, num_replicas=num_replicas, rank=rank)
        if start_index >= len(dataset):
            raise UsageError(
                f"start_index: {start_index} is beyond the end of a dataset of {len(dataset)}"
            )
        self.start_index = start_index
        self._left = len(dataset) - start_index
        self.num_samples: int = -(-self._left // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self._left, generator=torch.Generator().manual_seed(self.epoch))
        # Continue with the first indices after the last one.
        places = torch.arange(self.rank, self.total_size, self.num_replicas) % self._left
        return iter((order[places] + self.start_index).tolist())

    def __len__(self) -> int:
        return self.num_samples
