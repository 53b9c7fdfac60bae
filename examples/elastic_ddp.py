r"""Elastic data-parallel training with PyTorch on CPUs: it continues while workers and nodes fail, join and leave.

Run it in two terminals (needs PyTorch). You can start it in a third at any time, and stop or kill any
of them:

    holdfast run --nnodes 1:3 --rdzv-backend c10d --rdzv-endpoint localhost:29400 --rdzv-id ddp \
        --max-restarts 3 examples/elastic_ddp.py --folder /tmp/ddp

It does not use Holdfast, and runs under `torchrun` as well. It is elastic because:

- The number of a step determines its samples, for any number of workers. So a change within an epoch
  omits or repeats no sample, and the parameters equal those of a single process, except for rounding.
- A checkpoint contains everything that the next step depends on. It is complete or absent.
- All workers continue from the checkpoint that rank 0 found.
- A worker that receives SIGTERM finishes its step, saves, and exits.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES, FEATURES, NOISE = 3840, 8, 0.05
KEPT = 2  # Checkpoints to keep. The second is a fallback if the newest is damaged.
STOP_PATIENCE_S = 60.0

# The number of this start. torchrun counts only starts after a failure.
GENERATION = int(os.environ.get("HOLDFAST_GENERATION", os.environ["TORCHELASTIC_RESTART_COUNT"]))


def main() -> None:
    """Train from the newest checkpoint to the last step, or until a stop signal arrives."""
    args = parse_args()
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.handle)
    # Sums over different numbers of workers then agree to 15 digits.
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)  # All workers draw the same random numbers.
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.rate)
    step = resume(args.folder, model, optimizer)
    log = continue_log(args.folder, step)
    me = f"rank {dist.get_rank()} of {dist.get_world_size()} (pid {os.getpid()})"
    print(f"{me}: generation {GENERATION}, continues after step {step}", flush=True)
    parallel = DistributedDataParallel(model)
    stopping = False
    while step < args.steps and not stopping:
        loss, stopping = train(parallel, optimizer, step, args, stop)
        step += 1
        if log is not None:
            note = {"step": step, "loss": loss, "generation": GENERATION}
            log.write(json.dumps(note | {"world_size": dist.get_world_size()}) + "\n")
            log.flush()
            if stopping or step % args.checkpoint_every == 0 or step == args.steps:
                os.fsync(log.fileno())  # Before the checkpoint, which confirms these steps.
                save(args.folder, model, optimizer, step)
        time.sleep(args.step_seconds)  # A real model takes longer.
    if stopping and step < args.steps:
        stop.wait(step)
    del parallel  # If the model outlives the process group, PyTorch 2.13 can hang.
    dist.destroy_process_group()


def train(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    step: int,
    args: argparse.Namespace,
    stop: Stop,
) -> tuple[float, bool]:
    """Do one step; return the loss over the whole batch, and whether any worker must stop."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples, targets = batch_of(step, args.batch, args.seed)
    # Every worker draws the noise of the whole batch, so the noise does not depend on their number.
    samples = samples + NOISE * torch.randn(samples.shape)
    mine = slice(rank, None, world_size)
    errors = (model(samples[mine]) - targets[mine]) ** 2
    # The shares of the workers differ in size, so the mean over the batch is a sum over the workers.
    # DDP computes the mean over the workers, hence the factor.
    loss = errors.sum() / args.batch
    optimizer.zero_grad()
    (loss * world_size).backward()
    optimizer.step()
    # All workers must stop after the same step; otherwise some would wait forever.
    sums = torch.stack([loss.detach(), torch.tensor(float(stop.requested))])
    dist.all_reduce(sums)
    return sums[0].item(), bool(sums[1] > 0)


def batch_of(step: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a step: the next ones in the shuffled order of its epoch."""
    epoch, index = divmod(step, SAMPLES // size)
    order = torch.randperm(SAMPLES, generator=seeded(seed + epoch))
    chosen = order[index * size : (index + 1) * size]
    samples = torch.randn(SAMPLES, FEATURES, generator=seeded(seed))[chosen]
    return samples, torch.sin(samples.sum(dim=1, keepdim=True) / 2)


def seeded(seed: int) -> torch.Generator:
    """Return a random number generator of its own for this seed."""
    return torch.Generator().manual_seed(seed)


# Checkpoints.


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint under another name, then rename it, so that a kill leaves no partial file."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
    }
    # The name has this process's id, because a worker on a replaced node may still write here too.
    beside = folder / f"{os.uname().nodename}_{os.getpid()}.new"
    with beside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / f"checkpoint_{step:08}.pt")
    sync(folder)
    for old in sorted(folder.glob("checkpoint_*.pt"))[:-KEPT]:
        old.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Sync a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint; return the number of completed steps.

    Rank 0 reads it for all workers. Otherwise two workers could load different files.
    """
    content = bytearray(newest(folder) if dist.get_rank() == 0 else b"")
    size = torch.tensor(len(content))
    dist.broadcast(size, src=0)
    if not size:
        return 0
    content = content or bytearray(int(size))
    # The tensor shares the memory of `content`.
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=0)
    state = torch.load(io.BytesIO(content), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return int(state["step"])


def newest(folder: Path) -> bytes:
    """Return the content of the newest readable checkpoint; empty if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("checkpoint_*.pt"), reverse=True):
        try:
            content = path.read_bytes()
            torch.load(io.BytesIO(content), weights_only=True)
        except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
            print(f"{path} cannot be read, using the previous one: {error}")
        else:
            return content
    return b""


def continue_log(folder: Path, step: int) -> Any:
    """Open the log of losses for rank 0, without the steps that this start repeats.

    The log is a new file that takes the old name. A replaced worker still writes to the old file.
    """
    if dist.get_rank() != 0:
        return None
    path = folder / "losses.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    beside = folder / f"{os.uname().nodename}_{os.getpid()}.new"
    log = beside.open("w")
    log.writelines(lines[:step])
    log.flush()
    os.fsync(log.fileno())
    beside.replace(path)
    return log


# Stopping.


class Stop:
    """Whether this worker received a stop signal. It finishes the current step first."""

    def __init__(self) -> None:
        self.requested = False

    def handle(self, *_: object) -> None:
        """Handle the signal."""
        self.requested = True

    def wait(self, step: int) -> None:
        """Wait until this worker itself has received the signal.

        If a node joins or leaves, the launcher stops the workers of all nodes, but not at the same
        instant. A worker that exits with 0 before its signal counts as finished.
        """
        deadline = time.monotonic() + STOP_PATIENCE_S
        while not self.requested:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"other workers stopped after step {step}, but this one got no signal"
                )
            time.sleep(0.01)


def parse_args() -> argparse.Namespace:
    """Return the arguments of the script; Holdfast passes them on unchanged."""
    parser = argparse.ArgumentParser(description="Train with any number of workers.")
    parser.add_argument("--folder", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--batch", type=int, default=384, help="samples of a step, over all workers"
    )
    parser.add_argument("--rate", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--step-seconds", type=float, default=0.05)
    return parser.parse_args()


if __name__ == "__main__":
    main()
