"""One client of a `TcpStoreServer`, as its loop knows it."""

from __future__ import annotations

from holdfast.store.tcp_parsing import Requests

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket as socket


class Connection:
    """One client: its socket, what it has sent, and what it has not read yet."""

    __slots__ = (
        "address", "descriptor", "is_plain", "number", "receive", "requests", "send", "since",
        "socket", "unfinished", "unsent",
    )  # fmt: skip

    def __init__(self, number: int, peer: socket.socket, address: object, now: float) -> None:
        self.number = number
        self.socket = peer
        self.descriptor = peer.fileno()
        self.receive = peer.recv
        self.send = peer.send
        self.address = address
        self.requests = Requests()
        self.is_plain = False
        """Whether its next byte begins a request, and it has read all answers to those before."""
        self.since = now
        self.unfinished = 0
        self.unsent = bytearray()

    def kept_bytes(self) -> int:
        """How much is kept of its request that is not complete, and of answers it did not read."""
        return self.unfinished + len(self.unsent)

    def __str__(self) -> str:
        match self.address:
            case (str(host), int(port), *_):
                return f"{host.removeprefix('::ffff:')}:{port}"
        return "a client"
