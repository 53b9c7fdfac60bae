"""A handler in its own thread: no caller waits for it, and its limits are enforced."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from event_fakes import PATIENCE_S, BlockingHandler, RecordingHandler, event, names
from holdfast.observe.background import BackgroundHandler
from holdfast.observe.safe_handler import FAULTS_MAX

if TYPE_CHECKING:
    import pytest

    from holdfast.observe.events.event import Event


def run(program: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60
    )
    return done.stdout, done.stderr


def test_events_are_delivered_in_order_in_the_handlers_thread() -> None:
    handler = RecordingHandler()
    background = BackgroundHandler(handler, "mine")
    before = threading.active_count()
    background.flush(PATIENCE_S)
    assert threading.active_count() == before  # No thread before the first event.
    for number in range(100):
        background.record(event(str(number)))
    background.flush(PATIENCE_S)
    assert names(handler.received) == [str(number) for number in range(100)]
    background.close(PATIENCE_S)
    background.close(PATIENCE_S)
    assert handler.threads == {"holdfast-events-mine"}
    assert handler.calls == ["flush", "close"]


def test_blocking_handler_delays_no_caller(log: pytest.LogCaptureFixture) -> None:
    handler = BlockingHandler()
    background = BackgroundHandler(handler, "mine", queued_max=2)
    background.record(event("first"))
    assert handler.entered.wait(PATIENCE_S)
    for number in range(5):
        background.record(event(str(number)))
    assert len(log.messages) == 1
    handler.released.set()
    background.close(PATIENCE_S)
    assert names(handler.received) == ["first", "0", "1"]
    assert len(log.messages) == 2
    assert "3 events" in log.messages[1]


def test_handler_that_blocks_for_too_long_is_dropped(log: pytest.LogCaptureFixture) -> None:
    handler = BlockingHandler()
    background = BackgroundHandler(handler, "mine", call_s_max=0.05)
    background.record(event("stuck"))
    assert handler.entered.wait(PATIENCE_S)
    background.flush(PATIENCE_S)  # Returns as soon as it is dropped.
    assert background.is_dropped
    background.record(event("late"))
    background.close(PATIENCE_S)
    assert "1 event " in log.messages[1]
    assert "1 event " in log.messages[2]
    handler.released.set()
    assert names(handler.received) == ["stuck"]
    assert handler.calls == []


def test_close_waits_no_longer_than_its_limit(log: pytest.LogCaptureFixture) -> None:
    handler = BlockingHandler()
    background = BackgroundHandler(handler, "mine", call_s_max=PATIENCE_S * 10)
    background.record(event("stuck"))
    assert handler.entered.wait(PATIENCE_S)
    background.record(event("queued"))
    background.flush(0.01)
    assert not background.is_dropped
    background.close(100.0)  # It returns immediately, since a flush has waited for this call.
    assert background.is_dropped
    assert "2 events" in log.messages[-1]
    handler.released.set()


def test_concurrent_flushes_each_wait_for_their_own_events() -> None:
    class Sending(BlockingHandler):
        def record(self, event: Event) -> None:
            if event.name == "second":
                early.append(second_is_back.wait(0.1))  # Times out, unless the flush did not wait.
            self.received.append(event)

        def flush(self) -> None:
            self.entered.set()
            assert self.released.wait(PATIENCE_S)

    def flush_second() -> None:
        background.flush(PATIENCE_S)
        second_is_back.set()

    early: list[bool] = []
    second_is_back = threading.Event()
    handler = Sending()
    background = BackgroundHandler(handler, "mine")
    background.record(event("first"))
    one, other = threading.Thread(target=background.flush), threading.Thread(target=flush_second)
    one.start()
    assert handler.entered.wait(PATIENCE_S)
    background.record(event("second"))
    other.start()
    while background._flushes_wanted < 2:
        threading.Event().wait(0.001)
    handler.released.set()
    one.join()
    other.join()
    assert (names(handler.received), early) == (["first", "second"], [False])
    background.close(PATIENCE_S)


def test_handler_that_ends_its_thread_has_failed(log: pytest.LogCaptureFixture) -> None:
    class Leaving(RecordingHandler):
        def record(self, event: Event) -> None:
            raise SystemExit(event.name)

    background = BackgroundHandler(Leaving(), "mine")
    for number in range(FAULTS_MAX):
        background.record(event(str(number)))
    background.close(PATIENCE_S)
    assert background.is_dropped
    assert f"{FAULTS_MAX} events" in log.messages[-1]


def test_failed_thread_start_does_not_affect_the_caller(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    background = BackgroundHandler(RecordingHandler(), "mine")
    background.record(event())
    background.record(event())
    background.close(PATIENCE_S)
    assert "2 events" in log.messages[-1]


FORKING = """
import os
from holdfast import events
from holdfast.observe.background import BackgroundHandler

class Writing(events.EventHandler):
    def record(self, event):
        os.write(1, f"{event.name} {os.getpid() == parent}\\n".encode())

parent = os.getpid()
background = BackgroundHandler(Writing(), "mine")
background.record(events.Event("parent's", events.EventSource.AGENT))
child = os.fork()
if not child:
    background.close()  # It has nothing to deliver yet, and must not wait for a missing thread.
    background.record(events.Event("child's", events.EventSource.AGENT))
    background.close()
    os._exit(0)
os.waitpid(child, 0)
background.close()
"""


def test_forked_child_records_with_its_own_thread() -> None:
    out, err = run(FORKING)
    assert sorted(out.splitlines()) == ["child's False", "parent's True"], err


STRAYING = """
import os
from holdfast import events

class Straying(events.EventHandler):
    def record(self, event):
        if os.fork() == 0:
            return  # Should have been the child's end.
        _, status = os.wait()
        print("the child ended with", os.waitstatus_to_exitcode(status), flush=True)

events.configure(Straying())
events.record(events.Event("it", events.EventSource.AGENT))
"""


def test_child_forked_by_a_handler_is_ended() -> None:
    assert run(STRAYING) == ("the child ended with 1\n", "")


FORKING_MEANWHILE = """
import os, threading, time
from holdfast import events
from holdfast.observe import background

class Locking(events.EventHandler):
    def record(self, event):
        with lock:
            entered.set()
            time.sleep(0.05)

lock, entered = threading.Lock(), threading.Event()
background.FORK_S = 20.0
events.configure(Locking())
for number in range(3):
    events.record(events.Event("it", events.EventSource.AGENT))
entered.wait()
child = os.fork()
if not child:
    os._exit(not lock.acquire(timeout=0.01))
_, status = os.waitpid(child, 0)
events.flush()
print(os.waitstatus_to_exitcode(status))
"""


def test_locks_of_a_handler_are_free_in_a_forked_child() -> None:
    assert run(FORKING_MEANWHILE) == ("0\n", "")


def test_fork_waits_for_a_stuck_call_only_once() -> None:
    handler = BlockingHandler()
    background = BackgroundHandler(handler, "mine")
    background.record(event())
    assert handler.entered.wait(PATIENCE_S)
    background.block_calls(0.01)
    background.block_calls(PATIENCE_S * 100)  # It returns immediately.
    background.allow_calls()
    handler.released.set()
    background.flush(PATIENCE_S)
    background.block_calls(PATIENCE_S)
    background.record(event("held back"))
    assert len(handler.received) == 1
    background.allow_calls()
    background.close(PATIENCE_S)
    assert len(handler.received) == 2
