"""Data-parallel training with `DistributedSampler` that continues after a restart, with any number of workers.

Run it in two terminals (needs PyTorch). You can stop, kill or restart either of them:

    holdfast run --nnodes 1:2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint localhost:29400 \
        --rdzv-id sampler examples/sampler_elastic.py --folder /tmp/sampler

It is `sampler_fixed.py` with checkpoints. It does not use Holdfast, and runs under `torchrun` as well.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def main() -> None:
    """Train in a process group."""
    dist.init_process_group("gloo")
    # A function of its own: if the model outlives the process group, PyTorch 2.13 can hang.
    train(parse_args())
    dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    """Train for some epochs, from the last checkpoint if there is one."""
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate, momentum=0.9)
    dataset = samples()
    checkpoint = args.folder / "checkpoint.pt"
    first_epoch, done = resume(checkpoint, model, optimizer)
    # The batch of a worker depends on the number of workers; the batch of the job does not.
    worker_batch = args.batch // dist.get_world_size()
    batch = worker_batch * dist.get_world_size()
    for group in optimizer.param_groups:  # The checkpoint may have the rate of another batch size.
        group["lr"] = args.rate * batch / args.batch
    for epoch in range(first_epoch, args.epochs):
        rest = unused(dataset, epoch, done)
        sampler = DistributedSampler(rest, shuffle=False, drop_last=True)
        loader = DataLoader(rest, batch_size=worker_batch, sampler=sampler, drop_last=True)
        for step, (inputs, targets) in enumerate(loader, start=1):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += batch
            if step % args.save_every == 0:
                save(checkpoint, model, optimizer, epoch, done)
                if dist.get_rank() == 0:
                    print(f"epoch {epoch}, sample {done}: loss {loss.item():.4f}")
        done = 0
        save(checkpoint, model, optimizer, epoch + 1, done)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.folder / "model.pt")


def unused(dataset: TensorDataset, epoch: int, done: int) -> Subset[tuple[torch.Tensor, ...]]:
    """Return the samples of an epoch that no step has used yet, in the shuffled order of this epoch."""
    shuffled = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch))
    return Subset(dataset, shuffled[done:].tolist())


def save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, done: int
) -> None:
    """Write a checkpoint under another name, then rename it, so that a kill leaves no partial file."""
    if dist.get_rank() != 0:
        return
    beside = path.with_name(f"{os.uname().nodename}_{os.getpid()}.new")
    with beside.open("wb") as file:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "epoch": epoch, "done": done}, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Load the checkpoint; return its epoch, and how many samples of that epoch are done."""
    if not path.exists():
        return 0, 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"], state["done"]


def samples() -> TensorDataset:
    """Return a small data set."""
    inputs = torch.randn(480, 8)
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))


def parse_args() -> argparse.Namespace:
    """Return the arguments of the script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="all nodes must share it")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=24, help="samples of a step of all workers")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate for this batch")
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
