"""The frame of a timer server that gets its requests from a queue; `local_timers` fills it in.

For one's own kinds of queue and of worker: a subclass says how timers are kept and workers ended.
"""

from __future__ import annotations

import abc
import time

from holdfast import messages

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from typing import Any

    from holdfast.timers.requests import TimerRequest

FAULT_PAUSE_S = 0.1


class RequestQueue(abc.ABC):
    """Where a server gets its requests from."""

    @abc.abstractmethod
    def size(self) -> int:
        """Return about how many requests are waiting."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return up to `size` requests, after `timeout` seconds at the latest."""

    def wake(self) -> None:
        """Have a `get` that waits return; one that cannot be woken waits for its timeout."""
        return


class TimerServer(abc.ABC):
    """Takes requests in a thread, and ends the workers that have timers which expired."""

    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool = True
    ) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._thread: threading.Thread | None = None
        self._stopping = False

    @abc.abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Set or release timers."""

    @abc.abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of some workers."""

    @abc.abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Return the timers that expire up to a time of day, by worker."""

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker; return whether it has ended, or else it is tried again."""

    def next_deadline(self) -> float | None:
        """Return when to look next, by the monotonic clock; None for `max_interval` from now."""
        return None

    def start(self) -> None:
        """Watch in a thread."""
        import threading

        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(
                target=self._watchdog_loop, name="holdfast-timers", daemon=self._daemon
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop watching, after `max_interval` at the latest."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping = True
            self._request_queue.wake()
            thread.join(self._max_interval)

    def _watchdog_loop(self) -> None:
        told = False
        while not self._stopping:
            try:
                self._run_watchdog()
            except Exception as problem:  # noqa: BLE001 (a watchdog goes on)
                if not told:
                    kind = type(problem).__name__
                    messages.warning(f"the watchdog had a fault and goes on: {kind}: {problem}")
                told = True
                time.sleep(FAULT_PAUSE_S)  # What failed may fail at once again.

    def _run_watchdog(self) -> None:
        queue = self._request_queue
        self.register_timers(queue.get(max(1, queue.size()), self._wait_s()))
        ended = set()
        for worker_id, timers in self._expired_now().items():
            messages.error(
                f"the time is up for worker {worker_id} in {', '.join(self._get_scopes(timers))}"
            )
            if self._reap_worker_no_throw(worker_id):
                ended.add(worker_id)
        self.clear_timers(ended)

    def _wait_s(self) -> float:
        deadline = self.next_deadline()
        if deadline is None:
            return self._max_interval
        return min(self._max_interval, max(0.0, deadline - time.monotonic()))

    def _expired_now(self) -> dict[Any, list[TimerRequest]]:
        return self.get_expired_timers(time.time())

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception as problem:  # noqa: BLE001 (it is tried again)
            messages.warning(f"worker {worker_id} could not be ended: {problem}")
            return False

    def _get_scopes(self, timer_requests: list[TimerRequest]) -> list[str]:
        return [one.scope_id for one in timer_requests]
