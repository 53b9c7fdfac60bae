"""Data-parallel training with PyTorch on CPUs: a torchrun script, unchanged.

Run it (needs PyTorch):

    holdfast run --nproc-per-node 2 examples/ddp_gloo.py

`init_process_group` finds its peers through the environment: `MASTER_ADDR`, `MASTER_PORT`, `RANK` and
`WORLD_SIZE`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train in a process group."""
    dist.init_process_group("gloo")
    # A function of its own: if the model outlives the process group, PyTorch 2.13 can hang.
    train()
    dist.destroy_process_group()


def train() -> None:
    """Fit y = 3x; each worker has its own data."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        x = torch.randn(64, 1)
        loss = ((model(x) - 3 * x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weight = model.module.weight.item()
    print(f"rank {rank} of {world_size}: the weight is {weight:.3f}")


if __name__ == "__main__":
    main()
