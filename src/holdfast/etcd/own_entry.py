"""This process's entry in the `--ha` list, and the ports of that entry."""

from __future__ import annotations

import errno
import hashlib
import socket
from typing import TYPE_CHECKING

from holdfast.errors import EnvironmentProblem
from holdfast.etcd.cluster_list import FLAG
from holdfast.net import addresses, listening

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.etcd.cluster_list import ClusterList


class OwnEntry:
    """This process's entry in the list. It holds the entry's ports until `release`."""

    def __init__(self, of: ClusterList, index: int, held: list[socket.socket]) -> None:
        self.name = of.names[index]
        self.host, self.port = of.machines[index]
        self._held = held
        loopback = addresses.names_loopback(self.host)
        self.bind_host = self._address() if loopback else "::"
        if not loopback and held[-1].family == socket.AF_INET:
            self.bind_host = "0.0.0.0"  # noqa: S104 (other machines must reach it)

    def listener(self) -> socket.socket:
        """Return a socket that listens on the client port; this object keeps holding the port."""
        return listening.listen(listening.candidates_of(self.host, self.port))

    def release(self) -> None:
        """Release the ports."""
        while self._held:
            self._held.pop().close()

    def _address(self) -> str:
        return str(self._held[-1].getsockname()[0])


def own_entries(machines: Sequence[tuple[str, int]]) -> list[int]:
    """Return which entries of the list belong to this machine."""
    own = []
    for index, (host, port) in enumerate(machines):
        try:
            found = addresses.resolve(host, port)
        except OSError:
            continue  # The name of another machine that cannot be resolved yet.
        if found and all(listening.is_local(one) for one in found):
            own.append(index)
    return own


def claim_entry(of: ClusterList) -> OwnEntry | None:
    """Return the entry of the list whose member this process runs; None if it runs no member.

    An entry belongs to this machine if its addresses do. If several agents of the job run on this machine,
    the first one gets the entry. Raises `EnvironmentProblem` if another program uses its ports.
    """
    for index in own_entries(of.machines):
        host, port = of.machines[index]
        held = _lock(of, port)
        if held is None:
            continue
        try:
            for one in (port + 1, port):
                held.append(listening.bind(listening.candidates_of(host, one)))
        except OSError as problem:
            for lock in held:
                lock.close()
            raise _refusal(host, one, problem) from None
        return OwnEntry(of, index, held)
    return None


def _lock(of: ClusterList, port: int) -> list[socket.socket] | None:
    """Lock a port for this job; return None if another process of the same job has the lock.

    The port cannot serve as the lock, because sometimes etcd holds it and sometimes this process.
    """
    job = hashlib.sha256(f"{of.run_id}\0{of.names}".encode()).hexdigest()[:32]
    held: list[socket.socket] = []
    for name in (f"\0holdfast-ha/{port}/{job}", f"\0holdfast-ha/{port}"):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        held.append(lock)
        try:
            lock.bind(name)
        except OSError as problem:
            for one in held:
                one.close()
            if problem.errno != errno.EADDRINUSE:
                raise
            if len(held) == 1:
                return None
            raise _refusal("", port, problem) from None
    return held


def _refusal(host: str, port: int, problem: OSError) -> EnvironmentProblem:
    where = f"port {port}" + (f" of {host}" if host else "")
    if problem.errno != errno.EADDRINUSE:
        return EnvironmentProblem(f"{FLAG}: cannot use {where}: {problem.strerror}")
    owner = listening.owner_of(port)
    by = f" by {owner}" if owner else ", perhaps by another job"
    return EnvironmentProblem(
        f"{FLAG}: {where} is in use{by}",
        hint=f"choose other ports, the same on all machines: {FLAG} HOST:PORT,...; each machine "
        "uses PORT and the next",
    )
