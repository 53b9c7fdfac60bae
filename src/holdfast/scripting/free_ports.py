"""A TCP port of this host that nobody uses.

The one thing to know: a port is only surely free while a socket holds it. Prefer to hand over the
socket, or to bind port 0 where the port is used.
"""

from __future__ import annotations

import socket

from holdfast.errors import EnvironmentProblem

# Addresses, not names: what `localhost` resolves to, if to anything, must not matter.
_LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def get_socket_with_port() -> socket.socket:
    """Return a socket that listens on loopback at a free port; the caller has to close it."""
    problem: OSError | None = None
    for family, address in _LOOPBACKS:
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            problem = error
            continue
        try:
            listener.bind((address, 0))
            listener.listen(0)
        except OSError as error:
            listener.close()
            problem = error
        else:
            return listener
    raise EnvironmentProblem(
        f"no TCP port of this host could be bound: {problem}",
        hint="is the loopback interface up, and are there descriptors left?",
    )


def get_free_port() -> int:
    """Return a port that is free on loopback now. Anybody may take it as soon as this returns."""
    with get_socket_with_port() as listener:
        port: int = listener.getsockname()[1]
        return port
