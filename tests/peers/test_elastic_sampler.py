"""Our `ElasticDistributedSampler` compared with torch's: the same indices for the same arguments."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.torch


def ours(*arguments: Any, **named: Any) -> Any:
    from holdfast.elastic.utils.data import ElasticDistributedSampler

    return ElasticDistributedSampler(*arguments, **named)


def theirs(*arguments: Any, **named: Any) -> Any:
    from torch.distributed.elastic.utils.data import ElasticDistributedSampler

    return ElasticDistributedSampler(*arguments, **named)


@pytest.mark.parametrize("start", [0, 1, 7, 22])
@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 40])
def test_indices_equal_torchs(replicas: int, start: int) -> None:
    data = list(range(23))
    for rank in range(replicas):
        mine, reference = (
            kind(data, num_replicas=replicas, rank=rank, start_index=start)
            for kind in (ours, theirs)
        )
        for epoch in range(3):
            mine.set_epoch(epoch)
            reference.set_epoch(epoch)
            # With 40 workers and one sample left, torch's sampler cannot pad, and raises.
            if reference.total_size <= 2 * (23 - start):
                assert list(mine) == list(reference)
            assert len(mine) == len(list(mine)) == len(reference)
        assert (mine.total_size, mine.num_samples) == (reference.total_size, reference.num_samples)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 7])
def test_no_sample_is_lost_when_the_number_of_workers_changes(replicas: int) -> None:
    """Two workers used the samples up to 10; then the number of workers changes."""
    data = list(range(31))
    shares = [list(ours(data, replicas, rank, 10)) for rank in range(replicas)]
    assert len({len(share) for share in shares}) == 1
    given = [index for share in shares for index in share]
    assert set(given) == set(range(10, 31))
    assert len(given) - len(set(given)) < replicas


def test_more_workers_than_samples_is_allowed() -> None:
    """Torch's sampler raises an AssertionError without a message."""
    shares = [list(ours(list(range(3)), 10, rank, 1)) for rank in range(10)]
    assert {index for share in shares for index in share} == {1, 2}
    assert all(len(share) == 1 for share in shares)


def test_start_beyond_the_end_yields_nothing() -> None:
    with pytest.raises(ValueError, match="start_index"):
        ours([1, 2, 3], 1, 0, start_index=3)


def test_sampler_is_accepted_by_torchs_data_loader() -> None:
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    sampler = ours(list(range(8)), 2, 1)
    assert isinstance(sampler, DistributedSampler)
    batches = list(DataLoader(list(range(8)), batch_size=2, sampler=sampler))
    assert [int(one) for batch in batches for one in batch] == list(sampler)


def test_torch_is_imported_only_with_the_sampler() -> None:
    program = (
        "import sys\n"
        "import holdfast.elastic.utils, holdfast.elastic.utils.distributed\n"
        "from holdfast.elastic.utils import api, logging, log_level, process_state, store\n"
        "from holdfast.elastic.utils.data import CyclingIterator\n"
        "assert 'torch' not in sys.modules\n"
        "from holdfast.elastic.utils.data import ElasticDistributedSampler\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
