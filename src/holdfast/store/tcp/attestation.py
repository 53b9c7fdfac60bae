"""Proves to the workers' store on another node that this host belongs to the job.

The store identifies another host by its address. If the store's name has several addresses, workers may
use any of them and connect from different addresses of this host, so the agent attests over all of them. If
the store is not ready or is busy, the agent retries: without an attestation the store refuses the workers of
this host.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.net.addresses import check_not_itself
from holdfast.store.tcp.store_connector import StoreConnector, problem_text
from holdfast.wire.store_proof import ATTEST
from holdfast.wire.wire_errors import ProofRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.net.addresses import Address

ATTEST_S = 60.0
"""The limit for all attempts together."""
PAUSE_S = (0.05, 1.0)  # The first and the longest pause between two attempts.
ADDRESSES_MAX = 8
RECEIVE_BYTES = 256
# This host has no route to the address: retrying does not help.
_NO_ROUTE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)


class HostAttestation:
    """Attests this host at the store of one generation, from `start` until success or `cancel`.

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
        pause_s, pause_s_max = PAUSE_S
        while True:
            try:
                self._attest(address, deadline)
            except (OSError, ProofRefused) as error:
                no_route = isinstance(error, OSError) and error.errno in _NO_ROUTE
                if no_route or time.monotonic() + pause_s >= deadline:
                    self._finish(problem_text(error))
                    return
                if self._cancelled.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, pause_s_max)
            else:
                self._finish("")
                return

    def _attest(self, address: Address, deadline: float) -> None:
        proof = self._connector.proof()
        with self._connector.socket_for(address) as connection:
            with self._lock:
                self._connections.add(connection)
            try:
                _limit(connection, deadline)
                connection.connect(address.sockaddr)
                check_not_itself(connection)
                connection.sendall(proof.start())
                while not proof.done:
                    _limit(connection, deadline)
                    data = connection.recv(RECEIVE_BYTES)
                    if not data:
                        raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
                    connection.sendall(proof.receive(data))
            finally:
                with self._lock:
                    self._connections.discard(connection)

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
        if self._cancelled.is_set():
            return
        report = console.debug if self._optional else console.warning
        report(
            f"cannot attest this host to {self._connector.store}: {problem}; the store will refuse this "
            "host's workers"
        )


def _limit(connection: socket.socket, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
