"""PyTorch's own TCPStore clients at our server: every call they have, and a process group.

The server is a process of its own: some calls of the client, `list_keys` and `queue_len`, keep the
interpreter's lock until they are answered.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.torch

LONG = timedelta(seconds=30)
SHORT = timedelta(milliseconds=50)


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
    """A process that does nothing but serve."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        assert self._process.stdout
        self.port = int(self._process.stdout.readline())

    def close(self) -> str:
        """End it; return what it said."""
        return self._process.communicate(timeout=30)[1]


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def connect(server: Server) -> Callable[..., Any]:
    from torch.distributed import TCPStore

    def connected(**options: Any) -> Any:
        return TCPStore("127.0.0.1", server.port, timeout=LONG, **options)

    return connected


class Aside:
    """A call in a thread of its own, because it blocks."""

    def __init__(self, call: Callable[..., object], *args: object) -> None:
        self.outcome: object = None
        self._call, self._args = call, args
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def result(self) -> object:
        self._thread.join()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def _run(self) -> None:
        try:
            self.outcome = self._call(*self._args)
        except BaseException as error:
            self.outcome = error


def test_values(connect: Callable[..., Any]) -> None:
    ours, other = connect(), connect()
    ours.set("a", "one")
    assert other.get("a") == b"one"
    assert ours.add("count", 5) == 5
    assert other.add("count", -7) == -2
    assert other.get("count") == b"-2"
    ours.append("a", ", two")
    assert other.get("a") == b"one, two"
    assert ours.check(["a", "count"])
    assert not ours.check(["a", "b"])
    assert ours.num_keys() == 2
    assert sorted(ours.list_keys()) == ["a", "count"]
    assert ours.delete_key("a")
    assert not ours.delete_key("a")
    assert ours.num_keys() == 1
    large = os.urandom(8 * 1024 * 1024)
    ours.set("large", large)
    assert other.get("large") == large


def test_many_keys_at_once(connect: Callable[..., Any]) -> None:
    ours, other = connect(), connect()
    keys = [f"key {number}" for number in range(10_000)]
    ours.multi_set(keys, [f"value of {key}" for key in keys])
    assert other.multi_get(keys) == [f"value of {key}".encode() for key in keys]
    assert other.check(keys)
    other.wait(keys)
    assert sorted(other.list_keys()) == sorted(keys)


@pytest.mark.parametrize(
    ("before", "expected", "returned", "after"),
    [
        (None, "", b"new", b"new"),
        (None, "old", b"old", None),
        ("old", "old", b"new", b"new"),
        ("old", "other", b"old", b"old"),
    ],
)
def test_compare_set(
    before: str | None,
    expected: str,
    returned: bytes,
    after: bytes | None,
    connect: Callable[..., Any],
) -> None:
    store = connect()
    if before is not None:
        store.set("key", before)
    assert store.compare_set("key", expected, "new") == returned
    assert store.check(["key"]) == (after is not None)
    if after is not None:
        assert store.get("key") == after


def test_waiting(connect: Callable[..., Any]) -> None:
    waiting, setting = connect(), connect()
    got = Aside(waiting.get, "later")
    setting.set("later", "here")
    assert got.result() == b"here"
    both = Aside(waiting.multi_get, ["x", "y"])
    setting.set("y", "2")
    setting.set("x", "1")
    assert both.result() == [b"1", b"2"]


def test_a_wait_that_takes_too_long_leaves_the_connection_in_order(
    connect: Callable[..., Any],
) -> None:
    from torch.distributed import DistStoreError

    waiting, setting = connect(), connect()
    with pytest.raises(DistStoreError):
        waiting.wait(["never", "nor this"], SHORT)
    setting.set("never", "now")
    setting.set("nor this", "now")
    assert waiting.multi_get(["never", "nor this"]) == [b"now", b"now"]


def test_a_failed_exchange_wakes_nobody(connect: Callable[..., Any]) -> None:
    waiting, other = connect(), connect()
    got = Aside(waiting.get, "key")
    assert other.compare_set("key", "something", "new") == b"something"
    other.set("key", "value")
    assert got.result() == b"value"


def test_queues(connect: Callable[..., Any]) -> None:
    from torch.distributed import QueueEmptyError

    ours, other = connect(), connect()
    assert ours.queue_len("queue") == 0
    with pytest.raises(QueueEmptyError):
        ours.queue_pop("queue", block=False)
    for value in ("a", "b", ""):
        ours.queue_push("queue", value)
    assert ours.queue_len("queue") == 3
    assert other.check(["queue"])
    assert ours.num_keys() == 0
    assert [other.queue_pop("queue") for _ in range(3)] == [b"a", b"b", b""]
    assert not other.check(["queue"])
    waiting = Aside(other.queue_pop, "queue")
    ours.queue_push("queue", "late")
    assert waiting.result() == b"late"


def test_nobody_who_pops_and_waits_finds_nothing(connect: Callable[..., Any]) -> None:
    """With PyTorch's server, another client may be quicker, and a blocking pop raises."""
    items, takers = 300, 3
    pushing = connect()
    taken: list[bytes] = []

    def take(store: Any) -> None:
        taken.extend(store.queue_pop("queue") for _ in range(items // takers))

    aside = [Aside(take, connect()) for _ in range(takers)]
    for number in range(items):
        pushing.queue_push("queue", str(number))
    for one in aside:
        one.result()
    assert sorted(map(int, taken)) == list(range(items))


def test_a_barrier_can_be_used_again(connect: Callable[..., Any]) -> None:
    from torch.distributed import DistStoreError

    stores = [connect() for _ in range(3)]
    for _ in range(3):
        aside = [Aside(store.barrier, "all", 3, LONG) for store in stores[1:]]
        stores[0].barrier("all", 3, LONG)
        for one in aside:
            one.result()
        assert stores[0].get("all") == b"3"
    with pytest.raises(DistStoreError):  # One that gave up is not counted.
        stores[0].barrier("all", 3, SHORT)
    with pytest.raises(DistStoreError):
        stores[0].barrier("all", 3, SHORT)
    stores[0].barrier("alone", 1, LONG)


def test_a_clone_and_prefixes(connect: Callable[..., Any]) -> None:
    from torch.distributed import PrefixStore

    store = connect()
    store.clone().set("a", "1")
    assert store.get("a") == b"1"
    inner = PrefixStore("in", PrefixStore("out", store))
    inner.set("b", "2")
    assert store.get("out/in/b") == b"2"
    assert inner.list_keys() == ["b"]
    aside = Aside(PrefixStore("p", connect()).barrier, "all", 2, LONG)
    PrefixStore("p", store).barrier("all", 2, LONG)
    aside.result()


def test_the_clients_of_a_world_are_counted(connect: Callable[..., Any]) -> None:
    stores = [connect(world_size=3, is_master=False) for _ in range(3)]
    assert stores[0].num_keys() == 1
    assert stores[0].list_keys() == []  # The counter has no `/` before it.


def test_a_client_that_breaks_the_rules_is_the_only_one_to_lose_its_connection(
    connect: Callable[..., Any], server: Server
) -> None:
    from torch.distributed import DistNetworkError

    bad, good = connect(), connect()
    good.set("word", "no number")
    with pytest.raises(DistNetworkError):
        bad.add("word", 1)
    assert good.get("word") == b"no number"
    with pytest.raises(DistNetworkError):
        connect().get("k" * 9000)
    assert good.get("word") == b"no number"
    told = server.close()
    assert told.count("disconnected") == 2
    assert "9001" in told


def test_closing_ends_those_who_wait(connect: Callable[..., Any], server: Server) -> None:
    from torch.distributed import DistNetworkError

    waiting = Aside(connect().get, "never")
    assert server.close() == ""
    with pytest.raises(DistNetworkError):
        waiting.result()


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


def test_a_process_group(server: Server) -> None:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
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
