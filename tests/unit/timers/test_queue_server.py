from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

from holdfast.elastic._impl.local_timer import RequestQueue, TimerServer
from holdfast.timers.protocol import TimerRequest

if TYPE_CHECKING:
    import pytest


class PlainQueue(RequestQueue):
    """Requests of this very process."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[TimerRequest | None] = queue.SimpleQueue()

    def size(self) -> int:
        return self.waiting.qsize()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        found = [self.waiting.get(timeout=timeout)]
        return [one for one in found if one is not None]

    def wake(self) -> None:
        self.waiting.put(None)


class Server(TimerServer):
    """Has workers that are mere names; one of them takes two attempts."""

    def __init__(self, requests: PlainQueue) -> None:
        super().__init__(requests, max_interval=20)
        self.timers: dict[Any, list[TimerRequest]] = {}
        self.reaped: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.stubborn = {"stubborn"}

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        for one in timer_requests:
            if one.worker_id == "broken":
                raise ZeroDivisionError("a fault of this server")
            self.timers.setdefault(one.worker_id, []).append(one)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        for worker in worker_ids:
            self.timers.pop(worker, None)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        late = {
            worker: [one for one in timers if one.expiration_time <= deadline]
            for worker, timers in self.timers.items()
        }
        return {worker: timers for worker, timers in late.items() if timers}

    def _reap_worker(self, worker_id: Any) -> bool:
        if worker_id in self.stubborn:
            self.stubborn.remove(worker_id)
            raise PermissionError("not yet")
        self.reaped.put(worker_id)
        return True


def test_workers_of_any_kind_are_watched_and_a_fault_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = PlainQueue()
    server = Server(requests)
    server.start()
    server.start()
    for worker in ("broken", "late", "stubborn"):
        requests.waiting.put(TimerRequest(worker, "step", 1.0))
    assert server.reaped.get(timeout=20) == "late"
    requests.wake()
    assert server.reaped.get(timeout=20) == "stubborn"
    server.stop()
    server.stop()
    assert "ZeroDivisionError: a fault of this server" in caplog.text
    assert "worker stubborn could not be ended: not yet" in caplog.text
    assert server.timers == {}
