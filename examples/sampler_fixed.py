"""Data-parallel training with `DistributedSampler`: an ordinary torchrun script, without checkpoints.

Run it (needs PyTorch):

    holdfast run --nproc-per-node 2 examples/sampler_fixed.py --folder /tmp/sampler

If it is restarted, it begins again at the first epoch. `sampler_elastic.py` trains the same model, and continues.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Train in a process group."""
    dist.init_process_group("gloo")
    # A function of its own: if the model outlives the process group, PyTorch 2.13 can hang.
    train(parse_args())
    dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    """Train for some epochs."""
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate, momentum=0.9)
    dataset = samples()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.folder / "model.pt")


def samples() -> TensorDataset:
    """Return a small data set."""
    inputs = torch.randn(480, 8)
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))


def parse_args() -> argparse.Namespace:
    """Return the arguments of the script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=12, help="samples of a step of one worker")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
