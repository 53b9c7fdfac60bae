from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from watching import Record, sleeping

from holdfast.timers.reaping import Reaper, send_signal
from holdfast.timers.requests import FileTimerRequest

if TYPE_CHECKING:
    import pytest


def reaper(record: Record, ours: bool = True) -> Reaper:
    return Reaper(lambda _: ours, dump=record.dump, kill=record.kill, tell=record.tell)


def test_it_is_told_then_dumped_then_killed_then_told(caplog: pytest.LogCaptureFixture) -> None:
    record = Record()
    with sleeping() as child:
        request = FileTimerRequest(child.pid, "step", 1.0, signal.SIGTERM)
        assert reaper(record).expire(child.pid, [request])
        assert child.wait() == -signal.SIGTERM
    assert record.said == [
        "timer expired: step",
        f"dump {child.pid}",
        f"kill {child.pid} with 15",
        "kill worker process: step",
    ]
    told = caplog.text
    assert f"'step' (pid {child.pid}): it is killed with signal 15" in told


def test_the_first_timer_with_a_signal_says_which() -> None:
    record = Record()
    with sleeping() as child:
        requests = [
            FileTimerRequest(child.pid, scope, 1.0, signum)
            for scope, signum in (("a", 0), ("b", -1), ("c", 15), ("d", 9))
        ]
        assert reaper(record).expire(child.pid, requests)
        assert child.wait() == -15
    assert record.said[:3] == [f"timer expired: {scope}" for scope in "abc"]
    assert record.said[-1] == "kill worker process: c"


def test_without_a_signal_it_is_told_and_dumped_and_left_alone() -> None:
    record = Record()
    with sleeping() as child:
        assert reaper(record).expire(child.pid, [FileTimerRequest(child.pid, "a", 1.0, 0)])
        assert child.poll() is None
    assert record.said == ["timer expired: a", f"dump {child.pid}"]


def test_a_dump_that_fails_keeps_nobody_alive(caplog: pytest.LogCaptureFixture) -> None:
    record = Record(dump_fails=True)
    with sleeping() as child:
        assert reaper(record).expire(child.pid, [FileTimerRequest(child.pid, "a", 1.0, 9)])
        assert child.wait() == -9
    assert "OSError: no stacks today" in caplog.text


def test_a_kill_that_fails_is_said_and_tried_again_alone() -> None:
    record = Record(kill_fails=1)
    with sleeping() as child:
        requests = [FileTimerRequest(child.pid, "a", 1.0, 9)]
        assert not reaper(record).expire(child.pid, requests)
        said = len(record.said)
        assert reaper(record).expire(child.pid, requests, again=True)
        assert child.wait() == -9
    assert record.said[said:] == [f"kill {child.pid} with 9", "kill worker process: a"]


def test_nobody_else_and_not_this_process_is_ever_signalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Record()
    # Were it wrong, it would end far more than a test.
    monkeypatch.setattr(record, "kill", lambda pid, _: record.said.append(f"kill {pid}"))
    with sleeping() as child:
        for pid, ours in ((child.pid, False), (os.getpid(), True), (0, True), (-1, True)):
            assert reaper(record, ours).expire(pid, [FileTimerRequest(pid, "a", 1.0, 9)])
            assert reaper(record, ours).kill(pid, 9)
        assert child.poll() is None
    assert record.said == []


def test_a_process_that_is_gone_needs_no_signal() -> None:
    with sleeping() as child:
        pass
    send_signal(child.pid, signal.SIGKILL)
