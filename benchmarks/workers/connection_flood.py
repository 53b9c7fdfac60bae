"""Clients that flood a coordinator with connections, and an honest agent that joins.

    connection_flood.py {silent,byte,hello} CONNECTIONS ROUNDS [DESCRIPTORS [BACKLOG]]

The strangers connect from 127.0.0.2 and hold CONNECTIONS connections; when one is closed, they open another
immediately. They send nothing, one byte, or the first message of the handshake. The coordinator has a
token, DESCRIPTORS descriptors and its own process. Prints one line of JSON: how long the honest agent took
each time (null: it gave up), and how many connections per second the strangers opened.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time

from holdfast.coordinator.connect import CoordinatorConnector
from holdfast.coordinator.connections import ConnectFailed
from holdfast.coordinator.server import CoordinatorServer
from holdfast.net import listening
from holdfast.net.addresses import Address
from holdfast.wire.handshake import ClientHandshake

TOKEN = b"known to the honest alone"
ATTACKERS = "127.0.0.2"
OPENED_AT_ONCE = 64
BUILD_UP_S = 2.0  # The time until the flood has its full size.
PAUSE_S = 0.5
NO_WAIT = struct.pack("ii", 1, 0)  # For SO_LINGER: the ports are free at once.
COUNT = struct.Struct("<q")
PR_SET_PDEATHSIG = 1  # No process outlives this one.


def attack(port: int, kind: str, wanted: int, counter: int) -> None:
    """Hold connections until this process is killed; send the number of opened ones."""
    first = {"silent": b"", "byte": b"\0", "hello": ClientHandshake(None).start()}[kind]
    poll = select.epoll()
    held: dict[int, socket.socket] = {}
    opened = 0
    while True:
        for _ in range(min(OPENED_AT_ONCE, wanted - len(held))):
            one = socket.socket()
            one.setblocking(False)  # noqa: FBT003 (the name says it)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_WAIT)
            one.bind((ATTACKERS, 0))
            one.connect_ex(("127.0.0.1", port))
            held[one.fileno()] = one
            poll.register(one, select.EPOLLOUT)
            opened += 1
        for fd, events in poll.poll(0 if len(held) < wanted else 0.1):
            if events == select.EPOLLOUT:
                poll.modify(fd, select.EPOLLRDHUP)
                if first:
                    held[fd].send(first)
            else:
                held.pop(fd).close()
        os.pwrite(counter, COUNT.pack(opened), 0)


def serve(listener: socket.socket, descriptors: int) -> None:
    async def forever() -> None:
        server = CoordinatorServer(
            listener, silence_s=5.0, grace_s=0.2, token=TOKEN, warn=lambda _: None
        )
        await asyncio.Event().wait()
        del server

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(descriptors, hard), hard))
    asyncio.run(forever())


async def join_repeatedly(port: int, rounds: int) -> list[float | None]:
    """Return how long an honest agent took to join, each time."""
    took: list[float | None] = []
    for _ in range(rounds):
        await asyncio.sleep(PAUSE_S)
        began = time.monotonic()
        try:
            connector = CoordinatorConnector("127.0.0.1", port, run_id="flood", token=TOKEN)
            connection = await connector.connect()
        except ConnectFailed as problem:
            sys.stderr.write(f"{problem} ({time.monotonic() - began:.1f} s)\n")
            took.append(None)
        else:
            took.append(time.monotonic() - began)
            connection.close()
            await connection.ended
    return took


def fork(work: object, *args: object) -> int:
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            work(*args)  # type: ignore[operator]
        finally:
            os._exit(1)
    return pid


def main() -> None:
    kind, wanted, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    descriptors = int(sys.argv[4]) if len(sys.argv) > 4 else 1024
    backlog = int(sys.argv[5]) if len(sys.argv) > 5 else listening.BACKLOG
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = listening.listen([Address(socket.AF_INET, ("127.0.0.1", 0))], backlog)
    port = listener.getsockname()[1]
    counter = os.memfd_create("opened")
    children = [fork(serve, listener, descriptors)]
    listener.close()
    if wanted:
        children.append(fork(attack, port, kind, wanted, counter))
    try:
        time.sleep(BUILD_UP_S)
        before, began = os.pread(counter, COUNT.size, 0), time.monotonic()
        took = asyncio.run(join_repeatedly(port, rounds))
        rate = 0.0
        if wanted:
            opened = COUNT.unpack(os.pread(counter, COUNT.size, 0))[0] - COUNT.unpack(before)[0]
            rate = opened / (time.monotonic() - began)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(json.dumps({"in_s": took, "opened_per_s": round(rate)}), flush=True)


if __name__ == "__main__":
    main()
