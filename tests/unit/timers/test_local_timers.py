from __future__ import annotations

import multiprocessing
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from timer_fakes import Record, sleeping

from holdfast.elastic._impl.local_timer import (
    LocalTimerClient,
    LocalTimerServer,
    MultiprocessingRequestQueue,
)
from holdfast.timers.client import expires
from holdfast.timers.protocol import TimerRequest

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


def test_a_child_that_is_late_is_killed_when_it_is_late(queue: Any) -> None:
    record = Record()
    # Nothing is looked at every so often: the interval is longer than the test.
    server = LocalTimerServer(queue, max_interval=600, dump=record.dump)
    server.start()
    late = FORK.Process(target=hang, args=(queue, 0.05))
    fine = FORK.Process(target=finish, args=(queue,))
    late.start()
    fine.start()
    late.join(20)
    fine.join(20)
    server.stop()
    assert (late.exitcode, fine.exitcode) == (-9, 0)
    assert record.said == [f"dump {late.pid}"]


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
    with sleeping() as child:
        gone = child.pid
    for pid in (os.getpid(), os.getppid(), gone):
        server.register_timers([TimerRequest(pid, "evil", time.time() - 1)])
    server._run_watchdog()
    assert server.get_expired_timers(time.time()) == {}
    assert caplog.text.count("not below this one") == 2
    assert "the time is up" not in caplog.text


def test_what_is_no_request_is_refused(queue: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = LocalTimerServer(queue)
    bad: list[Any] = ["a word", TimerRequest("7", "a", 1.0), TimerRequest(7, "a", "soon")]  # type: ignore[arg-type]
    bad.append(TimerRequest(7, "a", float("nan")))  # It would be in the way of all others.
    server.register_timers([*bad, TimerRequest(7, "a", 1.0)])
    assert [*server.get_expired_timers(1.0)] == [7]
    assert caplog.text.count("it cannot be read") == 4


def test_timers_are_kept_by_process_and_scope(queue: Any) -> None:
    server = LocalTimerServer(queue)
    server.register_timers(
        [TimerRequest(1, "a", 1), TimerRequest(1, "b", 2), TimerRequest(2, "a", 3)]
    )
    assert {pid: len(found) for pid, found in server.get_expired_timers(3).items()} == {1: 2, 2: 1}
    server.register_timers([TimerRequest(1, "a", -1)])
    assert {pid: len(found) for pid, found in server.get_expired_timers(3).items()} == {1: 1, 2: 1}
    server.clear_timers({1})
    assert [*server.get_expired_timers(3)] == [2]


def test_a_queue_gives_what_there_is(queue: Any) -> None:
    requests = MultiprocessingRequestQueue(queue)
    assert requests.get(1, 0) == []
    client = LocalTimerClient(queue)
    client.acquire("a", 12.5)
    client.release("a")
    me = os.getpid()
    assert requests.get(2, 20) == [TimerRequest(me, "a", 12.5), TimerRequest(me, "a", -1)]
    assert requests.size() == 0
    requests.wake()
    assert requests.get(1, 20) == []
