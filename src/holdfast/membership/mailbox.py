"""News from the membership thread to the agent's loop, and the descriptor that wakes the loop."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from holdfast.core.protocol import View
from holdfast.membership.loop_heartbeat import LoopHeartbeat

if TYPE_CHECKING:
    from holdfast.core.coordinated_supervision import CoordinatorLost
    from holdfast.membership.interface import JoinRefused, News

LOSSES_MAX = 16  # Besides the newest view.


class Mailbox:
    """Holds the newest view of an incarnation and the first few losses until the agent takes them.

    Its descriptor is readable while it has news, from `open` to `close`.
    """

    def __init__(self, incarnation: int) -> None:
        self.heartbeat = LoopHeartbeat()
        self.view: View | None = None
        """The newest view of this incarnation, taken or not."""
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._view: View | None = None
        self._losses: list[CoordinatorLost | JoinRefused] = []
        self._eventfd = -1

    def open(self) -> None:
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def close(self) -> None:
        """Release the descriptor; may be called more than once, and without `open`."""
        with self._lock:
            if self._eventfd >= 0:
                os.close(self._eventfd)
                self._eventfd = -1

    def fileno(self) -> int:
        return self._eventfd

    def put(self, news: News) -> None:
        """Store a view, unless it is for another incarnation; or add a loss."""
        with self._lock:
            if isinstance(news, View):
                if news.incarnation != self._incarnation:
                    return
                self.view = self._view = news
            elif len(self._losses) < LOSSES_MAX:
                self._losses.append(news)
            else:
                return
            if self._eventfd >= 0:
                os.eventfd_write(self._eventfd, 1)

    def request_beat(self) -> None:
        """Wake the loop to call `take`, if its heartbeat has started and no request is pending."""
        with self._lock:
            heartbeat = self.heartbeat
            if self._eventfd >= 0 and heartbeat.is_started and not heartbeat.is_requested:
                heartbeat.is_requested = True
                os.eventfd_write(self._eventfd, 1)

    def begin_incarnation(self, incarnation: int) -> None:
        """Accept views of this incarnation only, from now on."""
        with self._lock:
            self._incarnation = incarnation
            self.view = self._view = None

    def take(self) -> list[News]:
        with self._lock:
            self.heartbeat.is_requested = False
            if self._eventfd >= 0:
                try:
                    os.eventfd_read(self._eventfd)
                except BlockingIOError:
                    pass
            taken: list[News] = [self._view] if self._view is not None else []
            taken += self._losses
            self._view = None
            self._losses = []
            return taken
