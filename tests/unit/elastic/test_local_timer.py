from __future__ import annotations

import multiprocessing
import os
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.elastic._impl.local_timer import (
    LocalTimerClient,
    LocalTimerServer,
    RequestQueue,
    TimerServer,
)
from holdfast.timers.timer_client import expires
from holdfast.timers.timer_requests import TimerRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def queue() -> Iterator[Any]:
    made: Any = FORK.Queue()
    yield made
    made.close()
    made.join_thread()
    for end in (made._reader, made._writer):  # A queue that was never used keeps them.
        end.close()


def hang(queue: Any, after: float) -> None:
    client = LocalTimerClient(queue)
    with expires(60, "outer", client), expires(after, "inner", client):
        time.sleep(600)


def finish(queue: Any) -> None:
    client = LocalTimerClient(queue)
    with expires(60, "outer", client), expires(60, "inner", client):
        pass


def test_late_child_is_killed_at_its_deadline(queue: Any) -> None:
    dumped: list[int] = []
    # The interval is longer than the test, so the server does not poll.
    server = LocalTimerServer(queue, max_interval=600, dump=dumped.append)
    server.start()
    late = FORK.Process(target=hang, args=(queue, 0.05))
    fine = FORK.Process(target=finish, args=(queue,))
    late.start()
    fine.start()
    late.join(20)
    fine.join(20)
    server.stop()
    assert (late.exitcode, fine.exitcode) == (-9, 0)
    assert dumped == [late.pid]


def test_stopping_does_not_wait_for_the_interval(queue: Any) -> None:
    server = LocalTimerServer(queue, max_interval=600)
    server.start()
    thread = server._thread
    assert thread is not None
    server.stop()
    assert not thread.is_alive()
    server.stop()


def test_only_processes_below_this_one_are_killed(
    queue: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = LocalTimerServer(queue, max_interval=0)
    for pid in (os.getpid(), os.getppid(), 2**22 - 1):  # No process has the last number.
        server.register_timers([TimerRequest(pid, "evil", time.time() - 1)])
    server._run_watchdog()
    assert server.get_expired_timers(time.time()) == {}
    assert len(caplog.messages) == 2


class PlainQueue(RequestQueue):
    """Requests of this process itself."""

    def __init__(self) -> None:
        self.waiting: SimpleQueue[TimerRequest | None] = SimpleQueue()

    def size(self) -> int:
        return self.waiting.qsize()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        found = [self.waiting.get(timeout=timeout)]
        return [one for one in found if one is not None]

    def wake(self) -> None:
        self.waiting.put(None)


class Server(TimerServer):
    """Has workers that are only names; killing one of them takes two attempts."""

    def __init__(self, requests: PlainQueue) -> None:
        super().__init__(requests, max_interval=20)
        self.timers: dict[Any, list[TimerRequest]] = {}
        self.reaped: SimpleQueue[str] = SimpleQueue()
        self.stubborn = {"stubborn"}

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        for one in timer_requests:
            if one.worker_id == "broken":
                raise ZeroDivisionError
            self.timers.setdefault(one.worker_id, []).append(one)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        for worker in worker_ids:
            self.timers.pop(worker, None)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        return {**self.timers}

    def _reap_worker(self, worker_id: Any) -> bool:
        if worker_id in self.stubborn:
            self.stubborn.remove(worker_id)
            raise PermissionError
        self.reaped.put(worker_id)
        return True


def test_server_survives_a_failure_of_its_hooks() -> None:
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
    assert server.timers == {}
