"""Real torch clients that keep a store busy; prints its operations per second.

    store_load.py {torchrun,holdfast} CLIENTS SECONDS

The server has a process of its own: torch's C++ one, or ours in a thread as in an agent. Every
client is a process with one connection, and does one operation after the other: set, get, add.
torch's `get` is two requests. Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys
import time
from typing import TYPE_CHECKING

from torch.distributed import TCPStore

if TYPE_CHECKING:
    from collections.abc import Callable

PR_SET_PDEATHSIG = 1
COUNT = struct.Struct("<qqq")  # Operations, begin and end in ns.
VALUE = "x" * 64


def main() -> None:
    peer, clients, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    port_read, port_write = os.pipe()
    server = fork(lambda: serve(peer, port_write))
    os.close(port_write)  # Otherwise a failing server would block.
    (port,) = struct.unpack("<i", os.read(port_read, 4))
    go_read, go_write = os.pipe()
    result_read, result_write = os.pipe()
    children = [
        fork(lambda name=number: load(port, name, seconds, go_read, result_write))  # type: ignore[misc]
        for number in range(clients)
    ]
    for _ in children:
        assert os.read(result_read, 1) == b"r"
    os.write(go_write, bytes(clients))
    counts = [COUNT.unpack(os.read(result_read, COUNT.size)) for _ in children]
    done = sum(count for count, _, _ in counts)
    took_s = (max(end for _, _, end in counts) - min(begin for _, begin, _ in counts)) / 1e9
    for pid in (*children, server):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(json.dumps({"per_s": done / took_s}))


def fork(run: Callable[[], None]) -> int:
    """Run a function in a child that exits with this process."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            run()
        finally:
            os._exit(1)
    return pid


def serve(peer: str, port_write: int) -> None:
    """Serve until killed."""
    if peer == "torchrun":
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    else:
        from holdfast.rendezvous.worker_store import WorkerStore

        port = WorkerStore().open(0)
    os.write(port_write, struct.pack("<i", port))
    signal.pause()


def load(port: int, name: int, seconds: float, go_read: int, result_write: int) -> None:
    """Do operations for that long, then send their number."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    key = f"key{name}"
    store.set(key, VALUE)
    os.write(result_write, b"r")
    os.read(go_read, 1)
    begin = time.monotonic_ns()
    end = begin + int(seconds * 1e9)
    count = 0
    while (now := time.monotonic_ns()) < end:
        store.set(key, VALUE)
        store.get(key)
        store.add("count", 1)
        count += 3
    os.write(result_write, COUNT.pack(count, begin, now))


main()
