from __future__ import annotations

import os
import signal
import stat
import time
from typing import TYPE_CHECKING

import pytest
from timer_fakes import Record, drive, run_python, sleeping

from holdfast.timers import server as fifo
from holdfast.timers import server as file_server
from holdfast.timers.protocol import FileTimerRequest
from holdfast.timers.server import KILL_AGAIN_S, KILLS_MAX, FileTimerServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def make(tmp_path: Path, record: Record) -> Iterator[Callable[..., FileTimerServer]]:
    made = []

    def build(**options: object) -> FileTimerServer:
        given: dict[str, object] = {
            "log_event": record.tell, "dump": record.dump, "kill": record.kill, **options,
        }  # fmt: skip
        server = FileTimerServer(str(tmp_path / "pipe"), "job", 0.1, **given)  # type: ignore[arg-type]
        made.append(server)
        return server

    yield build
    for server in made:
        server.stop()
    assert not (tmp_path / "pipe").exists()


def ask(path: Path, pid: int, scope: str, after: float, signum: int = 9) -> None:
    expires = time.time() + after if after >= 0 else -1
    with open(path / "pipe", "a") as pipe:
        pipe.write(FileTimerRequest(pid, scope, expires, signum).to_json() + "\n")


def test_a_worker_that_is_late_is_ended_and_the_server_goes_on(
    make: Callable[..., FileTimerServer], tmp_path: Path, record: Record
) -> None:
    server = make()
    with sleeping() as first, sleeping() as second:
        ask(tmp_path, first.pid, "step", 0.01)
        drive(server, 1)
        assert first.wait() == -9
        assert record.said == [
            "timer expired: step", f"dump {first.pid}",
            f"kill {first.pid} with 9", "kill worker process: step",
        ]  # fmt: skip
        assert second.poll() is None
        ask(tmp_path, second.pid, "step", 0.01, signal.SIGTERM)
        drive(server, 1)
        assert second.wait() == -signal.SIGTERM
    assert server.next_deadline() is None


def test_nothing_is_due_before_its_time_nor_after_its_release(
    make: Callable[..., FileTimerServer], tmp_path: Path, record: Record
) -> None:
    server = make()
    now = time.monotonic()
    with sleeping() as child:
        ask(tmp_path, child.pid, "outer", 60)
        ask(tmp_path, child.pid, "inner", 5)
        assert server.take(now) == 0
        assert server.next_deadline() == pytest.approx(now + 5, abs=2)
        ask(tmp_path, child.pid, "inner", -1)
        # What has come is taken in before it is asked what is due.
        assert server.take(now + 30) == 0
        assert server.next_deadline() == pytest.approx(now + 60, abs=60)
        assert server.take(now + 200) == 1
        assert child.wait() == -9
    assert record.said[0] == "timer expired: outer"


def test_a_step_of_the_clock_ends_nobody(
    make: Callable[..., FileTimerServer],
    tmp_path: Path,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = make()
    with sleeping() as child:
        ask(tmp_path, child.pid, "step", 60)
        server.take(time.monotonic())
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 86_400)
        assert server.take(time.monotonic()) == 0
    assert record.said == []


def test_a_bad_line_costs_only_itself_and_is_named_a_few_times(
    make: Callable[..., FileTimerServer],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = make()
    with sleeping() as child:
        good = FileTimerRequest(child.pid, "step", time.time() + 60, 9).to_json()
        again = FileTimerRequest(child.pid, "load", time.time() + 60, 9).to_json()
        (tmp_path / "pipe").write_text(good + "\n" + "no json\n" * 100 + again + "\n")
        server.take(time.monotonic())
        expired = server.get_expired_timers(time.time() + 100)
    assert [one.scope_id for one in expired[child.pid]] == ["step", "load"]
    assert caplog.text.count("it cannot be read: no JSON: 'no json'") == 5
    assert caplog.text.count("more of these are not told") == 1


def test_a_writer_that_holds_the_pipe_without_a_line_holds_nobody_up(
    make: Callable[..., FileTimerServer], tmp_path: Path
) -> None:
    server = make()
    with sleeping() as child, open(tmp_path / "pipe", "a") as held:
        ask(tmp_path, child.pid, "step", 0.01)
        held.write('{"version": 1, "pi')
        held.flush()
        drive(server, 1)
        assert child.wait() == -9


def test_only_workers_of_this_agent_may_be_named(
    make: Callable[..., FileTimerServer],
    tmp_path: Path,
    record: Record,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with sleeping() as ours, sleeping() as other:
        server = make(is_ours=lambda pid: pid == ours.pid)
        for pid in (other.pid, os.getpid(), os.getppid(), 1):
            ask(tmp_path, pid, "evil", 0)
        assert server.take(time.monotonic() + 100) == 0
        assert server.next_deadline() is None
        assert caplog.text.count("no worker of this agent") == 4
        assert f"pid {other.pid}, scope 'evil'" in caplog.text
        # By hand anything can be registered; still nobody else is ended.
        server.register_timers([FileTimerRequest(other.pid, "by hand", time.time(), 9)])
        server.take(time.monotonic() + 100)
        assert (other.poll(), ours.poll()) == (None, None)
    assert record.said == []


def test_what_a_process_asked_for_that_has_ended_is_no_fault(
    make: Callable[..., FileTimerServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = make(is_ours=lambda _pid: False)  # Nobody knows any more whose it was.
    with sleeping() as child:
        pass
    ask(tmp_path, child.pid, "its last", 60)
    ask(tmp_path, child.pid, "its last", -1)
    server.take(time.monotonic())
    assert server.next_deadline() is None
    [first, second] = caplog.records
    assert "it names a process that has ended" in first.message
    assert (first.levelname, second.levelname) == ("INFO", "INFO")


def test_those_who_become_late_while_others_are_shown_are_shown_too(
    make: Callable[..., FileTimerServer], tmp_path: Path, record: Record
) -> None:
    with sleeping() as first, sleeping() as second, sleeping() as third:

        def dump(pid: int) -> None:
            record.dump(pid)
            if pid == first.pid:  # The second is late by now; the third has been in time.
                ask(tmp_path, second.pid, "step", 0)
                ask(tmp_path, third.pid, "step", -1)

        server = make(dump=dump)
        ask(tmp_path, first.pid, "step", 0)
        ask(tmp_path, third.pid, "step", 60)
        assert server.take(time.monotonic() + 1) == 2
        assert (first.wait(), second.wait(), third.poll()) == (-9, -9, None)
        assert server.next_deadline() is None
    assert record.said == [
        "timer expired: step", f"dump {first.pid}",
        "timer expired: step", f"dump {second.pid}",
        f"kill {first.pid} with 9", "kill worker process: step",
        f"kill {second.pid} with 9", "kill worker process: step",
    ]  # fmt: skip


def test_whose_a_process_is_is_found_out_once_for_all_requests_that_are_refused(
    make: Callable[..., FileTimerServer], tmp_path: Path
) -> None:
    asked: list[int] = []
    with sleeping() as ours:

        def is_ours(pid: int) -> bool:
            asked.append(pid)
            return pid == ours.pid

        server = make(is_ours=is_ours)
        for number in range(20):
            ask(tmp_path, 1, f"foreign {number}", 60)
        ask(tmp_path, ours.pid, "ours", 60)
        server.take(time.monotonic())
        assert asked == [1, ours.pid]
        assert server.next_deadline() is not None
        ask(tmp_path, 1, "foreign", 60)  # By then the number may be a worker's.
        server.take(time.monotonic())
        assert asked == [1, ours.pid, 1]


def test_without_being_told_it_is_whatever_descends_from_this_process(
    make: Callable[..., FileTimerServer], tmp_path: Path
) -> None:
    server = make()
    with sleeping() as child:
        ask(tmp_path, os.getppid(), "parent", 0)
        ask(tmp_path, child.pid, "child", 60)
        server.take(time.monotonic())
        assert [*server.get_expired_timers(time.time() + 100)] == [child.pid]


def test_a_worker_that_could_not_be_killed_is_tried_again_up_to_a_limit(
    make: Callable[..., FileTimerServer], tmp_path: Path, record: Record
) -> None:
    server = make()
    with sleeping() as child:
        record.kill_fails = 1
        ask(tmp_path, child.pid, "step", 0)
        now = time.monotonic() + 1
        server.take(now)
        assert child.poll() is None
        assert server.next_deadline() == now + KILL_AGAIN_S
        server.take(now + KILL_AGAIN_S)
        assert child.wait() == -9
        assert server.next_deadline() is None
    with sleeping() as child:
        record.kill_fails = 100
        ask(tmp_path, child.pid, "step", 0)
        for _ in range(KILLS_MAX + 2):
            now += KILL_AGAIN_S
            server.take(now)
        record.kill_fails = 0
        assert server.next_deadline() is None
    assert sum(one.startswith(f"kill {child.pid}") for one in record.said) == KILLS_MAX
    assert record.said.count(f"dump {child.pid}") == 1


def test_a_timer_without_a_signal_leaves_the_others_their_time(
    make: Callable[..., FileTimerServer], tmp_path: Path, record: Record
) -> None:
    server = make()
    with sleeping() as child:
        ask(tmp_path, child.pid, "told only", 0, 0)
        ask(tmp_path, child.pid, "deadly", 60, 9)
        now = time.monotonic()
        server.take(now + 1)
        assert record.said == ["timer expired: told only", f"dump {child.pid}"]
        server.take(now + 100)
        assert child.wait() == -9


def test_a_pipe_that_is_filled_as_fast_as_it_is_read_ends_nobody_at_first(
    make: Callable[..., FileTimerServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_server, "TAKE_BYTES_MAX", 10)
    monkeypatch.setattr(fifo, "TAKE_BYTES_MAX", 10)
    server = make()
    with sleeping() as child:
        for _ in range(file_server.FULL_TAKES_MAX - 1):
            ask(tmp_path, child.pid, "step", 0)
            assert server.take(time.monotonic() + 1) == 0
        ask(tmp_path, child.pid, "step", 0)
        assert server.take(time.monotonic() + 1) == 1
        assert child.wait() == -9


WORKER = """
import sys
from holdfast.elastic import timer
timer.configure(timer.FileTimerClient(sys.argv[1]))
with timer.expires(after=60):
    with timer.expires(after=60):
        with timer.expires(after=0.05):
            print("in", flush=True)
            input()
"""


def test_a_worker_with_nested_blocks_is_ended_by_the_inner_one(
    make: Callable[..., FileTimerServer], tmp_path: Path, record: Record
) -> None:
    server = make()
    with run_python(WORKER, str(tmp_path / "pipe")) as worker:
        drive(server, 1)
        assert worker.wait() == -9
    assert [one.scope_id for one in record.requests] == ["<string>#7"] * 2


def test_in_a_thread_it_needs_nobody(
    make: Callable[..., FileTimerServer], tmp_path: Path, record: Record
) -> None:
    server = make()
    server.start()
    server.start()
    with sleeping() as child:
        ask(tmp_path, child.pid, "step", 0.01)
        assert child.wait(20) == -9
    server.stop()
    assert record.said[0] == "watchdog started"
    assert record.said[-1] == "watchdog stopped"
    assert record.said.count("watchdog started") == 1


def test_once_takes_what_has_come_and_stops(
    make: Callable[..., FileTimerServer], tmp_path: Path
) -> None:
    server = make()
    server.start()
    with sleeping() as child:
        ask(tmp_path, child.pid, "step", 0)
        server.run_once()
        assert child.wait() == -9
    assert not (tmp_path / "pipe").exists()
    server.run_once()


def test_the_pipe_is_for_its_owner_only(
    make: Callable[..., FileTimerServer], tmp_path: Path
) -> None:
    make()
    assert stat.S_IMODE((tmp_path / "pipe").lstat().st_mode) == 0o600


def test_its_progress_is_now_unless_it_has_fallen_behind(
    make: Callable[..., FileTimerServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 1000)
    assert server.get_last_progress_time() >= real() + 999
    with sleeping() as child:
        ask(tmp_path, child.pid, "step", 2000)
        assert server.get_last_progress_time() <= real()
        server.take(time.monotonic())
        assert server.get_last_progress_time() >= real() + 999
        server.register_timers([FileTimerRequest(child.pid, "late", time.time() - 1, 0)])
        monkeypatch.setattr(time, "time", lambda: real() + 9000)
        assert server.get_last_progress_time() <= real() + 1001


def test_whether_a_process_is_there() -> None:
    with sleeping() as child:
        assert FileTimerServer.is_process_running(child.pid)
    assert not FileTimerServer.is_process_running(child.pid)
    assert FileTimerServer.is_process_running(1)


def test_forgotten_timers_are_never_due(
    make: Callable[..., FileTimerServer], tmp_path: Path, record: Record
) -> None:
    server = make()
    with sleeping() as child:
        ask(tmp_path, child.pid, "step", 0)
        server._read(time.monotonic())
        server.clear_timers({child.pid})
        assert server.take(time.monotonic() + 10) == 0
        ask(tmp_path, child.pid, "step", 0)
        server._read(time.monotonic())
        server.forget_all()
        assert server.take(time.monotonic() + 10) == 0
    assert record.said == []
