"""Calls a handler in its own thread, so that the handler can neither fail nor block the agent.

This is for handlers of the program and of plug-ins. Events (or metrics) are queued; their source never waits. Limits:

- `QUEUED_MAX` events may be queued; further events are dropped and counted.
- If a call lasts longer than `CALL_S_MAX`, the handler and its queue are dropped. The thread that is stuck in the
  call ends with the process.

A fork waits for a call in progress, for at most `FORK_S`, and no call starts during a fork. Otherwise a forked worker
could inherit a lock that the handler holds, such as that of standard output, and nothing would ever release it.

The thread is a daemon: `close` the handler before the process exits, or queued events are lost. Python closes it at
a regular exit, but not at `os._exit`.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakSet

from holdfast.observe.safe_handler import SafeHandler

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.observe.events.event import Event
    from holdfast.observe.events.event_handlers import EventHandler
    from holdfast.observe.timeline import TimelineLine

QUEUED_MAX = 1000
CALL_S_MAX = 10.0
CHECK_AGAIN_S = 0.001
"""The interval for checking whether an overdue call has ended."""
CLOSE_S = 5.0
"""How long the end of a process waits for queued events."""
FORK_S = 1.0
"""How long a fork waits for a call in progress. A later fork does not wait for the same call again."""

_all: WeakSet[BackgroundHandler] = WeakSet()


class BackgroundHandler(SafeHandler):
    """Calls a handler in a thread, which starts with the first event."""

    def __init__(
        self,
        handler: EventHandler,
        name: str,
        item: str = "event",
        *,
        queued_max: int = QUEUED_MAX,
        call_s_max: float = CALL_S_MAX,
    ) -> None:
        super().__init__(handler, name, item)
        self._queued_max = queued_max
        self._call_s_max = call_s_max
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._queue: deque[Event | TimelineLine] = deque()
        self._thread: threading.Thread | None = None
        self._call_began: float | None = None
        self._abandoned_call: float | None = None  # The call for which a flush or a fork timed out.
        self._calling = threading.Lock()  # Held during a call, and during a fork.
        self._is_blocked = False
        self._is_recording = False
        self._flushes_wanted = self._flushes_done = 0
        self._is_closing = False
        self._was_full = False
        self._warnings: deque[str] = deque()

    def record(self, event: Event | TimelineLine) -> None:
        """Queue an event, or count it as missed if the queue is full."""
        if self._pid != os.getpid():
            self._begin()  # After a fork: the thread and its locks are in the parent.
        with self._changed:
            self._drop_if_stuck()
            if self.is_dropped or self._is_closing:
                self.miss()
            elif len(self._queue) >= self._queued_max:
                self.miss()
                self._warn_full()
            else:
                self._queue.append(event)
                self._changed.notify_all()
                self._start()
        self._print_warnings()

    def flush(self, limit_s: float = CLOSE_S) -> None:
        """Wait until all events so far are delivered and sent; report the missed ones."""
        if self._pid != os.getpid():
            return  # The process that recorded events delivers them.
        if self._is_called_by_handler():
            return  # Otherwise the thread would wait for itself.
        with self._changed:
            if self._thread is not None:
                self._flushes_wanted += 1
                self._changed.notify_all()
            # A flush in progress may not cover the events queued now.
            wanted = self._flushes_wanted
            if not self._wait_until(lambda: self._flushes_done >= wanted, limit_s):
                self._abandoned_call = self._call_began
                self.warn(f"{self.subject} {self._pending(limit_s)}")
            self.report_missed()
        self._print_warnings()

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Deliver queued events, close the handler, end the thread, and report the missed events."""
        if self._pid != os.getpid() or self._is_closing:
            return
        patience_s = limit_s
        with self._changed:
            self._is_closing = True
            if not self.is_dropped:
                self._start()  # Even without events: closing may block too.
            thread = self._thread
            self._changed.notify_all()
            if self._is_called_by_handler():
                return  # The thread ends after it has delivered the queued events.
            if self._call_began is not None and self._call_began == self._abandoned_call:
                patience_s = 0.0  # The end of the job has already waited for this call.
            if not self._wait_until(lambda: self._thread is None, patience_s):
                self._drop_handler(f"has not accepted all {self.item}s after {limit_s:g} s")
        if thread is not None and self._thread is None:
            thread.join(limit_s)
        atexit.unregister(self.close)
        with self._changed:
            self.report_missed()
        self._print_warnings()

    @property
    def is_flushing(self) -> bool:
        """Whether a requested flush is unfinished."""
        return self._flushes_done < self._flushes_wanted

    def _pending(self, limit_s: float) -> str:
        count = len(self._queue) + self._is_recording
        if not count:
            return f"has not sent all {self.item}s after {limit_s:g} s"
        what = f"1 {self.item}" if count == 1 else f"{count} {self.item}s"
        return f"has not accepted {what} after {limit_s:g} s"

    def _is_called_by_handler(self) -> bool:
        return self._thread is threading.current_thread()

    def miss(self, count: int = 1) -> None:
        """Count events that the handler missed; any thread may call this."""
        with self._changed:
            super().miss(count)

    def warn(self, line: str) -> None:
        """Queue a warning until no lock is held, because printing it may be slow."""
        self._warnings.append(line)

    def _print_warnings(self) -> None:
        while self._warnings:
            try:
                line = self._warnings.popleft()
            except IndexError:
                break  # Another thread has printed it.
            super().warn(line)

    def _warn_full(self) -> None:
        if not self._was_full:
            self._was_full = True
            self.warn(
                f"{self.subject} is slow: {self._queued_max} {self.item}s are queued for it, "
                "and further ones are dropped"
            )

    def _start(self) -> None:
        if self._thread is not None:
            return
        name = f"holdfast-{self.item}s-{self.name}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as problem:  # The machine's limit, or interpreter shutdown.
            self._drop_handler(f"cannot start a thread ({problem})")
            return
        self._thread = thread
        atexit.register(self.close)

    def _wait_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait for a condition or until the handler is dropped; return False on timeout."""
        deadline = time.monotonic() + limit_s
        while not condition():
            self._drop_if_stuck()
            until = deadline - time.monotonic()
            if self.is_dropped or until <= 0:
                return self.is_dropped
            if self._call_began is not None:
                stuck = self._call_began + self._call_s_max - time.monotonic()
                until = min(until, max(stuck, CHECK_AGAIN_S))
            self._changed.wait(until)
        return True

    def _drop_if_stuck(self) -> None:
        since = self._call_began
        if since is not None and time.monotonic() - since > self._call_s_max:
            limit = f"{self._call_s_max:g} s"
            self._drop_handler(f"has been busy with one {self.item} for more than {limit}")

    def _drop_handler(self, why: str) -> None:
        if self.is_dropped:
            return
        self.drop(why)
        self.miss(len(self._queue) + self._is_recording)
        self._queue.clear()
        self._changed.notify_all()

    # Around a fork.

    def block_calls(self, limit_s: float) -> None:
        """Wait up to `limit_s` until no call is in progress, and prevent new ones."""
        call = self._call_began
        if self._is_called_by_handler() or (call is not None and call == self._abandoned_call):
            return
        if self._calling.acquire(timeout=limit_s):
            self._is_blocked = True
        else:
            self._abandoned_call = call

    def allow_calls(self) -> None:
        """Allow calls again."""
        if self._is_blocked:
            self._is_blocked = False
            self._calling.release()

    # In the thread.

    def _run(self) -> None:
        """Deliver events; flush or close on request, once the queue is empty."""
        pid = os.getpid()
        while True:
            with self._changed:
                while not self._has_work():
                    self._changed.wait()
                if self.is_dropped:
                    break
                event = self._queue.popleft() if self._queue else None
                self._is_recording = event is not None
                flushes = self._flushes_wanted
                self._call_began = time.monotonic()
            with self._calling:
                self._call_handler(event)
                if os.getpid() != pid:
                    os._exit(1)  # The handler has forked, and the child did not exit.
            self._print_warnings()
            with self._changed:
                self._call_began = None
                self._is_recording = False
                if event is None:
                    self._flushes_done = flushes
                    if self._is_closing:
                        break
                self._changed.notify_all()
        with self._changed:
            self.miss(len(self._queue))
            self._queue.clear()
            self._flushes_done = self._flushes_wanted
            self._thread = None
            self._changed.notify_all()

    def _call_handler(self, event: Event | TimelineLine | None) -> None:
        try:
            if event is not None:
                SafeHandler.record(self, event)
            else:
                self.call("close" if self._is_closing else "flush")
        except BaseException as problem:  # noqa: BLE001 (other threads wait for this one)
            self.miss(int(event is not None))
            self.add(problem)

    def _has_work(self) -> bool:
        return bool(self._queue) or self._is_closing or self.is_flushing or self.is_dropped


def _before_fork() -> None:
    deadline = time.monotonic() + FORK_S
    for one in [*_all]:
        one.block_calls(max(0.0, deadline - time.monotonic()))


def _after_fork() -> None:
    for one in [*_all]:
        one.allow_calls()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)
