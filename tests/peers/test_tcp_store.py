"""Our TCP store and torch's: clients of both kinds on torch's servers, and torch's clients on our server.

tests/contract tests every operation of every combination. Our server is a separate process, because some calls of
torch's client hold the interpreter's lock until the response arrives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.elastic._impl import scripts
from holdfast.store import from_env
from holdfast.store.store_errors import DistNetworkError, StoreTimeoutError
from holdfast.store.tcp.store_client import TCPStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.torch

LONG = timedelta(seconds=30)
SHORT = timedelta(milliseconds=50)


@pytest.fixture(scope="module", params=["libuv", "legacy"])
def server(request: pytest.FixtureRequest) -> Any:
    """One of torch's two servers, on a free port."""
    from torch.distributed import TCPStore as Torch

    return Torch("localhost", 0, is_master=True, use_libuv=request.param == "libuv")


@pytest.fixture
def store(server: Any) -> Iterator[TCPStore]:
    with TCPStore("localhost", server.port, timeout=LONG) as store:
        yield store


def theirs(server: Any) -> Any:
    """Return torch's client of the same server."""
    return server.clone()


def all_calls(store: Any, part: str) -> list[Any]:
    """Make every call, each on its own keys, and return all results."""

    def key(name: str) -> str:
        return f"{part}/{name}"

    calls: list[Callable[[], Any]] = [
        lambda: store.check([key("a")]),
        lambda: store.set(key("a"), "é"),
        lambda: store.get(key("a")),
        lambda: store.set(key(""), b"\x00\xff"),
        lambda: store.multi_get([key(""), key("a")]),
        lambda: store.multi_set([key("b"), key("c")], ["", "2"]),
        lambda: store.multi_get([key("c"), key("b"), key("c")]),
        lambda: store.append(key("c"), "0"),
        lambda: (store.add(key("c"), 5), store.add(key("n"), 0), store.add(key("n"), -(2**40))),
        lambda: store.compare_set(key("x"), "", "one"),
        lambda: store.compare_set(key("x"), "two", "three"),
        lambda: store.compare_set(key("x"), "one", "two"),
        lambda: store.compare_set(key("missing"), "some", "one"),
        lambda: store.check([key("a"), key("b"), key("x")]),
        lambda: store.check([key("a"), key("missing")]),
        lambda: store.wait([key("a"), key("b")]),
        lambda: store.wait([key("a")], LONG),
        lambda: (store.delete_key(key("a")), store.delete_key(key("a"))),
        lambda: store.barrier(key("barrier"), 1),
        lambda: store.barrier(key("barrier 2"), 1, LONG),
        lambda: sorted(name.removeprefix(part) for name in store.list_keys() if part in name),
        lambda: store.num_keys() == len(store.list_keys()) + store.check(["init/"]),
        store.has_extended_api,
        lambda: (store.host, store.timeout),
    ]
    return [call() for call in calls]


def test_responses_match_torchs_client(server: Any, store: TCPStore) -> None:
    their_store = theirs(server)
    their_store.set_timeout(LONG)
    assert all_calls(store, "ours") == all_calls(their_store, "their")


def test_only_torchs_newer_server_has_queues(server: Any, store: TCPStore) -> None:
    if server.libuvBackend:
        assert store.queue_len("k") == 0
        return
    with pytest.raises(DistNetworkError, match=r"queue_len of k: "):
        store.queue_len("k")


def test_torchs_server_waits_for_our_clients(port: int) -> None:
    from torch.distributed import TCPStore as Torch

    with ThreadPoolExecutor(1) as pool:
        hosting = pool.submit(
            lambda: Torch("localhost", port, world_size=2, is_master=True, timeout=LONG)
        )
        with TCPStore("localhost", port, 2, timeout=LONG) as store:
            server = hosting.result()
            assert store.add("init/", 0) == 2
            assert store.list_keys() == server.list_keys() == []


SERVING = """
import sys
from torch.distributed import TCPStore
store = TCPStore("localhost", int(sys.argv[1]), is_master=True)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def serving_process(port: int) -> Iterator[subprocess.Popen[str]]:
    """A process with torch's server, which exits when its standard input closes."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVING, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == port
            yield process
        finally:
            process.kill()


def test_client_survives_a_stopped_server(port: int) -> None:
    """torch's client waits forever for a stopped server, and never reconnects to a new one."""
    with serving_process(port) as process:
        store = TCPStore("localhost", port, timeout=LONG)
        store.set("key", "value")
        assert store.add("count", 1) == 1
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # All its threads are stopped.
        store.set_timeout(SHORT)
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("get of key", lambda: store.get("key")),
            ("add of count", lambda: store.add("count", 1)),
            ("wait of key", lambda: store.wait(["key"])),
        ]
        with pytest.raises(StoreTimeoutError, match="get of key: "):
            store.get("key")
        # From here on each client reconnects; on a busy machine there may be no time left to do so.
        in_time = (StoreTimeoutError, DistNetworkError)
        for about, call in calls:
            with pytest.raises(in_time, match=f"{about}: "):
                call()
        with pytest.raises(in_time):
            TCPStore("localhost", port, timeout=SHORT)
        process.send_signal(signal.SIGCONT)
        store.set_timeout(LONG)
        assert store.get("key") == b"value"
        process.kill()
        process.wait()
        with pytest.raises(DistNetworkError, match=r"add of count: "):
            store.add("count", 1)
        store.set_timeout(SHORT)
        with pytest.raises(DistNetworkError, match=r"add of count: "):
            store.add("count", 1)
    store.set_timeout(LONG)
    server = TCPStore("localhost", port, is_master=True, timeout=LONG)
    assert store.add("count", 1) == 1
    store.close()
    server.close()


def test_worker_finds_the_store_of_its_agent(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    server.set("found", "yes")
    with from_env.from_environment(LONG) as store:
        assert store.get("found") == b"yes"


def test_both_kinds_of_create_c10d_store_connect(port: int) -> None:
    from torch.distributed.elastic.utils.distributed import create_c10d_store

    where: dict[str, Any] = {"server_addr": "localhost", "server_port": port, "world_size": 2}
    with ThreadPoolExecutor(1) as pool:
        hosting = pool.submit(lambda: create_c10d_store(is_server=True, timeout=30, **where))
        with scripts.create_c10d_store(is_server=False, timeout=30, **where) as store:
            hosting.result().set("key", "value")
            assert store.get("key") == b"value"


# torch's clients at our server.


SERVER = """\
import socket, sys
from holdfast.store.tcp.embedded import TcpStoreServer
listener = socket.socket(socket.AF_INET6)
listener.bind(("::", 0))
with TcpStoreServer(listener) as server:
    server.start()
    sys.stdout.write(f"{server.port}\\n")
    sys.stdout.flush()
    sys.stdin.read()
"""


class Server:
    """A process that only serves a store."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        assert self._process.stdout
        self.port = int(self._process.stdout.readline())

    def close(self) -> str:
        """Stop it; return its output."""
        return self._process.communicate(timeout=30)[1]


@pytest.fixture
def our_server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def connect(our_server: Server) -> Callable[..., Any]:
    from torch.distributed import TCPStore

    def connected(**options: Any) -> Any:
        return TCPStore("127.0.0.1", our_server.port, timeout=LONG, **options)

    return connected


def test_clients_of_a_world_are_counted(connect: Callable[..., Any]) -> None:
    stores = [connect(world_size=3, is_master=False) for _ in range(3)]
    assert stores[0].num_keys() == 1
    assert stores[0].list_keys() == []  # The counter has no `/` before it.


WORKER = """\
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
dist.barrier()
dist.destroy_process_group()
sys.stdout.write(f"{total.item()}")
"""


def test_process_group_uses_our_server(our_server: Server) -> None:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(our_server.port),
        "WORLD_SIZE": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    assert [worker.communicate()[0] for worker in workers] == ["6", "6", "6"]
