"""The deadline of a node's workers: a timer that the agent extends and the keeper watches.

The agent's connection renews it; `core.liveness.StopDeadline` computes the new time. If the agent is
stopped, starved or disconnected, the timer expires and the keeper kills the workers, whatever the
agent does. Agent and keeper share the timer's descriptor. So renewing it takes one system call, in a
thread that is awake anyway, and does not wake the keeper. The timer also counts the time in which the
machine sleeps.
"""

from __future__ import annotations

import os
import threading
import time
from struct import pack

from holdfast.errors import EnvironmentProblem
from holdfast.processes.keeper.keeper_program import load_function

TFD_TIMER_ABSTIME = 1


class WorkersDeadline:
    """The timer of one agent, for all its generations; `renew` may be called from any thread."""

    def __init__(self, presence_fd: int = -1) -> None:
        self.presence_fd = presence_fd
        """A socket that stays open while workers may still run, for other nodes (`net.agent_port`)."""
        self._lock = threading.Lock()
        self._fd = -1
        self._renewed_to: float | None = None
        self._runs = False  # Whether there are workers.
        self._set_to: float | None = None  # By the timer's clock.

    def fileno(self) -> int:
        return self._fd

    def begin(self) -> None:
        """Set the timer, before workers are started."""
        with self._lock:
            if self._fd < 0:
                flags = os.O_CLOEXEC | os.O_NONBLOCK
                self._fd = load_function("timerfd_create")(time.CLOCK_BOOTTIME, flags)
                if self._fd < 0:
                    raise EnvironmentProblem(
                        "no file descriptor is free for the timer of the workers"
                    )
            self._runs, self._set_to = True, None
            self._set()

    def renew(self, at: float | None) -> None:
        """Set the deadline to this time of the monotonic clock; None for no deadline."""
        with self._lock:
            self._renewed_to = at
            if self._runs:
                self._set()

    def end(self) -> None:
        """Stop the timer: the workers have exited."""
        with self._lock:
            if self._runs:
                self._runs = False
                self._set_timer(0.0)

    def close(self) -> None:
        self.end()
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _set(self) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._set_to is not None and now >= self._set_to:
            return  # The timer has expired, and the keeper is killing the workers: too late to renew.
        at = self._renewed_to
        self._set_to = None if at is None else max(now + at - time.monotonic(), 1e-9)
        self._set_timer(self._set_to or 0.0)

    def _set_timer(self, at: float) -> None:
        seconds = int(at)
        to = pack("4l", 0, 0, seconds, int((at - seconds) * 1e9))
        load_function("timerfd_settime")(self._fd, TFD_TIMER_ABSTIME, to, None)
