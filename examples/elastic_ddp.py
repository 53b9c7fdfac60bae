r"""Elastic data-parallel training with PyTorch on CPUs: workers and nodes come and go, it goes on.

Run it on two terminals; another may join at any time, and any of them may be stopped or killed
(needs PyTorch):

    holdfast run --nnodes 1:3 --rdzv-backend c10d --rdzv-endpoint localhost:29400 --rdzv-id ddp \
        --max-restarts 3 examples/elastic_ddp.py --folder /tmp/ddp

It knows nothing of Holdfast, and `torchrun` runs it as well. What makes it elastic is this:

- What a step does depends on its number alone: which samples it takes follows from it, however many
  workers share them. So no sample is left out or used twice after a change in the middle of an
  epoch, and the parameters are those that one process alone would have, but for rounding.
- A checkpoint has all that the next step depends on, and is there as a whole or not at all.
- All workers of a start go on from the one checkpoint that rank 0 found.
- A worker that is asked to stop (SIGTERM) finishes its step; a checkpoint is kept; then it leaves.
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
KEPT = 2  # Checkpoints. One is enough, unless the disk has lost it.
STOP_PATIENCE_S = 60.0

# Counts starts of the workers. Without Holdfast it counts only those that a failure has cost.
GENERATION = int(os.environ.get("HOLDFAST_GENERATION", os.environ["TORCHELASTIC_RESTART_COUNT"]))


def main() -> None:
    """Train from the newest checkpoint on, to the last step or until asked to stop."""
    args = parse_args()
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.ask)
    torch.set_default_dtype(torch.float64)  # So that sums over workers round to the same.
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)  # The same for all, as everything that is drawn from it.
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.rate)
    step = resume(args.folder, model, optimizer)
    log = continue_log(args.folder, step)
    me = f"rank {dist.get_rank()} of {dist.get_world_size()} (pid {os.getpid()})"
    print(f"{me}: generation {GENERATION}, goes on after step {step}", flush=True)
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
                os.fsync(log.fileno())  # First: a checkpoint says that these steps are done.
                save(args.folder, model, optimizer, step)
        time.sleep(args.step_seconds)  # A real model takes its time.
    if stopping and step < args.steps:
        stop.wait(step)
    dist.destroy_process_group()


def train(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    step: int,
    args: argparse.Namespace,
    stop: Stop,
) -> tuple[float, bool]:
    """Do one step; return the loss over the whole batch, and whether any worker is to stop."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples, targets = batch_of(step, args.batch, args.seed)
    # Drawn for the whole batch by every worker, so that it does not depend on how many there are.
    samples = samples + NOISE * torch.randn(samples.shape)
    mine = slice(rank, None, world_size)
    errors = (model(samples[mine]) - targets[mine]) ** 2
    # The mean over the batch is a sum over workers whose shares need not be of one size. DDP takes
    # the mean over workers instead, hence the factor.
    loss = errors.sum() / args.batch
    optimizer.zero_grad()
    (loss * world_size).backward()
    optimizer.step()
    # All must stop after the same step, or those that go on would wait for the others.
    told = torch.stack([loss.detach(), torch.tensor(float(stop.asked))])
    dist.all_reduce(told)
    return told[0].item(), bool(told[1] > 0)


def batch_of(step: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a step: the next ones in the shuffled order of its epoch."""
    epoch, index = divmod(step, SAMPLES // size)
    order = torch.randperm(SAMPLES, generator=seeded(seed + epoch))
    chosen = order[index * size : (index + 1) * size]
    samples = torch.randn(SAMPLES, FEATURES, generator=seeded(seed))[chosen]
    return samples, torch.sin(samples.sum(dim=1, keepdim=True) / 2)


def seeded(seed: int) -> torch.Generator:
    """Return a source of random numbers that is nobody else's."""
    return torch.Generator().manual_seed(seed)


# Checkpoints.


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint beside its place, then rename it: a kill must not leave half of one."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
    }
    # A worker of a node that the others gave up, but that does not know it yet, may be here too.
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
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up the newest checkpoint; return the step to go on with.

    Rank 0 reads it for all. If each did, one could see a file that was not there for another.
    """
    content = bytearray(newest(folder) if dist.get_rank() == 0 else b"")
    size = torch.tensor(len(content))
    dist.broadcast(size, src=0)
    if not size:
        return 0
    content = content or bytearray(int(size))
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=0)  # It shares the memory.
    state = torch.load(io.BytesIO(content), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return int(state["step"])


def newest(folder: Path) -> bytes:
    """Return what is in the newest checkpoint that can be read; nothing if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("checkpoint_*.pt"), reverse=True):
        try:
            content = path.read_bytes()
            torch.load(io.BytesIO(content), weights_only=True)
        except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
            print(f"{path} cannot be read, taking the one before it: {error}")
        else:
            return content
    return b""


def continue_log(folder: Path, step: int) -> Any:
    """Return the log of losses, without the steps that will be done again; only for rank 0.

    It is a new file under the old name. Should a worker that was given up still write, it writes
    to the old one.
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
    """Whether this worker was asked to stop; the step that runs is finished first."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, *_: object) -> None:
        """Note it; this is the handler of the signal."""
        self.asked = True

    def wait(self, step: int) -> None:
        """Wait until this worker itself was asked, for it may have been only another.

        If a node leaves, or one joins, the launcher stops the workers of all nodes, but not all in
        one moment. One that ended by itself before would be taken for done.
        """
        deadline = time.monotonic() + STOP_PATIENCE_S
        while not self.asked:
            if time.monotonic() > deadline:
                raise TimeoutError(f"others stopped after step {step}, and nobody stopped this one")
            time.sleep(0.01)


def parse_args() -> argparse.Namespace:
    """Return the arguments of the script; Holdfast passes them on untouched."""
    parser = argparse.ArgumentParser(description="Train with any number of workers.")
    parser.add_argument("--folder", type=Path, required=True, help="a folder that all nodes see")
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
