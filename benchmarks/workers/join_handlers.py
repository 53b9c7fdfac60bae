"""Many rendezvous handlers that join one round at the same moment; prints the duration.

    join_handlers.py {torchrun,holdfast} HANDLERS PROCESSES LIMIT_S

The handlers are threads of a few processes; the server has its own process. All settings are the
defaults; `HOLDFAST_TOKEN` may be set. The clock runs from the first call of `next_rendezvous` to the
last return. Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

TIMES = struct.Struct(
    "<qqq"
)  # The world size (0: failed), the times of the call and of its return.
READY = b"r"
PR_SET_PDEATHSIG = 1  # A child does not outlive this process.


def main() -> None:
    peer, handlers, processes, limit_s = sys.argv[1], *map(int, sys.argv[2:5])
    serve, make = {"torchrun": of_torch, "holdfast": of_holdfast}[peer]()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    share = [handlers // processes + (one < handlers % processes) for one in range(processes)]
    # Each child gets two pipes: one for commands, one for results.
    children = [Child(make, port, handlers, count) for count in share]
    server = serve(port)
    for child in children:
        os.write(child.commands, b"c")
    if not all(child.is_ready(limit_s) for child in children):
        sys.exit("could not create all handlers")
    began = time.monotonic()
    for child in children:
        os.write(child.commands, b"g")
    lines = [line for child in children for line in child.take_results(began + limit_s)]
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    done = [line for line in lines if line[0] == handlers]
    took_s = (max(line[2] for line in lines) - min(line[1] for line in lines)) / 1e9 if lines else 0
    whole = len(done) == handlers
    print(json.dumps({"done": len(done), "of": handlers, "took_s": took_s if whole else None}))
    sys.stdout.flush()
    del server
    os._exit(0)


class Child:
    """A process with some of the handlers."""

    def __init__(self, make: Callable[[int, int], Any], port: int, whole: int, count: int) -> None:
        self.count = count
        commands_read, self.commands = os.pipe()
        self.results, results_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            try:
                os.read(commands_read, 1)
                run_handlers(
                    [make(port, whole) for _ in range(count)], commands_read, results_write
                )
            except BaseException:  # noqa: BLE001 (the error is printed, and this process exits)
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(commands_read)
        os.close(results_write)

    def is_ready(self, limit_s: float) -> bool:
        return bool(select.select([self.results], [], [], limit_s)[0]) and self._read(1) == READY

    def take_results(self, deadline: float) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        while len(found) < self.count:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self.results], [], [], left_s)[0]:
                break
            if not (line := self._read(TIMES.size)):
                break
            found.append(TIMES.unpack(line))
        return found

    def _read(self, size: int) -> bytes:
        return os.read(self.results, size)


def run_handlers(handlers: list[Any], commands: int, results: int) -> None:
    """Let all handlers join on command; wait until this process is killed."""

    def join(handler: Any) -> None:
        called = time.monotonic_ns()
        size = 0
        try:
            size = handler.next_rendezvous().world_size
        except Exception as problem:  # noqa: BLE001 (any failure counts)
            sys.stderr.write(f"{problem!r}\n")
        # A write of this size to a pipe is atomic.
        os.write(results, TIMES.pack(size, called, time.monotonic_ns()))

    os.write(results, READY)
    os.read(commands, 1)
    for handler in handlers:
        threading.Thread(target=join, args=(handler,), daemon=True).start()
    signal.pause()


def of_torch() -> tuple[Callable[[int], Any], Callable[[int, int], Any]]:
    """Return factories of torch's store and handlers."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    def serve(port: int) -> Any:
        return TCPStore("127.0.0.1", port, is_master=True, multi_tenant=True)

    def make(port: int, whole: int) -> Any:
        return get_rendezvous_handler(
            RendezvousParameters(
                "c10d", f"127.0.0.1:{port}", "handlers", whole, whole, "127.0.0.1", is_host=False
            )
        )

    return serve, make


def of_holdfast() -> tuple[Callable[[int], Any], Callable[[int, int], Any]]:
    """Return factories of Holdfast's coordinator and handlers."""
    import asyncio

    from holdfast.coordinator.server import CoordinatorServer
    from holdfast.net.listening import try_bind
    from holdfast.net.token import load_token
    from holdfast.rendezvous.handler_registry import get_rendezvous_handler
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters

    async def forever(listener: socket.socket) -> None:
        token = load_token(os.environ)  # The handlers have it too.
        server = CoordinatorServer(listener, silence_s=5.0, grace_s=0.2, token=token)
        await asyncio.Event().wait()
        del server

    def serve(port: int) -> Any:
        listener = try_bind("127.0.0.1", port, is_host=True)
        assert listener is not None
        thread = threading.Thread(target=lambda: asyncio.run(forever(listener)), daemon=True)
        thread.start()
        return thread

    def make(port: int, whole: int) -> Any:
        return get_rendezvous_handler(
            RendezvousParameters(
                "c10d", f"127.0.0.1:{port}", "handlers", whole, whole, "127.0.0.1", is_host=False
            )
        )

    return serve, make


if __name__ == "__main__":
    main()
