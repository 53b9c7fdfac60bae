"""A server that sends exactly what a test says, and checks every byte that it receives."""

from __future__ import annotations

import os
import socket
import struct
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

LONG_S = 30.0
VALIDATED = b"\x00\xce\xf7\x85\x3c"


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def i64(number: int) -> bytes:
    return struct.pack("<q", number)


def blob(content: bytes) -> bytes:
    return u64(len(content)) + content


class Peer:
    """The server's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def expect(self, wanted: bytes) -> None:
        data = b""
        while len(data) < len(wanted):
            more = self.socket.recv(len(wanted) - len(data))
            assert more, f"the client closed the connection after {data!r}"
            data += more
        assert data == wanted

    def send(self, answer: bytes) -> None:
        self.socket.sendall(answer)

    def greet(self) -> None:
        nonce = struct.pack("<I", os.getpid())
        self.expect(VALIDATED + b"\x0d" + nonce)
        self.send(nonce)

    def exchange(self, wanted: bytes, answer: bytes) -> None:
        self.expect(wanted)
        self.send(answer)

    def expect_end(self) -> None:
        try:
            data = self.socket.recv(1)
        except ConnectionResetError:
            return
        assert not data, f"the client continued with {data!r}"

    def expect_all(self) -> None:
        """Receive anything from the client, until it closes the connection."""
        try:
            while self.socket.recv(1000):
                pass
        except ConnectionResetError:
            return


class ScriptedStore:
    """Greets each connection, in order of arrival, and then runs one script with it."""

    def __init__(self, *scripts: Callable[[Peer], None], greets: bool = True) -> None:
        self._scripts = scripts
        self._greets = greets
        self._failures: list[BaseException] = []
        self._talking: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LONG_S)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.join()
        for thread in self._talking:
            thread.join()
        self._listener.close()
        if self._failures:
            raise self._failures[0]

    def _serve(self) -> None:
        for script in self._scripts:
            try:
                connection, _ = self._listener.accept()
            except OSError as failure:
                self._failures.append(failure)
                return
            thread = threading.Thread(target=self._talk, args=(connection, script))
            self._talking.append(thread)
            thread.start()

    def _talk(self, connection: socket.socket, script: Callable[[Peer], None]) -> None:
        try:
            with connection:
                connection.settimeout(LONG_S)
                peer = Peer(connection)
                if self._greets:
                    peer.greet()
                script(peer)
        except BaseException as failure:  # `__exit__` raises it.
            self._failures.append(failure)
