"""A worker that records when it reached its first line, and then waits if the job is held.

The clock is CLOCK_MONOTONIC, which all processes of a Linux machine share. One short write to a
FIFO is atomic, so the workers need no lock.
"""

from time import monotonic_ns

reached_ns = monotonic_ns()

import os  # noqa: E402 (the stamp comes first)

generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
rank = os.environ.get("LOCAL_RANK", "0")
stamps = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY)
os.write(stamps, f"{generation} {rank} {os.getpid()} {reached_ns}\n".encode())
os.close(stamps)

if "BENCH_GATE" in os.environ:
    # Wait without using any CPU until the benchmark writes a byte for each.
    gate = os.open(os.environ["BENCH_GATE"], os.O_RDONLY)
    os.read(gate, 1)
