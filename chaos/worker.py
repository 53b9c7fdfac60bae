"""The worker of a chaos job: writes to the ledger what it does, until the goal is there.

A line is ``time event machine pid rank world_size generation restarts fence``, written by one call
to a file opened for appending, so that lines of many workers never mix.
"""

import os
import signal
import sys
import time

LEDGER, GOAL, STEP_S = os.environ["CHAOS_LEDGER"], os.environ["CHAOS_GOAL"], 0.03
FIELDS = " ".join(
    os.environ.get(name, "-1")
    for name in (
        "RANK", "WORLD_SIZE", "HOLDFAST_GENERATION", "TORCHELASTIC_RESTART_COUNT", "HOLDFAST_FENCE",
    )
)  # fmt: skip
MACHINE = os.environ["CHAOS_MACHINE"]
fd = os.open(LEDGER, os.O_WRONLY | os.O_APPEND)


def write(event: str) -> None:
    line = f"{time.monotonic_ns()} {event} {MACHINE} {os.getpid()} {FIELDS}\n"
    os.write(fd, line.encode())


def stop(_signum: int, _frame: object) -> None:
    """Be as slow to stop as one that saves its work."""
    end = time.monotonic() + float(os.environ["CHAOS_STOP_S"])
    while time.monotonic() < end:
        write("saving")
        time.sleep(STEP_S)
    os._exit(1)


def fail(_signum: int, _frame: object) -> None:
    write("failing")
    sys.exit(3)


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, fail)
write("start")
while not os.path.exists(GOAL):
    write("step")
    time.sleep(STEP_S)
write("done")
