"""Many descriptors behind one: a context's news arrive at a single place to wait for."""

from __future__ import annotations

import select

from holdfast.processes.waiting import wait_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Watching:
    """Base of what is told of things by descriptors that become readable."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to take in."""
        return self._epoll.fileno()

    def _watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        self._readers[fd] = on_readable
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _take_what_is_ready(self) -> None:
        for fd, _events in self._epoll.poll(0):
            if fd in self._readers:  # One that was taken in before it may have ended the watch.
                self._readers[fd]()

    def _block(self, deadline: float | None) -> None:
        """Wait for anything to happen, or for the deadline."""
        wait_for(deadline, self._epoll.fileno())

    def _end_watching(self) -> None:
        self._epoll.close()
