"""A worker of a job in which one worker fails, and the others fail because of it within milliseconds.

`BENCH_FIRST` is the rank that fails first, `BENCH_HOW` how it fails, and `BENCH_NOTICE` how the
others react: an exception of the connection, an exception of their own, or a silent exit.
`BENCH_LINK` is the connection: sockets between all workers, or PyTorch's Gloo.
"""

import os
import random
import select
import socket
import sys
import time

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder, first = os.environ["BENCH_FOLDER"], int(os.environ["BENCH_FIRST"])
how, notice = os.environ["BENCH_HOW"], os.environ["BENCH_NOTICE"]
CONNECT_S_MAX = 60.0


def fail() -> None:
    time.sleep(random.uniform(0.0, 0.03))
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), 9)
    raise ValueError("the sample has another shape than expected")


def give_up(error: Exception) -> None:
    if notice == "quiet":
        sys.exit(1)
    if notice == "words":
        raise RuntimeError("this step is incomplete: not all have contributed")
    raise error


def by_sockets() -> None:
    peers = connect_all()
    if rank == first:
        try:
            fail()
        finally:
            if how == "unwind":
                for peer in peers:
                    peer.close()
    ready, _, _ = select.select(peers, [], [])
    try:
        if rank % 2:
            while True:
                ready[0].sendall(b"gradient")
        if not ready[0].recv(1):
            raise ConnectionError("a peer closed the connection")
    except OSError as error:
        give_up(error)


def connect_all() -> list[socket.socket]:
    """Return a connection to each other worker."""
    peers: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=size) as server:
        place = os.path.join(folder, str(rank))
        with open(f"{place}.new", "w") as file:
            file.write(str(server.getsockname()[1]))
        os.rename(f"{place}.new", place)
        peers += [socket.create_connection(("127.0.0.1", port_of(other))) for other in range(rank)]
        peers += [server.accept()[0] for _ in range(size - 1 - rank)]
    return peers


def port_of(other: int) -> int:
    deadline = time.monotonic() + CONNECT_S_MAX
    while time.monotonic() < deadline:
        try:
            with open(os.path.join(folder, str(other))) as file:
                return int(file.read())
        except FileNotFoundError:
            time.sleep(0.005)
    raise TimeoutError(f"rank {other} did not connect")


def by_gloo() -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    tensor = torch.ones(1000)
    for step in range(1_000_000):
        if rank == first and step == 3:
            try:
                fail()
            finally:
                if how == "unwind":
                    distributed.destroy_process_group()
        try:
            distributed.all_reduce(tensor)
        except RuntimeError as error:
            give_up(error)


main = by_gloo if os.environ["BENCH_LINK"] == "gloo" else by_sockets
if os.environ["BENCH_RECORD"] == "1":
    from holdfast.processes.failures.error_file import record

    main = record(main)
main()
