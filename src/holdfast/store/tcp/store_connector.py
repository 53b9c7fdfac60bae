"""Connects an agent to the workers' store on another node, where it proves that it has the generation's key."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from holdfast.net.addresses import resolve_within
from holdfast.net.endpoints import format_endpoint
from holdfast.wire.store_proof import AgentProof

if TYPE_CHECKING:
    from holdfast.net.addresses import Address


class StoreConnector:
    """Connects to the store of one generation; `purpose` is the purpose of the proof (`wire.store_proof`)."""

    def __init__(self, host: str, port: int, key: bytes, generation: int, purpose: int) -> None:
        self.store = (
            f"the workers' store of generation {generation} at {format_endpoint(host, port)}"
        )
        """The store's name in messages."""
        self._host, self._port = host, port
        self._key, self._generation, self._purpose = key, generation, purpose

    def resolve(self, limit_s: float) -> list[Address]:
        """Return the addresses of the store, or raise `OSError`."""
        try:
            return resolve_within(self._host, self._port, limit_s)
        except OSError as error:
            raise OSError(f"cannot resolve its name: {error.strerror or error}") from None

    def socket_for(self, address: Address) -> socket.socket:
        """Return a socket that is ready to connect."""
        connection = socket.socket(address.family, socket.SOCK_STREAM)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    def proof(self) -> AgentProof:
        """Return the proof for a new connection."""
        return AgentProof(self._key, self._generation, self._purpose)


def problem_text(error: Exception) -> str:
    """Return why a connection failed."""
    return (error.strerror if isinstance(error, OSError) else "") or str(error)
