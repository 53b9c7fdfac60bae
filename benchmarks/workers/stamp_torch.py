"""A worker that imports torch, records when it has, and then waits if the job is held."""

import os
from time import monotonic_ns

import torch

reached_ns = monotonic_ns()
generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
rank = os.environ.get("LOCAL_RANK", "0")
stamps = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY)
os.write(stamps, f"{generation} {rank} {os.getpid()} {reached_ns}\n".encode())
os.close(stamps)
assert torch.zeros(1).item() == 0

if "BENCH_GATE" in os.environ:
    gate = os.open(os.environ["BENCH_GATE"], os.O_RDONLY)
    os.read(gate, 1)
# The shutdown of torch takes long, and is not measured.
os._exit(0)
