"""`worker_main()`: records the failure of a worker's main function, and runs its control server.

    @worker_main()
    def main() -> None:
        ...

It records an exception that leaves `main`, as `@record` does. If `TORCH_WORKER_SERVER_SOCKET` names a
path, the worker serves requests at a socket there while `main` runs. You can also write
`with worker_main():`.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import TYPE_CHECKING

from holdfast.elastic._impl.worker_server import WorkerServer
from holdfast.processes.failures.error_file import record, recording
from holdfast.processes.worker_socket import socket_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Literal, ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")


class WorkerMain:
    """The decorator and context manager that `worker_main` returns."""

    def __init__(self) -> None:
        self._server: WorkerServer | None = None

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R | None]:
        """Wrap the main function; it can be called more than once, one call after the other."""

        @wraps(fn)
        def main(*args: P.args, **kwargs: P.kwargs) -> R:
            server = start_server()
            try:
                return fn(*args, **kwargs)
            finally:
                if server is not None:
                    server.shutdown()

        return record(main)

    def __enter__(self) -> None:
        with recording():
            self._server = start_server()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> Literal[False]:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
        if isinstance(error, Exception):
            try:
                record(_raise)(error)
            except Exception:  # noqa: BLE001 (the same one; Python re-raises it)
                error.__traceback__ = tb
        return False


def worker_main() -> WorkerMain:
    """Return a decorator for a worker's main function; it is also a context manager."""
    return WorkerMain()


def start_server() -> WorkerServer | None:
    """Start the server, if the environment requests one."""
    place = socket_path(os.environ)
    if not place:
        return None
    return WorkerServer(place)


def _raise(error: Exception) -> None:
    raise error
