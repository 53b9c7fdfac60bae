"""The stores and servers of the suites in this folder."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from stores import ALL, Shared, TorchsClients, opened, param

from real_etcd import running_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


SERVE = """
import sys
from holdfast.store import TCPStore

with TCPStore("127.0.0.1", 0, is_master=True) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""


@contextmanager
def server_process() -> Iterator[int]:
    """Serve our store from a separate process, and yield its port.

    Some calls of torch's client hold the interpreter's lock while they wait.
    """
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
    assert server.returncode == 0


@pytest.fixture(scope="session")
def torchs_clients() -> Iterator[TorchsClients]:
    """Torch's clients of its own server and of ours."""
    if find_spec("torch") is None:
        yield TorchsClients(None, None)
        return
    from torch import distributed

    own = distributed.TCPStore("localhost", 0, is_master=True)
    with server_process() as port:
        yield TorchsClients(own, distributed.TCPStore("127.0.0.1", port))


@pytest.fixture(scope="session")
def tcp_store(torchs_clients: TorchsClients) -> Any:
    """Torch's store with its own server, None without torch."""
    return torchs_clients.own


@pytest.fixture(scope="module")
def etcd_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of an etcd that accepts requests above 1.5 MiB."""
    with running_etcd(tmp_path_factory.mktemp("etcd"), f"--max-request-bytes={1 << 24}") as etcd:
        yield etcd.port


@pytest.fixture(params=[param(name) for name in ALL])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, torchs_clients: TorchsClients, etcd_port: int
) -> Iterator[Any]:
    """A store of each kind; `over` reduces the kinds for a test."""
    with opened(request.param, tmp_path, Shared(torchs_clients, etcd_port)) as made:
        yield made
