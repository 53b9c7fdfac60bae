from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

from timer_fakes import WAIT_S, Record, sleeping

from holdfast.timers.protocol import FileTimerRequest
from holdfast.timers.reaper import REPORT_ROUNDS_MAX, Reaper, send_signal

if TYPE_CHECKING:
    import pytest


def reaper(record: Record, ours: bool = True) -> Reaper:
    return Reaper(lambda _: ours, dump=record.dump, kill=record.kill, tell=record.tell)


def test_it_is_told_then_dumped_then_killed_then_told(caplog: pytest.LogCaptureFixture) -> None:
    record = Record()
    with sleeping() as child:
        request = FileTimerRequest(child.pid, "step", 1.0, signal.SIGTERM)
        assert reaper(record).expire({child.pid: [request]}) == []
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
        assert reaper(record).expire({child.pid: requests}) == []
        assert child.wait() == -15
    assert record.said[:3] == [f"timer expired: {scope}" for scope in "abc"]
    assert record.said[-1] == "kill worker process: c"


def test_without_a_signal_it_is_told_and_dumped_and_left_alone() -> None:
    record = Record()
    with sleeping() as child:
        told_only = FileTimerRequest(child.pid, "a", 1.0, 0)
        assert reaper(record).expire({child.pid: [told_only]}) == []
        assert child.poll() is None
    assert record.said == ["timer expired: a", f"dump {child.pid}"]


def test_a_dump_that_fails_keeps_nobody_alive(caplog: pytest.LogCaptureFixture) -> None:
    record = Record(dump_fails=True)
    with sleeping() as child:
        late = {child.pid: [FileTimerRequest(child.pid, "a", 1.0, 9)]}
        assert reaper(record).expire(late) == []
        assert child.wait() == -9
    assert "OSError: no stacks today" in caplog.text


def test_a_kill_that_fails_is_said_and_tried_again_alone() -> None:
    record = Record(kill_fails=1)
    with sleeping() as child:
        late = {child.pid: [FileTimerRequest(child.pid, "a", 1.0, 9)]}
        assert reaper(record).expire(late) == [child.pid]
        said = len(record.said)
        assert reaper(record).expire(late, again={child.pid}) == []
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
            late = {pid: [FileTimerRequest(pid, "a", 1.0, 9)]}
            assert reaper(record, ours).expire(late) == []
            assert reaper(record, ours).kill(pid, 9)
        assert child.poll() is None
    assert record.said == []


def test_those_who_are_late_together_are_all_shown_before_the_first_is_killed() -> None:
    record = Record()
    at_once = threading.Barrier(2)  # Were one dumped after the other, it would never open.

    def dump(pid: int) -> None:
        record.dump(pid)
        at_once.wait(WAIT_S)

    with sleeping() as first, sleeping() as second, sleeping() as third, sleeping() as fourth:
        fatal = {
            one.pid: [FileTimerRequest(one.pid, "step", 1.0, 9)] for one in (first, second, third)
        }
        told_only = [FileTimerRequest(fourth.pid, "told only", 1.0, 0)]
        meanwhile = [
            {third.pid: fatal[third.pid], first.pid: fatal[first.pid], fourth.pid: told_only},
            {fourth.pid: [FileTimerRequest(fourth.pid, "deadly", 1.0, 9)]},
            {first.pid: fatal[first.pid]},
        ]
        late = {one.pid: fatal[one.pid] for one in (first, second)}
        made = Reaper(lambda _: True, dump=dump, kill=record.kill, tell=record.tell)

        def more() -> dict[int, list[FileTimerRequest]]:
            if len(meanwhile) == 2:  # From here on there is one at a time.
                made._dump = record.dump
            return meanwhile.pop(0)

        assert made.expire(late, more=more) == []
        workers = (first, second, third, fourth)
        assert [one.wait(WAIT_S) for one in workers] == [-9] * 4
    assert meanwhile == []
    kills = [number for number, said in enumerate(record.said) if said.startswith("kill")]
    shown = record.said[: kills[0]]
    assert sorted(said for said in shown if said.startswith("dump")) == sorted(
        f"dump {one.pid}" for one in (*workers, fourth)
    )
    assert shown.count("timer expired: step") == 3
    assert len(kills) == 2 * len(workers)


def test_nobody_is_asked_for_ever_who_has_become_late_meanwhile() -> None:
    record = Record()
    with sleeping() as child:
        late = {child.pid: [FileTimerRequest(child.pid, "a", 1.0, 0)]}
        found = [late] * REPORT_ROUNDS_MAX
        assert reaper(record).expire(found.pop(), more=found.pop) == []
    assert found == []  # Whoever was found has been shown.
    assert record.said == ["timer expired: a", f"dump {child.pid}"] * REPORT_ROUNDS_MAX


def test_without_threads_the_stacks_are_dumped_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    record = Record()
    with sleeping() as first, sleeping() as second:
        late = {one.pid: [FileTimerRequest(one.pid, "a", 1.0, 0)] for one in (first, second)}
        assert reaper(record).expire(late) == []
    assert record.said[2:] == [f"dump {first.pid}", f"dump {second.pid}"]


def test_one_that_has_ended_by_itself_was_not_killed_for_it() -> None:
    record = Record()
    with sleeping() as child:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # It is there, and not reaped.
        late = {child.pid: [FileTimerRequest(child.pid, "a", 1.0, 9)]}
        assert reaper(record).expire(late) == []
    assert record.said == []


def test_a_process_that_is_gone_needs_no_signal() -> None:
    with sleeping() as child:
        pass
    send_signal(child.pid, signal.SIGKILL)
