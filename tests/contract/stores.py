"""The stores of the suites, by name, and the known gaps of torch's stores.

The names are in the tests' ids: `memory`, `TCPStore on ours` and so on. A "part" is our `PrefixStore`, a "client" our
`TCPStore`; names in capitals are torch's. All tests of a file share one etcd, which accepts values as large as the
other stores do; each test has its own prefix.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from holdfast.etcd.etcd_settings import EtcdSettings
from holdfast.etcd.etcd_store import EtcdStore
from holdfast.etcd.sync_client import EtcdClient
from holdfast.store import FileStore, MemoryStore, PrefixStore, TCPStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IN_PROCESS = ["memory", "part of memory"]
IN_FOLDER = ["file", "part of file"]
IN_ETCD = ["etcd", "part of etcd"]
SERVED = ["client", "part of client"]
OURS = [*IN_PROCESS, *IN_FOLDER, *IN_ETCD, *SERVED]
CLIENT_ON_TORCHS = "client on TCPStore"
TORCHS = ["HashStore", "FileStore", "PrefixStore", "TCPStore", "TCPStore on ours"]
NEED_TORCH = {CLIENT_ON_TORCHS, *TORCHS}
ALL = [*OURS, CLIENT_ON_TORCHS, *TORCHS]
CALL_S = 60.0  # A large value takes long if many tests run at once.

# The tests that a store of torch does not pass, each with its reason.
GAPS = {
    "queues": {"FileStore": "it reports that they are not implemented"},
    "listed keys": {"FileStore": "its own keys are listed too, without their first letters"},
    "deletion of nothing": {"FileStore": "it reports that a missing key was deleted"},
    "waits ended by add": {"HashStore": "such a wait ends only by its timeout"},
    "extended api": {"FileStore": "it reports that it has no extended API, but has one"},
    "own times": {
        "FileStore": "it checks the clock once a second",
        "PrefixStore": "its barriers have a timeout of their own, which cannot be set",
    },
}


class TorchsClients(NamedTuple):
    """Torch's clients for all tests; their sockets close only when they are finalized."""

    own: Any
    """A client that is also the server; None without torch, and then its tests are skipped."""
    ours: Any
    """A client of our server."""


class Shared(NamedTuple):
    """The servers that the stores of many tests share."""

    torchs: TorchsClients
    etcd_port: int


def over(names: list[str], without: str = "") -> pytest.MarkDecorator:
    """Run a test with the stores of these names, except those with a gap."""
    lacking = GAPS[without] if without else {}
    return pytest.mark.parametrize(
        "store", [param(name) for name in names if name not in lacking], indirect=True
    )


def param(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.torch) if name in NEED_TORCH else name


@contextmanager
def opened(name: str, folder: Path, shared: Shared) -> Iterator[Any]:
    """Create a store without keys, and remove everything afterwards."""
    match name:
        case "memory":
            yield MemoryStore()
        case "file":
            yield FileStore(folder)
        case "etcd":
            where = (("127.0.0.1", shared.etcd_port),)
            client = EtcdClient(EtcdSettings(endpoints=where, call_s=CALL_S))
            with EtcdStore(client, str(folder), closes_client=True) as store:
                yield store
        case "client":
            with TCPStore("127.0.0.1", 0, is_master=True) as store:
                yield store
        case "client on TCPStore":
            with TCPStore("localhost", shared.torchs.own.port) as store:
                yield PrefixStore(str(folder), store)
        case kind if kind in TORCHS:
            yield torchs(name, folder, shared.torchs)
        case _:
            assert name.startswith("part of ")
            with opened(name.removeprefix("part of "), folder, shared) as whole:
                yield PrefixStore("part/of", whole)


def torchs(name: str, folder: Path, clients: TorchsClients) -> Any:
    from torch import distributed

    if name == "HashStore":
        return distributed.HashStore()
    if name == "FileStore":
        return distributed.FileStore(str(folder / "file"))
    if name == "PrefixStore":
        return distributed.PrefixStore(str(folder), clients.own)
    # All tests share them, so each uses its own prefix.
    return PrefixStore(str(folder), clients.own if name == "TCPStore" else clients.ours)
