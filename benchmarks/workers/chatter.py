"""A worker that writes many numbered lines, half to stdout, half to stderr.

It writes blocks of whole lines, as a program with buffered output does, so that the launcher's
tee limits the speed. Every line names its worker, its stream and its number.
"""

from time import monotonic_ns

reached_ns = monotonic_ns()

import os  # noqa: E402 (the stamp comes first)

LINES_PER_BLOCK = 300

rank = int(os.environ.get("LOCAL_RANK", "0"))
lines = int(os.environ["BENCH_LINES"])
width = int(os.environ["BENCH_LINE_BYTES"])
stamps = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY)
os.write(stamps, f"0 {rank} {os.getpid()} {reached_ns}\n".encode())
os.close(stamps)


def write_all(fd: int, block: bytes) -> None:
    while block:
        block = block[os.write(fd, block) :]


templates = {
    fd: b"%d %d %%09d " % (rank, fd) + b"x" * (width - len(f"{rank} {fd} 123456789 \n")) + b"\n"
    for fd in (1, 2)
}
for first in range(0, lines, LINES_PER_BLOCK):
    numbers = tuple(range(first, min(first + LINES_PER_BLOCK, lines)))
    for fd in (1, 2):
        write_all(fd, templates[fd] * len(numbers) % numbers)
