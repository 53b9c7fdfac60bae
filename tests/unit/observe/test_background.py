from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from event_fakes import PATIENCE_S, Blocking, Failing, Keeping, event, names

from holdfast.observe.background import BackgroundHandler
from holdfast.observe.safe_handler import FAULTS_MAX

if TYPE_CHECKING:
    import pytest

    from holdfast.observe.events.event import Event


def test_a_handler_is_called_in_order_in_a_thread_of_its_own() -> None:
    handler = Keeping()
    apart = BackgroundHandler(handler, "mine")
    for number in range(100):
        apart.record(event(str(number)))
    apart.close(PATIENCE_S)
    assert names(handler.got) == [str(number) for number in range(100)]
    assert handler.threads == {"holdfast-events-mine"}
    assert handler.calls == ["close"]


def test_no_thread_begins_before_the_first_event() -> None:
    handler = Keeping()
    apart = BackgroundHandler(handler, "mine")
    before = threading.active_count()
    apart.flush(PATIENCE_S)
    assert threading.active_count() == before
    apart.close(PATIENCE_S)
    apart.close(PATIENCE_S)
    assert handler.calls == ["close"]


def test_flushing_waits_for_what_was_recorded() -> None:
    handler = Keeping()
    apart = BackgroundHandler(handler, "mine")
    for count in (1, 2):
        apart.record(event())
        apart.flush(PATIENCE_S)
        assert len(handler.got) == count
        assert handler.calls == ["flush"] * count
    apart.close(PATIENCE_S)


def test_nobody_waits_for_a_handler_that_blocks(said: pytest.LogCaptureFixture) -> None:
    handler = Blocking()
    apart = BackgroundHandler(handler, "mine", queued_max=2)
    apart.record(event("first"))
    assert handler.entered.wait(PATIENCE_S)
    for number in range(5):
        apart.record(event(str(number)))
    assert said.messages == [
        "the event handler mine is slow: 2 events wait for it, and no more can"
    ]
    handler.go_on.set()
    apart.close(PATIENCE_S)
    assert names(handler.got) == ["first", "0", "1"]
    assert said.messages[1:] == ["3 events were not recorded by the event handler mine"]


def test_one_that_blocks_for_too_long_is_dropped(said: pytest.LogCaptureFixture) -> None:
    handler = Blocking()
    apart = BackgroundHandler(handler, "mine", call_s_max=0.0)
    apart.record(event("stuck"))
    assert handler.entered.wait(PATIENCE_S)
    apart.record(event("late"))
    busy = "has been busy with one event for more than 0 s"
    assert said.messages == [f"the event handler mine {busy}: it gets no more events"]
    apart.close(PATIENCE_S)  # At once, since nothing more is expected of it.
    assert said.messages[1:] == ["2 events were not recorded by the event handler mine"]
    handler.go_on.set()
    assert names(handler.got) == ["stuck"]
    assert handler.calls == []


def test_the_end_waits_no_longer_than_it_may(said: pytest.LogCaptureFixture) -> None:
    handler = Blocking()
    apart = BackgroundHandler(handler, "mine")
    apart.record(event("stuck"))
    assert handler.entered.wait(PATIENCE_S)
    apart.record(event("waits"))
    apart.flush(0.01)
    assert said.messages == ["the event handler mine still has 2 events to take after 0.01 s"]
    apart.close(0.01)
    assert said.messages[1:] == [
        "the event handler mine has not taken all events after 0.01 s: it gets no more events",
        "2 events were not recorded by the event handler mine",
    ]
    handler.go_on.set()


def test_one_that_has_all_but_sends_none_is_waited_for_as_long(
    said: pytest.LogCaptureFixture,
) -> None:
    class Sending(Blocking):
        def record(self, event: Event) -> None: ...

        def flush(self) -> None:
            self.entered.set()
            assert self.go_on.wait(PATIENCE_S)

    handler = Sending()
    apart = BackgroundHandler(handler, "mine")
    apart.record(event())
    apart.flush(0.0)
    assert handler.entered.wait(PATIENCE_S)
    apart.flush(0.01)
    assert said.messages[-1] == "the event handler mine has not sent all events after 0.01 s"
    handler.go_on.set()
    apart.close(PATIENCE_S)


def test_two_who_flush_at_once_each_wait_for_their_own() -> None:
    class Sending(Blocking):
        def record(self, event: Event) -> None:
            if event.name == "second":
                early.append(second_is_back.wait(0.1))  # In vain, unless it has not waited.
            self.got.append(event)

        def flush(self) -> None:
            self.entered.set()
            assert self.go_on.wait(PATIENCE_S)

    def flush_second() -> None:
        apart.flush(PATIENCE_S)
        second_is_back.set()

    early: list[bool] = []
    second_is_back = threading.Event()
    handler = Sending()
    apart = BackgroundHandler(handler, "mine")
    apart.record(event("first"))
    one, other = threading.Thread(target=apart.flush), threading.Thread(target=flush_second)
    one.start()
    assert handler.entered.wait(PATIENCE_S)
    apart.record(event("second"))
    other.start()
    while apart._flushes_wanted < 2:
        threading.Event().wait(0.001)
    handler.go_on.set()
    one.join()
    other.join()
    assert (names(handler.got), early) == (["first", "second"], [False])
    apart.close(PATIENCE_S)


def test_one_that_stays_faulty_is_dropped(said: pytest.LogCaptureFixture) -> None:
    handler = Failing()
    apart = BackgroundHandler(handler, "mine")
    for number in range(FAULTS_MAX + 2):
        apart.record(event(f"bad {number}"))
        apart.flush(PATIENCE_S)
    assert apart.is_dropped
    assert len(handler.got) == FAULTS_MAX
    apart.close(PATIENCE_S)
    assert handler.calls[FAULTS_MAX:] == []
    assert said.messages[0] == "the event handler mine failed: ValueError: cannot do bad 0"
    assert f"failed {FAULTS_MAX} times in a row" in said.text


def test_closing_is_limited_even_if_no_event_ever_came(said: pytest.LogCaptureFixture) -> None:
    class Staying(Blocking):
        def close(self) -> None:
            assert self.go_on.wait(PATIENCE_S)

    handler = Staying()
    BackgroundHandler(handler, "mine").close(0.01)
    assert said.messages == [
        "the event handler mine has not taken all events after 0.01 s: it gets no more events"
    ]
    handler.go_on.set()


def test_a_machine_that_has_no_thread_left_hurts_nobody(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    apart = BackgroundHandler(Keeping(), "mine")
    apart.record(event())
    apart.record(event())
    apart.close(PATIENCE_S)
    why = "cannot have a thread (can't start new thread)"
    assert said.messages == [
        f"the event handler mine {why}: it gets no more events",
        "2 events were not recorded by the event handler mine",
    ]


FORKING = """
import os
from holdfast import events
from holdfast.observe.background import BackgroundHandler as Apart

class Writing(events.EventHandler):
    def record(self, event):
        os.write(1, f"{event.name} {os.getpid() == parent}\\n".encode())

parent = os.getpid()
apart = Apart(Writing(), "mine")
apart.record(events.Event("parent's", events.EventSource.AGENT))
child = os.fork()
if not child:
    apart.close()  # It has nothing to hand over yet, and must not wait for a thread that is not.
    apart.record(events.Event("child's", events.EventSource.AGENT))
    apart.close()
    os._exit(0)
os.waitpid(child, 0)
apart.close()
"""


def test_a_fork_records_with_a_thread_of_its_own() -> None:
    """The thread stays in the parent, and so does what waits for it."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60
    )
    assert sorted(done.stdout.splitlines()) == ["child's False", "parent's True"], done.stderr


PROGRAM = """
import time
from holdfast import events

class Slow(events.EventHandler):
    def record(self, event):
        time.sleep(0.01)
        print(event.name, flush=True)

events.configure(Slow())
for number in range(5):
    events.record(events.Event(str(number), events.EventSource.AGENT))
"""


def test_nothing_is_lost_at_the_end_of_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.split(), done.stderr) == (["0", "1", "2", "3", "4"], "")


def test_a_call_that_a_flush_waited_for_in_vain_is_not_waited_for_again(
    said: pytest.LogCaptureFixture,
) -> None:
    handler = Blocking()
    apart = BackgroundHandler(handler, "mine", call_s_max=PATIENCE_S * 10)
    apart.record(event())
    assert handler.entered.wait(PATIENCE_S)
    apart.flush(0.01)
    apart.close(100.0)
    assert said.messages[1:] == [
        "the event handler mine has not taken all events after 100 s: it gets no more events",
        "1 event was not recorded by the event handler mine",
    ]
    handler.go_on.set()


def test_a_handler_that_ends_its_thread_is_a_faulty_one(said: pytest.LogCaptureFixture) -> None:
    class Leaving(Keeping):
        def record(self, event: Event) -> None:
            raise SystemExit(event.name)

    apart = BackgroundHandler(Leaving(), "mine")
    for number in range(FAULTS_MAX):
        apart.record(event(str(number)))
    apart.close(PATIENCE_S)
    assert said.messages == [
        "the event handler mine failed: SystemExit: 0",
        f"the event handler mine failed {FAULTS_MAX} times in a row: it gets no more events",
        f"{FAULTS_MAX} events were not recorded by the event handler mine",
    ]


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


def test_a_fork_that_a_handler_forgot_to_end_is_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STRAYING],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("the child ended with 1\n", "")


FORKING_MEANWHILE = """
import os, threading, time
from holdfast import events
from holdfast.events import apart

class Locking(events.EventHandler):
    def record(self, event):
        with lock:
            entered.set()
            time.sleep(0.05)

lock, entered = threading.Lock(), threading.Event()
apart.FORK_S = 20.0
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


def test_what_a_handler_locks_is_never_locked_in_a_fork() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING_MEANWHILE],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_fork_waits_for_a_call_that_is_stuck_only_once() -> None:
    handler = Blocking()
    apart = BackgroundHandler(handler, "mine")
    apart.record(event())
    assert handler.entered.wait(PATIENCE_S)
    apart.pause(0.01)
    apart.pause(PATIENCE_S * 100)  # At once.
    apart.resume()
    handler.go_on.set()
    apart.flush(PATIENCE_S)
    apart.pause(PATIENCE_S)
    apart.record(event("held back"))
    assert len(handler.got) == 1
    apart.resume()
    apart.close(PATIENCE_S)
    assert len(handler.got) == 2
