"""An agent's word for its host, given to the workers' store of another node, beside all else it does.

The store knows another host by the address it comes from. Where its name has several addresses,
workers may use any of them and so come from another address of this host: all are tried. A store
that is not there yet, or is busy, is tried again for a while: without it the workers of this host
wait in vain.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.net.addresses import check_not_itself, resolve_within
from holdfast.net.endpoints import format_endpoint
from holdfast.wire.errors import ProofRefused

if TYPE_CHECKING:
    from holdfast.net.addresses import Address

VOUCH_S = 60.0
"""How long it is tried in all."""
PAUSE_S = (0.05, 1.0)  # Between two attempts, at first and at most.
ADDRESSES_MAX = 8
RECEIVE_BYTES = 256
# There is no way from here: trying again does not help.
_NO_WAY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)


class Vouching:
    """Vouches for this host at the store of one generation, from `start` on until `cancel`.

    Says in one line if that fails, unless it is `optional`: a store that is open to all.
    """

    def __init__(
        self, host: str, port: int, key: bytes, generation: int, *, optional: bool = False
    ) -> None:
        self._host = host
        self._port = port
        self._key = key
        self._generation = generation
        self._optional = optional
        self._cancelled = threading.Event()
        self._lock = threading.Lock()  # Guards all below.
        self._connections: set[socket.socket] = set()
        self._left = 0  # Addresses that are being tried.
        self._problems: list[str] = []
        self._succeeded = False

    def start(self) -> None:
        """Begin, in a thread that ends with this process at the latest."""
        self._spawn(self._begin)

    def cancel(self) -> None:
        """Give up, and say nothing of it."""
        self._cancelled.set()
        with self._lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # It is not connected, or not any more.

    def _spawn(self, target: object, *args: object) -> None:
        threading.Thread(
            target=target,  # type: ignore[arg-type]
            args=args,
            name="holdfast-vouching",
            daemon=True,
        ).start()

    def _begin(self) -> None:
        deadline = time.monotonic() + VOUCH_S
        try:
            addresses = resolve_within(self._host, self._port, VOUCH_S)[:ADDRESSES_MAX]
        except OSError as error:
            self._fail(f"its name is not known here: {error.strerror or error}")
            return
        self._left = len(addresses)
        for address in addresses[1:]:
            self._spawn(self._vouch_at, address, deadline)
        self._vouch_at(addresses[0], deadline)

    def _vouch_at(self, address: Address, deadline: float) -> None:
        pause_s, pause_s_max = PAUSE_S
        while True:
            try:
                self._vouch(address, deadline)
            except (OSError, ProofRefused) as error:
                problem = (error.strerror if isinstance(error, OSError) else "") or str(error)
                no_way = isinstance(error, OSError) and error.errno in _NO_WAY
                if no_way or time.monotonic() + pause_s >= deadline:
                    self._end(problem)
                    return
                if self._cancelled.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, pause_s_max)
            else:
                self._end("")
                return

    def _vouch(self, address: Address, deadline: float) -> None:
        from holdfast.wire.store_proof import AgentProof  # Here, while workers start.

        proof = AgentProof(self._key, self._generation)
        with socket.socket(address.family, socket.SOCK_STREAM) as connection:
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

    def _end(self, problem: str) -> None:
        """One address is done with; the last one says what came of all."""
        with self._lock:
            self._left -= 1
            self._succeeded = self._succeeded or not problem
            self._problems += [problem] if problem else []
            failed = self._left == 0 and not self._succeeded
        if failed:
            self._fail(self._problems[0])

    def _fail(self, problem: str) -> None:
        if self._cancelled.is_set():
            return
        where = format_endpoint(self._host, self._port)
        tell = console.debug if self._optional else console.warning
        tell(
            f"cannot vouch for this host at the workers' store of generation {self._generation} at "
            f"{where}: {problem}; its workers will be refused there"
        )


def _limit(connection: socket.socket, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
