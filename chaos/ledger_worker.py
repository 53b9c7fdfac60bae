"""The worker of a chaos job: records its actions in the ledger until the goal file exists.

A line is ``time event machine pid rank world_size generation restarts fence step``, written by one
call to a file opened for appending, so that lines of many workers never mix. With a folder for
checkpoints it trains: every step is a sum over all ranks, which each of them checks.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

LEDGER, GOAL, STEP_S = os.environ["CHAOS_LEDGER"], os.environ["CHAOS_GOAL"], 0.03
CHECKPOINTS = os.environ.get("CHAOS_CHECKPOINTS", "")
FENCED = Path(__file__).resolve().parent.parent / "examples" / "fenced_checkpoints.py"
TRAINING_STEP_S = 0.1
FIELDS = " ".join(
    os.environ.get(name, "-1")
    for name in (
        "RANK", "WORLD_SIZE", "HOLDFAST_GENERATION", "TORCHELASTIC_RESTART_COUNT", "HOLDFAST_FENCE",
    )
)  # fmt: skip
MACHINE = os.environ["CHAOS_MACHINE"]
fd = os.open(LEDGER, os.O_WRONLY | os.O_APPEND)


def write(event: str, step: int = 0) -> None:
    line = f"{time.monotonic_ns()} {event} {MACHINE} {os.getpid()} {FIELDS} {step}\n"
    os.write(fd, line.encode())


def stop(_signum: int, _frame: object) -> None:
    """Stop as slowly as a worker that saves its work."""
    end = time.monotonic() + float(os.environ["CHAOS_STOP_S"])
    while time.monotonic() < end:
        write("saving")
        time.sleep(STEP_S)
    os._exit(1)


def fail(_signum: int, _frame: object) -> None:
    write("failing")
    sys.exit(3)


def count() -> None:
    while not os.path.exists(GOAL):
        write("step")
        time.sleep(STEP_S)
    write("done")


def train() -> None:
    """Continue from the last checkpoint; record wrong sums."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    fenced = runpy.run_path(str(FENCED))["CheckpointFolder"]
    folder = fenced(Path(CHECKPOINTS), int(os.environ["HOLDFAST_FENCE"]))
    loaded = folder.load() if rank == 0 else {"step": 0}
    state = torch.tensor([loaded["step"], loaded.get("total", 0)])
    dist.broadcast(state, 0)
    step, total = state.tolist()
    is_over = 0
    while not is_over:
        step += 1
        numbers = torch.tensor([(rank + 1) * step, rank == 0 and os.path.exists(GOAL)])
        dist.all_reduce(numbers)
        found, is_over = numbers.tolist()
        total += found * 2 // (world * (world + 1))  # The step's number, whatever the world size.
        if total != step * (step + 1) // 2:
            write("wrong", step)
            os._exit(4)
        if rank == 0:
            folder.save({"step": step, "total": total})
        write("step", step)
        time.sleep(TRAINING_STEP_S)
    write("done", step)
    dist.destroy_process_group()


write("start")
if not CHECKPOINTS:
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, fail)
    count()
else:  # Signals end it at once: a handler would wait until gloo returns, perhaps forever.
    try:
        train()
    except Exception as problem:  # noqa: BLE001 (torch may raise anything)
        print(f"worker: {str(problem).splitlines()[0]}", file=sys.stderr)
        write("failing")
        os._exit(1)
