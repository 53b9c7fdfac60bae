"""Real coordinators and nodes for tests, with sockets, threads and separate processes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from holdfast.core.job_settings import JobSettings
from holdfast.core.phases import NodeRole
from holdfast.core.protocol import NodeInfo, View
from holdfast.core.session import SessionTimeouts
from holdfast.core.supervision import ViewReceived
from holdfast.membership.coordinator import CoordinatorMembership
from holdfast.membership.interface import ProtectionChanged, random_incarnation
from holdfast.wire.frames import FrameReader, encode_frame
from holdfast.wire.handshake import ClientHandshake
from holdfast.wire.messages import Message, decode
from holdfast.wire.wire_limits import STATUS_FRAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.core.supervision import CoordinatorLost
    from holdfast.membership.interface import JoinRefused
    from holdfast.wire.frames import Seal

PATIENCE_S = 20.0  # Only a failing test waits this long.
LOCAL = "127.0.0.1"

VERB = """
import sys
from holdfast.cli.coordinator_command import build_parser, execute
execute(build_parser("coordinator").parse_args(sys.argv[1:]))
"""


def node(
    port: int, name: str, *, nodes: int = 2, host: str = LOCAL, **options: Any
) -> CoordinatorMembership:
    """Create a node without starting it; the options are those of `CoordinatorMembership`."""
    given: dict[str, Any] = {
        "run_id": "job",
        "info": NodeInfo(node=name, incarnation=random_incarnation()),
        "settings": JobSettings(min_nodes=nodes, max_nodes=nodes, max_restarts=3),
        "timeouts": SessionTimeouts(),
        "is_host": False,
        "token": None,
        "tls": None,
    }
    return CoordinatorMembership(host, port, **(given | options))


@contextlib.contextmanager
def started(*nodes: CoordinatorMembership) -> Iterator[None]:
    """Start nodes, and close all of them at the end, coordinating nodes last."""
    try:
        for one in nodes:
            one.start()
        yield
    finally:
        for one in sorted(nodes, key=lambda one: one.hosting):
            one.close(drain_s=0)


def until(connection: CoordinatorMembership, wanted: Callable[[View], bool]) -> View:
    """Wait for a view that fulfills a condition, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    view = connection.view
    while view is None or not wanted(view):
        rest = deadline - time.monotonic()
        ready, _, _ = select.select([connection], [], [], max(0.0, rest))
        assert ready, f"no such view; the last one: {view}; {connection.problem()}"
        for event in connection.take():
            assert isinstance(event, ViewReceived), event
            view = event.view
    return view


def member(view: View) -> bool:
    return view.role is NodeRole.MEMBER


def fault(connection: CoordinatorMembership) -> CoordinatorLost | JoinRefused:
    """Return the first event that is not a view."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        ready, _, _ = select.select([connection], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no event; {connection.problem()}"
        for event in connection.take():
            if not isinstance(event, (ViewReceived, ProtectionChanged)):
                return event


def eventually(condition: Callable[[], object]) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Coordinator:
    """`holdfast coordinator` in a separate process."""

    before: tuple[str, ...] = ()
    """The prefix of its command."""

    def __init__(self, *flags: str, **environment: str) -> None:
        reading, writing = os.pipe()
        bare = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
        try:
            self.process = subprocess.Popen(
                [*self.before, sys.executable, "-c", VERB, f"--ready-fd={writing}", *flags],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[writing],
                env=bare | environment,
            )
        finally:
            os.close(writing)
        with os.fdopen(reading) as pipe:
            self.port = int(pipe.readline() or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)

    def end(self, signum: signal.Signals) -> tuple[str, str]:
        """Send a signal; return its standard output and standard error."""
        if self.process.stdout is None or self.process.stdout.closed:
            return "", ""
        self.process.send_signal(signum)
        return self.process.communicate(timeout=PATIENCE_S)


class RawClient:
    """A client in small steps, which can do what a regular client does not do."""

    def __init__(
        self,
        port: int,
        host: str = LOCAL,
        token: bytes | None = None,
        run_id: str = "job",
        source: str = "",
    ) -> None:
        self.socket = socket.create_connection(
            (host, port), timeout=PATIENCE_S, source_address=(source, 0) if source else None
        )
        self._reader = FrameReader(STATUS_FRAME_BYTES_MAX, tag_bytes=None)
        self._bodies: list[bytes] = []
        self._handshake = ClientHandshake(token, run_id=run_id, host=host, port=port)
        self._seals: tuple[Seal, Seal] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def complete_handshake(self) -> RawClient:
        """Perform the handshake."""
        self.socket.sendall(self._handshake.start())
        while not self._handshake.done:
            body = self.next_body()
            assert body is not None
            self.socket.sendall(self._handshake.receive(body))
            self._reader.tag_bytes = self._handshake.tag_bytes
        self._seals = self._handshake.seals
        return self

    def send_message(self, message: Message) -> None:
        """Send a message."""
        frame = encode_frame(message)
        self.socket.sendall(self._seals[0].seal(frame) if self._seals else frame)

    def receive(self) -> Message | None:
        """Return the next message, or None if the connection is closed."""
        body = self.next_body()
        if body is not None and self._seals is not None:
            body = self._seals[1].open(body)
        return None if body is None else decode(body)

    def next_body(self) -> bytes | None:
        """Return the body of the next frame, without decoding it."""
        while not self._bodies:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._bodies = self._reader.feed(data)
        return self._bodies.pop(0)
