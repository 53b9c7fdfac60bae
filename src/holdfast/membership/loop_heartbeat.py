"""Checks from the membership thread that the loop which supervises a node's workers is still running.

The membership thread sends the node's heartbeats, and it continues while the agent's own thread
hangs, for example in a file system that does not respond. But a heartbeat must mean that the agent supervises
its workers. So the thread wakes the loop through the descriptor that the loop polls anyway, and the loop
responds in its next iteration. The thread wakes it no more often than it sends heartbeats.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Protocol

from holdfast import console
from holdfast.core.liveness import LoopWatch
from holdfast.core.session import LoopResumed, LoopStuck


class LoopHeartbeat:
    """The heartbeat of one loop, from `start` on.

    Before `start` the loop is not monitored: a polling agent takes its events at any time. To pause the heartbeat
    during work that has its own limit, such as imports of a user's modules, the loop enters it as a context manager.
    """

    def __init__(self) -> None:
        self.is_requested = False
        """Whether a request waits for the loop's response."""
        self._thread = 0
        self._pauses = 1

    @property
    def is_started(self) -> bool:
        return self._pauses == 0

    def start(self) -> None:
        """Promise that this thread responds from now on."""
        self._thread = threading.get_ident()
        self._pauses = 0

    def stop(self) -> None:
        self.__enter__()

    def __enter__(self) -> None:
        self._pauses += 1
        self.is_requested = False

    def __exit__(self, *_error: object) -> None:
        self._pauses -= 1

    def location(self) -> str:
        """Return the function and line that the loop's thread is executing."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return "its thread has ended"
        code = frame.f_code
        return f"in {code.co_name}, {os.path.basename(code.co_filename)}:{frame.f_lineno}"


class MonitoredLoop(Protocol):
    """The loop that is monitored, through its `Mailbox`."""

    heartbeat: LoopHeartbeat

    def request_beat(self) -> None:
        """Wake the loop if its heartbeat has started."""


class LoopMonitor:
    """Requests heartbeats, and returns an event when the loop gets stuck or recovers."""

    def __init__(self, now: float, loop: MonitoredLoop, limit_s: float) -> None:
        self._loop = loop
        self._watch = LoopWatch(now, limit_s)
        self._request_at = now

    @property
    def step_s(self) -> float:
        """The longest interval between calls of `check` that gives the loop its whole limit."""
        return self._watch.step_s

    def check(self, now: float) -> LoopStuck | LoopResumed | None:
        """Record the last response and request another; return what has changed, if anything."""
        watch, heartbeat = self._watch, self._loop.heartbeat
        has_changed = watch.check(now, responded=not heartbeat.is_requested)
        if now >= self._request_at:
            self._request_at = now + watch.step_s
            self._loop.request_beat()
        if not has_changed:
            return None
        if not watch.is_stuck:
            console.notice("this agent continues")
            return LoopResumed()
        why = f"its agent has been stuck for {watch.limit_s:g} s ({heartbeat.location()})"
        console.error(f"this node counts as lost: {why}")
        return LoopStuck(why)
