"""Whether the loop that supervises a node's workers still turns, as the connection's thread sees it.

Heartbeats come from the connection's thread, which goes on while the agent's own thread hangs: in a
file system that does not answer, say. They must not say more than is true. So the thread asks, by
the descriptor that the loop waits for anyway, and the loop answers in its next turn. Nothing is
asked more often than a heartbeat is sent.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Protocol

from holdfast import console
from holdfast.core.liveness import LoopWatch
from holdfast.core.session import LoopStuck, LoopTurned


class Attendance:
    """The promise of one loop to answer soon, from `begin` on.

    Nobody is asked before: an agent that only polls looks when it likes. While it is `paused`, the
    loop waits for something that has a limit of its own, such as imports of a user's modules.
    """

    def __init__(self) -> None:
        self.is_asked = False
        """Whether a question waits for its answer."""
        self._thread = 0
        self._pauses = 1

    @property
    def is_promised(self) -> bool:
        return self._pauses == 0

    def begin(self) -> None:
        """Promise that this thread answers."""
        self._thread = threading.get_ident()
        self._pauses = 0

    def end(self) -> None:
        self.__enter__()

    def __enter__(self) -> None:
        self._pauses += 1
        self.is_asked = False

    def __exit__(self, *_error: object) -> None:
        self._pauses -= 1

    def where(self) -> str:
        """Return what the loop's thread is doing, as far as Python knows."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return "its thread is gone"
        code = frame.f_code
        return f"in {code.co_name}, {os.path.basename(code.co_filename)}:{frame.f_lineno}"


class Asked(Protocol):
    """What a loop waits for; a `Mailbox`."""

    attendance: Attendance

    def ask(self) -> None:
        """Wake the loop, if it has promised to answer."""


class StuckLoop:
    """Asks, and makes of the answers what a session must know; tells the person too."""

    def __init__(self, now: float, asked: Asked, limit_s: float) -> None:
        self._asked = asked
        self._watch = LoopWatch(now, limit_s)
        self._ask_at = now

    @property
    def step_s(self) -> float:
        """How often to `look` at least, so that the whole of the time counts."""
        return self._watch.step_s

    def look(self, now: float) -> LoopStuck | LoopTurned | None:
        """Take note of the last answer, and ask again; return what has changed, if anything."""
        watch, attendance = self._watch, self._asked.attendance
        has_changed = watch.look(now, answered=not attendance.is_asked)
        if now >= self._ask_at:
            self._ask_at = now + watch.step_s
            self._asked.ask()
        if not has_changed:
            return None
        if not watch.is_stuck:
            console.notice("this agent goes on")
            return LoopTurned()
        why = f"its agent has been stuck for {watch.limit_s:g} s ({attendance.where()})"
        console.error(f"this node counts as lost: {why}")
        return LoopStuck(why)
