"""TCP ports that are held, not guessed.

The kernel gives a held port to nobody who asks for any free one. Unless it is listened on, a worker
that binds it by number with `SO_REUSEADDR`, as stores do, gets it all the same.
"""

from __future__ import annotations

import _socket as socket  # All that is needed here; the wrapper around it costs start-up time.
import errno
import os

from holdfast.errors import EnvironmentProblem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self


# The dual-stack wildcard covers IPv4 too; a host without IPv6 has only the second.
EVERYWHERE = ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0"))  # noqa: S104
HERE = ((socket.AF_INET, "127.0.0.1"),)


class ReservedPort:
    """A TCP port that is ours to give away, on every address of this host unless it is `local`.

    `number` 0 is any free one. A port that is `listening` takes connections from now on, for
    whoever will accept them.
    """

    def __init__(self, number: int = 0, *, listening: bool = False, local: bool = False) -> None:
        self._socket = _bind(number, HERE if local else EVERYWHERE, listening=listening)
        self.number: int = self._socket.getsockname()[1]

    def listener(self) -> socket.socket:
        """Return a socket of its own that listens at this port; closing it keeps the port ours."""
        return socket.socket(fileno=os.dup(self._socket.fileno()))

    def release(self) -> None:
        """Give the port back to the kernel."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _bind(number: int, addresses: tuple[tuple[int, str], ...], *, listening: bool) -> socket.socket:
    problem: OSError | None = None
    for family, address in addresses:
        try:
            reserved = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            problem = error
            continue
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            reserved.bind((address, number))
            if listening:
                reserved.listen(socket.SOMAXCONN)
        except OSError as error:
            reserved.close()
            problem = error
        else:
            return reserved
    if number and problem is not None and problem.errno == errno.EADDRINUSE:
        raise EnvironmentProblem(
            f"the port {number}, at which the workers are to meet, is taken on this host",
            hint="give another one with --master-port, or none to get a free one",
        )
    what = f"the port {number} could not be taken" if number else "no TCP port could be reserved"
    raise EnvironmentProblem(
        f"{what} for the workers: {problem}", hint="name another one with --master-port"
    )
