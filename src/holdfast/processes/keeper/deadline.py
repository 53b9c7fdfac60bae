"""The deadline of a node's workers: two timers that the agent extends and the keeper watches.

The agent's connection renews them; `core.liveness.StopDeadline` computes the new times. If the agent is
stopped or disconnected, the first timer expires and the keeper kills the workers, whatever the agent does. If
the agent is starved, the keeper waits for the second: the others have promised to wait so much longer. Agent and
keeper share the timers' descriptors. So renewing them takes two system calls, in a thread that is awake
anyway, and does not wake the keeper. The timers also count the time in which the machine sleeps.
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
    """The timers of one agent, for all its generations; `renew` may be called from any thread."""

    def __init__(self, presence_fd: int = -1) -> None:
        self.presence_fd = presence_fd
        """A socket that stays open while workers may still run, for other nodes (`net.agent_port`)."""
        self.timer_fds: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._renewed_to: float | None = None
        self._extra_s = 0.0
        self._runs = False  # Whether there are workers.
        self._set_to: float | None = None  # The second timer, by its clock.

    def begin(self) -> None:
        """Set the timers, before workers are started."""
        with self._lock:
            if not self.timer_fds:
                first = _new_timer()
                try:
                    self.timer_fds = first, _new_timer()
                except EnvironmentProblem:
                    os.close(first)
                    raise
            self._runs, self._set_to = True, None
            self._set()

    def renew(self, at: float | None, extra_s: float) -> None:
        """Set the deadline to this time of the monotonic clock; None for no deadline.

        The workers of a starved agent have `extra_s` more.
        """
        with self._lock:
            self._renewed_to, self._extra_s = at, extra_s
            if self._runs:
                self._set()

    def end(self) -> None:
        """Stop the timers: the workers have exited."""
        with self._lock:
            if self._runs:
                self._runs = False
                self._set_timers(0.0, 0.0)

    def close(self) -> None:
        self.end()
        with self._lock:
            fds, self.timer_fds = self.timer_fds, ()
        for fd in fds:
            os.close(fd)

    def _set(self) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._set_to is not None and now >= self._set_to:
            return  # The timers have expired, and the keeper is killing the workers: too late to renew.
        if self._renewed_to is None:
            self._set_to = None
            self._set_timers(0.0, 0.0)
        else:
            at = max(now + self._renewed_to - time.monotonic(), 1e-9)
            self._set_to = at + self._extra_s
            self._set_timers(at, self._set_to)

    def _set_timers(self, *times: float) -> None:
        # The last first: until it is set, the first would end what the last should spare.
        for fd, at in zip(reversed(self.timer_fds), reversed(times), strict=True):
            seconds = int(at)
            to = pack("4l", 0, 0, seconds, int((at - seconds) * 1e9))
            load_function("timerfd_settime")(fd, TFD_TIMER_ABSTIME, to, None)


def _new_timer() -> int:
    flags = os.O_CLOEXEC | os.O_NONBLOCK
    fd = load_function("timerfd_create")(time.CLOCK_BOOTTIME, flags)
    if fd < 0:
        raise EnvironmentProblem("no file descriptor is free for the timers of the workers")
    return fd
