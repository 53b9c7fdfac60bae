"""An agent whose endpoint is an address of its own machine does not recognize that it must host the store.

It compares the endpoint with the addresses of its host name. An address on a second network is not among them, so no
agent serves the endpoint and every node times out. Needs root for a separate network. Shortened here: `read_timeout`
60 -> 3 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .stage import Evidence, present

SCRIPT = """
ip link set lo up && ip addr add 10.77.0.1/32 dev lo || exit 99
exec "$0" --nnodes 1:1 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29511 --rdzv-id defect \
    --rdzv-conf read_timeout=3 --no-python true
"""
NO_NETWORK = 99


def show() -> Evidence:
    if os.geteuid() != 0:
        return Evidence(shown=False, text="needs root, to add an address to a separate network")
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = ["unshare", "--net", "sh", "-c", SCRIPT, torchrun]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == NO_NETWORK:
        return Evidence(
            shown=False, text=f"cannot create a separate network: {done.stderr.strip()}"
        )
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "(nothing)"
    return Evidence(
        done.returncode == 1 and "RendezvousConnectionError" in last,
        f"the machine that has 10.77.0.1 ended with {done.returncode} on the endpoint "
        f"10.77.0.1:29511: {last}",
    )


if __name__ == "__main__":
    present(show)
