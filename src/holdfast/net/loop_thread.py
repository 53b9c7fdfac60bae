"""A daemon thread that runs an asyncio loop, for code that is not asynchronous.

It never fails silently: every unexpected error in the loop is passed to `on_fault` as one line, and the loop
continues. Python delivers signals to the main thread; this thread blocks no signals.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

STOP_S = 5.0  # The loop does not block, so only a stuck machine needs more.

T = TypeVar("T")


class LoopThread:
    """A loop in its own thread, from `start` until `stop`."""

    def __init__(self, name: str, on_fault: Callable[[str], None]) -> None:
        self.loop = asyncio.new_event_loop()
        self._on_fault = on_fault
        self.loop.set_exception_handler(self._faulted)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def runs(self) -> bool:
        """Whether the loop still accepts calls."""
        return self._thread.is_alive() and not self.loop.is_closed()

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:
            self.loop.close()
            raise

    def post(self, call: Callable[..., object], *args: Any) -> bool:
        """Schedule a call in the loop; return False if the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            return False
        return True

    def run(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run a coroutine in the loop and return its result; raise `TimeoutError` past the limit."""
        if not self.runs or self._thread is threading.current_thread():
            work.close()
            raise RuntimeError("the loop has ended, or would wait for itself")
        answer: Future[T] = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return answer.result(limit_s)
        except BaseException:
            answer.cancel()
            raise

    def stop(self) -> None:
        """Stop the loop and the thread; cancel the tasks that still run there."""
        if self._thread.ident is None:
            self.loop.close()
            return
        self.post(self.loop.stop)
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=STOP_S))
        except BaseException as error:  # noqa: BLE001 (a thread must not die silently)
            self._on_fault(f"{type(error).__name__}: {error}")
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()

    def _faulted(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # noqa: ARG002
        error = context.get("exception")
        what = f"{type(error).__name__}: {error}" if error is not None else ""
        self._on_fault(f"{context.get('message', '')} {what}".strip())
