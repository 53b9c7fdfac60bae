"""A worker of a job over many nodes: it writes its node and rank when it starts, and waits.

The clock is CLOCK_MONOTONIC, which all processes of a Linux machine share, so the starts of all
nodes' workers can be compared. One short write to a FIFO is atomic.
"""

from time import monotonic_ns

reached_ns = monotonic_ns()

import os  # noqa: E402 (the stamp comes first)

words = (
    os.environ["BENCH_NODE"],
    str(os.getpid()),
    str(reached_ns),
    os.environ["WORLD_SIZE"],
    os.environ["RANK"],
    os.environ["TORCHELASTIC_RESTART_COUNT"],
)
starts = os.open(os.environ["BENCH_STARTS"], os.O_WRONLY)
os.write(starts, f"{' '.join(words)}\n".encode())
os.close(starts)

# Wait without using any CPU until the benchmark writes a byte for each.
gate = os.open(os.environ["BENCH_GATE"], os.O_RDONLY)
os.read(gate, 1)
