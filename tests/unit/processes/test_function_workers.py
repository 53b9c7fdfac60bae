"""Functions as workers, by each start method."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import functions_to_call as fns
import pytest
from functions_to_call import add

from holdfast.errors import EnvironmentProblem
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.logs.std import Std
from holdfast.processes.workers import function_child
from holdfast.processes.workers.function_workers import FunctionGroup
from holdfast.processes.workers.group import GroupSpec, start_group
from real_jobs import Watched, WorkerMessages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

    from holdfast.processes.workers.group import RunProcsResult


PATIENCE_S = 60
METHODS = ("spawn", "fork", "forkserver")
FRESH_METHODS = ("spawn", "forkserver")  # Their workers do not share our memory.


class Callers:
    """Makes contexts of functions, and closes them with the test."""

    def __init__(self, folder: Path, method: str) -> None:
        self.folder = folder
        self.method = method
        self.made: list[FunctionGroup] = []

    def start(self, fn: Callable[..., Any], *args: tuple[Any, ...]) -> FunctionGroup:
        """Start one worker for each tuple of arguments."""
        logs = DefaultLogsSpecs(log_dir=str(self.folder / "logs"), redirects=Std.ALL)
        envs = {rank: {"RANK": str(rank)} for rank in range(len(args))}
        context = FunctionGroup(
            GroupSpec("x", fn, dict(enumerate(args)), envs, logs, start_method=self.method)
        )
        self.made.append(context)
        context.start()
        return context

    def result(self, fn: Callable[..., Any], *args: tuple[Any, ...]) -> RunProcsResult:
        return finished(self.start(fn, *args))

    def value(self, fn: Callable[..., Any], *args: Any) -> Any:
        result = self.result(fn, args)
        assert not result.failures, result.failures
        return result.return_values[0]

    def close(self) -> None:
        for context in self.made:
            context.close(signal.SIGKILL)
        self.made.clear()  # Also frees the arguments, which may hold descriptors.


def finished(context: FunctionGroup) -> RunProcsResult:
    result = context.wait(PATIENCE_S)
    assert result is not None, "the workers did not end"
    return result


def callers_of(tmp_path: Path, method: str) -> Iterator[Callers]:
    made = Callers(tmp_path, method)
    yield made
    made.close()


@pytest.fixture(params=METHODS)
def callers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callers]:
    yield from callers_of(tmp_path, request.param)


@pytest.fixture(params=FRESH_METHODS)
def fresh(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callers]:
    yield from callers_of(tmp_path, request.param)


@pytest.fixture
def forking(tmp_path: Path) -> Iterator[Callers]:
    yield from callers_of(tmp_path, "fork")


@pytest.fixture
def messages(tmp_path: Path) -> Iterator[WorkerMessages]:
    made = WorkerMessages(tmp_path)
    yield made
    made.close()


def test_too_large_return_value_is_rejected(
    forking: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_child, "RESULT_BYTES_MAX", 1000)
    failures = forking.result(fns.give_many_bytes, (4096,), (256,)).failures
    assert failures[0].exitcode == 1
    assert "give_many_bytes" in failures[0].recorded_message()


def test_invalid_return_value_does_not_block_the_agent(
    fresh: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit here is lower than in the worker, as if another process wrote to its pipe."""
    monkeypatch.setattr(function_child, "RESULT_BYTES_MAX", 1000)
    failures = fresh.result(fns.give_many_bytes, (4096,)).failures
    assert failures[0].detail == "sent back more than 1000 bytes as its return value"
    failures = fresh.result(fns.give_many_bytes, (4096,), (20 << 20,)).failures
    assert failures[1].exitcode == 1  # Its pipe broke.
    assert all(returned.data == b"" for one in fresh.made for returned in one._returned.values())


def test_unpicklable_return_value_is_a_failure(callers: Callers) -> None:
    failure = callers.result(fns.give_lock, ()).failures[0]
    assert failure.exitcode == 1
    assert "give_lock" in failure.recorded_message()
    assert failure.recorded_message() in failure.stderr_tail


def test_exception_of_a_function_is_recorded_and_printed(callers: Callers) -> None:
    result = callers.result(fns.fail, ("on purpose",))
    failure = result.failures[0]
    assert (failure.exitcode, failure.consequence) == (1, False)
    assert failure.error_file == callers.made[0].error_files[0]
    assert failure.recorded_message() == "RuntimeError: on purpose"
    for text in (failure.recorded_traceback(), failure.stderr_tail.strip()):
        assert text.startswith("Traceback")
        assert text.endswith("RuntimeError: on purpose")
        assert "in fail" in text
    assert result.return_values == {}


def test_worker_that_exits_without_returning_has_failed(callers: Callers) -> None:
    result = callers.result(fns.leave_at_once, (0,))
    failure = result.failures[0]
    assert failure.exitcode == 0
    assert failure.detail.startswith("exited with code 0 without a return value")
    assert result.is_failed()
    assert callers.result(fns.leave_at_once, (9,)).failures[0].exitcode == 9


def test_workers_share_objects_of_multiprocessing(callers: Callers) -> None:
    context = multiprocessing.get_context(callers.method)
    queue, event, lock = context.Queue(), context.Event(), context.Lock()
    ours, theirs = context.Pipe()
    started = callers.start(fns.use_all, (queue, event, lock, theirs))
    assert queue.get(timeout=PATIENCE_S) == "from the worker"
    assert ours.recv() == {"pid": started.pids()[0]}
    ours.send("an answer")
    event.set()
    result = finished(started)
    assert result.return_values == {0: "an answer"}
    for one in (ours, theirs, queue):
        one.close()
    queue.join_thread()


def test_worker_that_has_returned_stays_until_all_have(callers: Callers) -> None:
    ends = multiprocessing.get_context(callers.method).Pipe()
    result = callers.result(fns.is_alive_after_return, (ends[0], True), (ends[1], False))
    assert result.return_values == {0: True, 1: True}
    for one in ends:
        one.close()


def test_worker_waits_for_native_threads_before_it_exits() -> None:
    """Like a thread of gloo that needs the interpreter once more, to release a tensor."""
    has_run = []

    def run(_: object) -> None:
        for _ in range(1000):
            pass
        has_run.append(True)

    native_run = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(run)
    thread = ctypes.c_ulong()
    library = ctypes.CDLL(None)
    assert library.pthread_create(ctypes.byref(thread), None, native_run, None) == 0
    function_child.await_native_threads()
    assert has_run
    library.pthread_join(thread, None)


def test_failure_stops_a_worker_that_has_returned(callers: Callers) -> None:
    result = callers.result(fns.fail_if_told, (False,), (True,))
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {1: 1}


def test_a_queue_is_flushed_before_the_worker_ends(callers: Callers) -> None:
    queue = multiprocessing.get_context(callers.method).Queue()
    items = [bytes([number]) * 50_000 for number in range(20)]
    started = callers.start(fns.put_and_return, (queue, items))
    assert [queue.get(timeout=PATIENCE_S) for _ in items] == items
    assert finished(started).return_values == {0: 20}
    queue.close()
    queue.join_thread()


def test_functions_have_pythons_default_signal_actions(callers: Callers) -> None:
    handlers = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGUSR1)
    }
    try:
        assert callers.value(fns.signal_actions) == (True, True, set())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_signal_whose_exception_python_ignores_is_sent_again(
    callers: Callers, tmp_path: Path
) -> None:
    messages = WorkerMessages(tmp_path)
    started = callers.start(fns.wait_in_a_finalizer, (str(messages.path), str(tmp_path / "left")))
    os.kill(messages.take(1)["waits"], signal.SIGTERM)
    assert finished(started).failures[0].exitcode == -signal.SIGTERM
    assert (tmp_path / "left").read_text() == "tidy"
    messages.close()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_raises_in_the_function(
    callers: Callers, tmp_path: Path, signum: signal.Signals
) -> None:
    """torch's functions do the same with `fork`. Here the worker then dies of the signal."""
    messages = WorkerMessages(tmp_path)
    started = callers.start(fns.wait_and_tidy_up, (str(messages.path), str(tmp_path / "left")))
    os.kill(messages.take(1)["waits"], signum)
    assert finished(started).failures[0].exitcode == -signum
    assert (tmp_path / "left").read_text() == "tidy"
    messages.close()


def test_function_in_native_code_is_killed_by_the_signal(callers: Callers, tmp_path: Path) -> None:
    messages = WorkerMessages(tmp_path)
    started = callers.start(fns.wait_in_native_code, (str(messages.path),))
    os.kill(messages.take(1)["waits"], signal.SIGTERM)
    assert finished(started).failures[0].exitcode == -signal.SIGTERM
    messages.close()


def test_forks_of_a_function_have_the_default_signal_actions(callers: Callers) -> None:
    assert callers.value(fns.signals_of_a_child) == 0


START = """
    import os, tempfile
    from holdfast.processes.logs.specs import DefaultLogsSpecs
    from holdfast.processes.workers.group import GroupSpec, start_group
    def start(fn, method, *args):
        with tempfile.TemporaryDirectory() as folder:
            logs = DefaultLogsSpecs(log_dir=folder)
            context = start_group(GroupSpec("x", fn, {0: args}, {0: {}}, logs, start_method=method))
            result = context.wait(60)
            context.close()
            for failure in result.failures.values():
                return f"failed: {failure.exitcode} {failure.recorded_message()}"
            return result.return_values[0]
"""


def test_script_that_blocks_on_import_dies_with_the_agent(
    tmp_path: Path, messages: WorkerMessages
) -> None:
    (tmp_path / "start.py").write_text(textwrap.dedent(START))
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            f"""
            import os, signal
            from start import start
            def fn(): pass
            if __name__ == "__main__":
                start(fn, "forkserver")
            with open({str(messages.path)!r}, "w") as stream:
                stream.write(f"importing {{os.getpid()}}\\n")
            signal.pause()
            """
        )
    )
    agent = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path)
    server = Watched(int(messages.next()[1]))
    agent.kill()
    agent.wait(PATIENCE_S)
    server.wait_until_exited()


def logs(folder: Path) -> DefaultLogsSpecs:
    return DefaultLogsSpecs(log_dir=str(folder / "logs"))


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_too_few_descriptors_are_an_environment_problem(tmp_path: Path, method: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    args: dict[int, tuple[object, ...]] = dict.fromkeys(range(100), (1, 1))
    envs: dict[int, dict[str, str]] = {rank: {} for rank in args}
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
    try:
        with pytest.raises(EnvironmentProblem, match=r"^cannot start 100 .*`ulimit -n`"):
            start_group(GroupSpec("x", add, args, envs, logs(tmp_path), start_method=method))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
