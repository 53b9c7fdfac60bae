"""Late workers, and only these, are reported, dumped and killed, in this order."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
from timer_fakes import WAIT_S, Record, drive, run_python, sleeping

from holdfast.elastic._impl.file_timer import FileTimerServer, ServerThread
from holdfast.timers import pipe, worker_timers
from holdfast.timers.reaper import REPORT_ROUNDS_MAX, Reaper, fatal_of, send_signal
from holdfast.timers.timer_requests import NAMED_MAX, FileTimerRequest
from holdfast.timers.worker_timers import KILL_AGAIN_S, KILLS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    Make = Callable[..., FileTimerServer]


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def make(tmp_path: Path, record: Record) -> Iterator[Make]:
    made = []

    def build(**options: object) -> FileTimerServer:
        given: dict[str, object] = {
            "log_event": record.report, "dump": record.dump, "kill": record.kill, **options,
        }  # fmt: skip
        one = FileTimerServer(str(tmp_path / "pipe"), "job", 0.1, **given)  # type: ignore[arg-type]
        made.append(one)
        return one

    yield build
    for one in made:
        one.stop()
    assert not (tmp_path / "pipe").exists()


def ask(path: Path, pid: int, scope: str, after: float, signum: int = 9) -> None:
    expires = time.time() + after if after >= 0 else -1
    with open(path / "pipe", "a") as pipe:
        pipe.write(FileTimerRequest(pid, scope, expires, signum).to_json() + "\n")


def killed(pid: int, scope: str = "step", signum: int = 9) -> list[str]:
    return [
        f"timer expired: {scope}", f"dump {pid}",
        f"kill {pid} with {signum}", f"kill worker process: {scope}",
    ]  # fmt: skip


def test_late_worker_is_killed_and_the_server_continues(
    make: Make, tmp_path: Path, record: Record
) -> None:
    watching = make()
    with sleeping() as first, sleeping() as second, open(tmp_path / "pipe", "a") as held:
        ask(tmp_path, first.pid, "step", 0.01)
        held.write('{"version": 1, "pi')  # A writer of an incomplete line does not block others.
        held.flush()
        drive(watching, 1)
        assert first.wait() == -9
        ask(tmp_path, second.pid, "step", 0.01, signal.SIGTERM)
        drive(watching, 1)
        assert second.wait() == -signal.SIGTERM
    assert record.log == killed(first.pid) + killed(second.pid, signum=15)
    assert watching.next_deadline() is None


def test_timer_is_not_due_before_its_time_or_after_its_release(
    make: Make, tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = make()
    now = time.monotonic()
    with sleeping() as child:
        ask(tmp_path, child.pid, "outer", 60)
        ask(tmp_path, child.pid, "inner", 5)
        assert watching.check(now) == 0
        assert watching.next_deadline() == pytest.approx(now + 5, abs=2)
        ask(tmp_path, child.pid, "inner", -1)
        assert watching.check(now + 30) == 0  # Requests are read before deadlines are checked.
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 86_400)
        assert watching.check(now + 30) == 0  # A step of the clock kills no worker.
        monkeypatch.undo()
        assert watching.check(now + 200) == 1
        assert child.wait() == -9
    assert record.log == killed(child.pid, "outer")


def test_invalid_lines_are_reported_a_few_times(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching = make()
    with sleeping() as child:
        good, again = (
            FileTimerRequest(child.pid, scope, time.time() + 60, 9).to_json()
            for scope in ("step", "load")
        )
        (tmp_path / "pipe").write_text(good + "\n" + "no json\n" * 100 + again + "\n")
        watching.check(time.monotonic())
        expired = watching.get_expired_timers(time.time() + 100)
    assert [one.scope_id for one in expired[child.pid]] == ["step", "load"]
    assert len(caplog.messages) == NAMED_MAX + 1


def test_requests_may_name_only_workers_of_this_agent(
    make: Make, tmp_path: Path, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []
    with sleeping() as ours, sleeping() as other, sleeping() as gone:
        gone.kill()
        gone.wait()

        def is_ours(pid: int) -> bool:
            asked.append(pid)
            return pid == ours.pid

        watching = make(is_ours=is_ours)
        for _ in range(3):
            for pid in (other.pid, os.getpid(), os.getppid(), 1, gone.pid):
                ask(tmp_path, pid, "evil", 0)
        assert watching.check(time.monotonic() + 100) == 0
        assert watching.next_deadline() is None
        assert f"pid {other.pid}, scope 'evil'" in caplog.text
        assert str(gone.pid) not in caplog.text  # Probably a worker's, so only for LOGLEVEL=INFO.
        assert sorted(asked) == sorted({*asked} - {os.getpid()})  # Once for each.
        # `register_timers` accepts any process, but only workers are killed.
        watching.register_timers([FileTimerRequest(other.pid, "by hand", time.time(), 9)])
        watching.check(time.monotonic() + 100)
        assert (other.poll(), ours.poll()) == (None, None)
    assert record.log == []


def test_newly_late_workers_are_dumped_before_the_first_kill(
    make: Make, tmp_path: Path, record: Record
) -> None:
    with sleeping() as first, sleeping() as second, sleeping() as third:

        def dump(pid: int) -> None:
            record.dump(pid)
            if pid == first.pid:  # The second is late by now; the third has released its timer.
                ask(tmp_path, second.pid, "step", 0)
                ask(tmp_path, third.pid, "step", -1)

        watching = make(dump=dump)
        ask(tmp_path, first.pid, "step", 0)
        ask(tmp_path, third.pid, "step", 60)
        assert watching.check(time.monotonic() + 1) == 2
        assert (first.wait(), second.wait(), third.poll()) == (-9, -9, None)
        assert watching.next_deadline() is None
    one, two = killed(first.pid), killed(second.pid)
    assert record.log == one[:2] + two[:2] + one[2:] + two[2:]


def test_kill_is_retried_up_to_a_limit(make: Make, tmp_path: Path, record: Record) -> None:
    watching = make()
    now = time.monotonic() + 1
    for failures in (1, 100):
        with sleeping() as child:
            record.kill_fails = failures
            ask(tmp_path, child.pid, "step", 0)
            watching.check(now)
            assert watching.next_deadline() == now + KILL_AGAIN_S
            for _ in range(KILLS_MAX + 2):
                now += KILL_AGAIN_S
                watching.check(now)
            record.kill_fails = 0
            assert watching.next_deadline() is None
            if failures == 1:
                assert child.wait(WAIT_S) == -9
            kills = sum(one.startswith(f"kill {child.pid}") for one in record.log)
            assert kills == min(failures + 1, KILLS_MAX)
            assert record.log.count(f"dump {child.pid}") == 1


def test_constantly_full_pipe_delays_kills(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_timers, "TAKE_BYTES_MAX", 10)
    monkeypatch.setattr(pipe, "TAKE_BYTES_MAX", 10)
    watching = make()
    with sleeping() as child:
        for late in [0] * (worker_timers.FULL_READS_MAX - 1) + [1]:
            ask(tmp_path, child.pid, "step", 0)
            assert watching.check(time.monotonic() + 1) == late
        assert child.wait() == -9


WORKER = """
import sys
from holdfast.elastic import timer
timer.configure(timer.FileTimerClient(sys.argv[1]))
with timer.expires(after=60):
    with timer.expires(after=0.05):
        input()
"""


def test_server_runs_in_its_own_thread(make: Make, tmp_path: Path, record: Record) -> None:
    watching = make()
    watching.start()
    watching.start()
    with run_python(WORKER, str(tmp_path / "pipe")) as worker:
        assert worker.wait(WAIT_S) == -9
    watching.stop()
    assert {one.scope_id for one in record.requests} == {"<string>#6"}
    assert [one for one in record.log if one.startswith("watchdog")] == [
        "watchdog started",
        "watchdog stopped",
    ]
    watching = make()
    watching.start()
    with sleeping() as child:
        ask(tmp_path, child.pid, "step", 0)
        watching.run_once()  # Reads the pending requests, and stops.
        assert child.wait() == -9
    watching.run_once()
    assert not FileTimerServer.is_process_running(child.pid)
    assert FileTimerServer.is_process_running(1)


def test_server_thread_survives_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    readable, writable = os.pipe()
    took = threading.Semaphore(0)

    class Failing:
        takes = 0

        def fileno(self) -> int:
            return readable

        def next_deadline(self) -> float | None:
            return None

        def check(self, now: float) -> None:
            self.takes += 1
            took.release()
            if self.takes == 1:
                raise ZeroDivisionError
            os.set_blocking(readable, False)
            try:
                os.read(readable, 100)
            except BlockingIOError:
                pass

    failing = Failing()
    thread = ServerThread(failing, daemon=True)  # type: ignore[arg-type]
    os.write(writable, b"a")
    assert took.acquire(timeout=20)
    assert took.acquire(timeout=20)
    thread.stop()
    assert len(caplog.messages) == 1
    assert failing.takes <= 4
    os.close(readable)
    os.close(writable)


def reaper(record: Record, ours: bool = True) -> Reaper:
    return Reaper(lambda _: ours, dump=record.dump, kill=record.kill, report=record.report)


def expire(
    one: Reaper,
    late: Mapping[int, Sequence[FileTimerRequest]],
    more: Callable[[], Mapping[int, Sequence[FileTimerRequest]]] | None = None,
) -> None:
    """Report, dump and signal late processes."""
    for pid, requests in one.report_and_dump(late, more=more).items():
        fatal = fatal_of(requests)
        assert fatal is None or one.send(pid, fatal.signal, requests)


def late(pid: int, *timers: tuple[str, int]) -> dict[int, list[FileTimerRequest]]:
    return {pid: [FileTimerRequest(pid, scope, 1.0, signum) for scope, signum in timers]}


def test_first_timer_with_a_signal_decides() -> None:
    record = Record(dump_fails=True)  # The worker is killed even if the dump fails.
    with sleeping() as child:
        found = late(child.pid, ("a", 0), ("b", -1), ("c", 15), ("d", 9))
        expire(reaper(record), found)
        assert child.wait() == -15
    assert record.log[:3] == [f"timer expired: {scope}" for scope in "abc"]
    assert record.log[-1] == "kill worker process: c"


def test_only_own_workers_are_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record()
    # An error here would kill far more than a test.
    monkeypatch.setattr(record, "kill", lambda pid, _: record.log.append(f"kill {pid}"))
    with sleeping() as child, sleeping() as zombie:
        zombie.kill()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # It exists and is not reaped.
        for pid, ours in (
            (child.pid, False), (os.getpid(), True), (0, True), (-1, True), (zombie.pid, True),
        ):  # fmt: skip
            expire(reaper(record, ours), late(pid, ("a", 9)))
        assert child.poll() is None
    assert record.log == []
    send_signal(zombie.pid, signal.SIGKILL)  # It no longer exists.


def test_dumps_run_in_parallel_or_sequentially_without_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    record = Record()
    at_once = threading.Barrier(2)  # It would never open if the dumps were sequential.
    with sleeping() as first, sleeping() as second:
        both = late(first.pid, ("a", 0)) | late(second.pid, ("a", 0))
        together = Reaper(lambda _: True, dump=lambda _: at_once.wait(WAIT_S))
        expire(together, both)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        expire(reaper(record), both)
    assert not at_once.broken
    assert record.log[2:] == [f"dump {first.pid}", f"dump {second.pid}"]


def test_search_for_late_workers_is_bounded() -> None:
    record = Record()
    with sleeping() as child:
        found = [late(child.pid, ("a", 0))] * REPORT_ROUNDS_MAX
        expire(reaper(record), found.pop(), found.pop)
    assert found == []
    assert record.log == killed(child.pid, "a")[:2] * REPORT_ROUNDS_MAX
