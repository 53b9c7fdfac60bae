"""This process's entry in the `--ha` list, and the ports of that entry."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import socket
import struct
from itertools import pairwise
from typing import TYPE_CHECKING

from holdfast.errors import EnvironmentProblem
from holdfast.etcd.cluster_list import FLAG
from holdfast.net import addresses, listening
from holdfast.net.async_addresses import resolve_async
from holdfast.net.runtime_dir import BASE_ENV, runtime_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from holdfast.etcd.cluster_list import ClusterList

LOCK = struct.Struct("hhqqi4x")
"""The kernel's `struct flock` on 64-bit machines: type, whence, start, length, process."""
NETWORK = "/proc/self/ns/net"
RESOLVE_S = 10.0
JOB_BYTES = 7  # The start of a lock is a positive number of 64 bits.


class PortLock:
    """Locks the ports of an entry for one job and one process on this machine.

    The ports cannot serve as the lock, because sometimes etcd holds them and sometimes this process. The lock is on a
    file in the user's private folder, so no other user can take it. Machines are told apart by their network. The
    kernel releases the lock when the process exits.

    The locked range of the file begins at a number that identifies the job, and has no end. So the locks of two jobs
    overlap, and the kernel reports where the other job's begins.
    """

    def __init__(self, port: int) -> None:
        """Open the file without locking it."""
        try:
            name = f"ha-{os.stat(NETWORK).st_ino}-{port}.lock"
            self._path = os.path.join(runtime_dir(), name)
            flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW
            self._descriptor = os.open(self._path, flags, 0o600)
        except OSError as problem:
            raise EnvironmentProblem(
                f"{FLAG}: cannot open the lock of port {port}: {problem.filename}: {problem.strerror}",
                hint=f"set {BASE_ENV} to a folder that this user can write to",
            ) from None

    @classmethod
    def take(cls, of: ClusterList, port: int) -> Self | None:
        """Return the lock, or None if another process of the same job has it."""
        digest = hashlib.sha256(f"{of.run_id}\0{of.names}".encode()).digest()
        job = int.from_bytes(digest[:JOB_BYTES])
        wanted = LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, job, 0, 0)
        while True:
            lock = cls(port)
            try:
                fcntl.fcntl(lock._descriptor, fcntl.F_OFD_SETLK, wanted)
                if lock._is_current():
                    return lock
                holder = None  # The previous holder removed the file after it was opened here.
            except BlockingIOError:
                found = fcntl.fcntl(lock._descriptor, fcntl.F_OFD_GETLK, wanted)
                kind, _, start, _, _ = LOCK.unpack(found)
                holder = start if kind != fcntl.F_UNLCK else None
            os.close(lock._descriptor)
            if holder == job:
                return None
            if holder is not None:
                raise _port_in_use("", port)

    def release(self) -> None:
        """Release the lock and remove the file."""
        if self._is_current():
            os.unlink(self._path)
        os.close(self._descriptor)

    def _is_current(self) -> bool:
        """Whether the open file still has its name."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False


class OwnEntry:
    """This process's entry in the list. It holds the entry's ports until `release`."""

    def __init__(
        self, of: ClusterList, index: int, lock: PortLock, held: list[socket.socket]
    ) -> None:
        self.name = of.names[index]
        self.host, self.port = of.machines[index]
        self._lock, self._held = lock, held
        loopback = addresses.names_loopback(self.host)
        self.bind_host = self._address() if loopback else "::"
        if not loopback and held[-1].family == socket.AF_INET:
            self.bind_host = "0.0.0.0"  # noqa: S104 (other machines must reach it)

    def listener(self) -> socket.socket:
        """Return a socket that listens on the client port; this object keeps holding the port."""
        return listening.listen(listening.candidates_of(self.host, self.port))

    def release(self) -> None:
        """Release the ports; a second call does nothing."""
        if not self._held:
            return
        while self._held:
            self._held.pop().close()
        self._lock.release()

    def _address(self) -> str:
        return str(self._held[-1].getsockname()[0])


def own_entries(machines: Sequence[tuple[str, int]]) -> Iterator[int]:
    """Yield which entries of the list belong to this machine; each may take a name server's time."""
    for index, (host, port) in enumerate(machines):
        try:
            found = addresses.resolve(host, port)
        except OSError:
            continue  # The name of another machine that cannot be resolved yet.
        if found and all(listening.is_local(one) for one in found):
            yield index


def claim_entry(of: ClusterList) -> OwnEntry | None:
    """Return the entry of the list whose member this process runs; None if it runs no member.

    An entry belongs to this machine if its addresses do. If several agents of the job run on this machine,
    the first one gets the entry. Raises `EnvironmentProblem` if another program uses its ports.
    """
    for index in own_entries(of.machines):
        host, port = of.machines[index]
        lock = PortLock.take(of, port)
        if lock is None:
            continue
        held: list[socket.socket] = []
        try:
            for one in (port + 1, port):
                held.append(listening.bind(listening.candidates_of(host, one)))
        except OSError as problem:
            for bound in held:
                bound.close()
            lock.release()
            raise _refusal(host, one, problem) from None
        return OwnEntry(of, index, lock, held)
    return None


async def shared_machine(of: ClusterList, own: str) -> str:
    """Return a warning if this machine, whose entry is `own`, has other entries, too; empty if it has none."""
    found = await asyncio.gather(*(_is_here(*one) for one in of.machines))
    here = [name for name, is_here in zip(of.names, found, strict=True) if is_here]
    if len(here) < 2:
        return ""
    ports = sorted(port for (_, port), is_here in zip(of.machines, found, strict=True) if is_here)
    once = ",".join(name for name in of.names if name == own or name not in here)
    which = f"{FLAG}: {', '.join(here[:-1])} and {here[-1]} are the same machine"
    if any(after - port < 2 for port, after in pairwise(ports)):
        return f"{which} and need the same ports; list each machine once: {FLAG} {once}"
    return (
        f"{which}, and each agent runs one member; start {len(here)} agents on it, or list it once: "
        f"{FLAG} {once}"
    )


async def _is_here(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await resolve_async(host, port)
    except OSError:  # Or no name server responds.
        return False
    return bool(found) and all(listening.is_local(one) for one in found)


def _refusal(host: str, port: int, problem: OSError) -> EnvironmentProblem:
    if problem.errno == errno.EADDRINUSE:
        return _port_in_use(f" of {host}", port)
    return EnvironmentProblem(f"{FLAG}: cannot use port {port} of {host}: {problem.strerror}")


def _port_in_use(of_host: str, port: int) -> EnvironmentProblem:
    owner = listening.owner_of(port)
    by = f" by {owner}" if owner else ", perhaps by another job"
    return EnvironmentProblem(
        f"{FLAG}: port {port}{of_host} is in use{by}",
        hint=f"choose other ports, the same on all machines: {FLAG} HOST:PORT,...; each machine "
        "uses PORT and the next",
    )
