"""Proves to the workers' store on another node that this host belongs to the job, and whose its connections are.

The store identifies another host by its address. If the store's name has several addresses, workers may
use any of them and connect from different addresses of this host, so the agent attests over all of them. If
the store is not ready or is busy, the agent retries: without an attestation the store refuses the workers of
this host.

Other users of this host can connect to the store too. So the connection stays open, and for each new connection from
this host the store asks the agent who owns it. The agent asks the kernel.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.net.addresses import as_ipv4_if_mapped, check_not_itself, keep_alive
from holdfast.net.listening import raise_descriptor_limit
from holdfast.net.peer_user import NO_OWNER, NOT_REPORTED, UNKNOWN, is_local_user, owner_at
from holdfast.store.tcp.store_connector import StoreConnector, problem_text
from holdfast.wire import store_proof
from holdfast.wire.store_proof import ATTEST, OwnerAnswer, OwnerAnswers
from holdfast.wire.wire_errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from holdfast.net.addresses import Address
    from holdfast.wire.store_proof import OwnerQuery

ATTEST_S = 60.0
"""The limit for all attempts together; after a success, for each attempt to connect again."""
PAUSE_S = (0.05, 1.0)  # The first and the longest pause between two attempts.
ADDRESSES_MAX = 8
RECEIVE_BYTES = 16 * 1024
# This host has no route to the address: retrying does not help.
_NO_ROUTE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)


class HostAttestation:
    """Attests this host at the store of one generation, and answers its queries, from `start` until `cancel`.

    It logs a failure once, as a warning; with `optional`, for a store that serves every host, as a debug message.
    """

    def __init__(
        self, host: str, port: int, key: bytes, generation: int, *, optional: bool = False
    ) -> None:
        self._connector = StoreConnector(host, port, key, generation, ATTEST)
        self._optional = optional
        self._cancelled = threading.Event()
        self._lock = threading.Lock()  # Guards everything below.
        self._connections: set[socket.socket] = set()
        self._left = 0  # Addresses that are being tried.
        self._problems: list[str] = []
        self._succeeded = False
        self._reported = False

    def start(self) -> None:
        """Begin, in a daemon thread."""
        self._spawn(self._begin)

    def cancel(self) -> None:
        """Stop, and report nothing."""
        self._cancelled.set()
        with self._lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # It is not connected, or no longer.

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, name="holdfast-attestation", daemon=True).start()

    def _begin(self) -> None:
        deadline = time.monotonic() + ATTEST_S
        try:
            addresses = self._connector.resolve(ATTEST_S)[:ADDRESSES_MAX]
        except OSError as error:
            self._report(problem_text(error))
            return
        self._left = len(addresses)
        for address in addresses[1:]:
            self._spawn(self._retry_at, address, deadline)
        self._retry_at(addresses[0], deadline)

    def _retry_at(self, address: Address, deadline: float) -> None:
        """Attest over one address. If that succeeds, do so again whenever the connection breaks."""
        pause_s, pause_s_max = PAUSE_S
        has_attested = False
        while not self._cancelled.is_set():
            try:
                with self._connector.socket_for(address) as connection, self._listed(connection):
                    answers = self._attest(connection, address, deadline)
                    if not has_attested:
                        self._finish("")
                    has_attested, pause_s = True, pause_s_max
                    self._answer(connection, answers)
            except (OSError, WireError) as error:
                no_route = isinstance(error, OSError) and error.errno in _NO_ROUTE
                if has_attested:
                    deadline = time.monotonic() + pause_s + ATTEST_S
                elif no_route or time.monotonic() + pause_s >= deadline:
                    self._finish(problem_text(error))
                    return
            if self._cancelled.wait(pause_s):
                return
            pause_s = min(2 * pause_s, pause_s_max)

    @contextmanager
    def _listed(self, connection: socket.socket) -> Iterator[None]:
        """Let `cancel` shut a connection down."""
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _attest(self, connection: socket.socket, address: Address, deadline: float) -> OwnerAnswers:
        proof = self._connector.proof()
        _limit(connection, deadline)
        connection.connect(address.sockaddr)
        check_not_itself(connection)
        if self._cancelled.is_set():  # `cancel` may not have found it connected.
            raise OSError(errno.ECANCELED, "cancelled")
        keep_alive(connection)
        connection.sendall(proof.start())
        while not proof.done:
            _limit(connection, deadline)
            connection.sendall(proof.receive(_receive(connection)))
        return OwnerAnswers(proof.stream())

    def _answer(self, connection: socket.socket, answers: OwnerAnswers) -> None:
        """Answer the store's queries until the connection breaks."""
        family, remote = connection.family, connection.getpeername()
        if _owner_at(family, connection.getsockname(), remote) != os.geteuid():
            self._report(NOT_REPORTED)
        connection.settimeout(None)
        connection.sendall(answers.start())
        while True:
            for query in answers.receive(_receive(connection)):
                connection.sendall(answers.answer(_whose(query, remote)))

    def _finish(self, problem: str) -> None:
        """Record the outcome of one address; if it is the last and all failed, report the failure."""
        with self._lock:
            self._left -= 1
            self._succeeded = self._succeeded or not problem
            self._problems += [problem] if problem else []
            failed = self._left == 0 and not self._succeeded
        if failed:
            self._report(self._problems[0])

    def _report(self, problem: str) -> None:
        if self._cancelled.is_set() or self._reported:
            return
        self._reported = True
        report = console.debug if self._optional else console.warning
        report(
            f"cannot attest this host to {self._connector.store}: {problem}; the store will refuse this "
            "host's workers (--rdzv-conf store=open serves every host)"
        )


def _limit(connection: socket.socket, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(RECEIVE_BYTES)
    if not data:
        raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
    return data


def _whose(query: OwnerQuery, store: tuple[Any, ...]) -> OwnerAnswer:
    """Return whose a connection from this host to the store is."""
    family = socket.AF_INET if len(query.host) == 4 else socket.AF_INET6
    try:
        here = socket.inet_ntop(family, query.host)
        user = _owner_at(family, (here, query.port), (as_ipv4_if_mapped(store[0]), store[1]))
    except OSError:  # The addresses are of different families.
        user = NO_OWNER
    if is_local_user(user):
        return OwnerAnswer(query.number, store_proof.OWN)
    if user == NO_OWNER:
        return OwnerAnswer(query.number, store_proof.NOT_FOUND)
    if user == UNKNOWN:
        return OwnerAnswer(query.number, store_proof.NOT_REPORTED)
    return OwnerAnswer(query.number, store_proof.OTHER, user)


def _owner_at(family: int, local: tuple[Any, ...], remote: tuple[Any, ...]) -> int:
    user = owner_at(family, local, remote)
    if user == UNKNOWN and raise_descriptor_limit():  # No descriptor may have been free.
        user = owner_at(family, local, remote)
    return user
