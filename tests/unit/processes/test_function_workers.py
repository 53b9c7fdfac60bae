from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING

import functions_to_call as fns
import pytest

from holdfast.errors import UsageError
from holdfast.processes.logs.specs import DefaultLogsSpecs, Std
from holdfast.processes.workers import function_child
from holdfast.processes.workers.function_workers import MultiprocessContext
from real_jobs import News, Watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

    from holdfast.processes.failures.exits import RunProcsResult

PATIENCE_S = 60
METHODS = ("spawn", "fork", "forkserver")
FRESH_METHODS = ("spawn", "forkserver")  # Those whose workers do not share our memory.


class Callers:
    """Makes contexts of functions, and closes them with the test."""

    def __init__(self, folder: Path, method: str) -> None:
        self.folder = folder
        self.method = method
        self.made: list[MultiprocessContext] = []

    def make(
        self, fn: Callable[..., Any], *args: tuple[Any, ...], **how: Any
    ) -> MultiprocessContext:
        """Make one worker for each tuple of arguments."""
        context = MultiprocessContext(
            "trainer",
            fn,
            dict(enumerate(args)),
            {rank: {"RANK": str(rank)} for rank in range(len(args))},
            self.method,
            DefaultLogsSpecs(log_dir=str(self.folder / "logs"), redirects=Std.ALL),
            **how,
        )
        self.made.append(context)
        return context

    def start(self, fn: Callable[..., Any], *args: tuple[Any, ...]) -> MultiprocessContext:
        context = self.make(fn, *args)
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
        self.made.clear()  # And with them the arguments, which may hold descriptors.


def finished(context: MultiprocessContext) -> RunProcsResult:
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
def news(tmp_path: Path) -> Iterator[News]:
    made = News(tmp_path)
    yield made
    made.close()


# Values.


def test_each_worker_returns_its_value(callers: Callers) -> None:
    result = callers.result(fns.give, (None,), ({"a": [1, 2]},), ("ä",))
    assert not result.is_failed()
    assert result.return_values == {0: None, 1: {"a": [1, 2]}, 2: "ä"}
    assert list(result.return_values) == [0, 1, 2]


def test_large_values(callers: Callers) -> None:
    """More than the pipe holds: they are taken while the workers write them."""
    size = 20 * 1024 * 1024
    result = callers.result(fns.give_many_bytes, (size,), (size // 2,))
    assert {rank: len(value) for rank, value in result.return_values.items()} == {
        0: size,
        1: size // 2,
    }
    assert result.return_values[0][-256:] == bytes(range(256))


def test_a_value_that_is_too_large_is_refused(
    forking: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_child, "RESULT_BYTES_MAX", 1000)
    failures = forking.result(fns.give_many_bytes, (4096,), (256,)).failures
    assert failures[0].exitcode == 1
    assert re.fullmatch(
        "ValueError: the return value of give_many_bytes takes 41.. bytes, more than the 1000 "
        "that are sent back; return a path, and put the data into a file",
        failures[0].recorded_message(),
    )


def test_what_is_not_a_value_is_not_read_for_ever(
    fresh: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lower here than in the worker, as if something else wrote to its pipe."""
    monkeypatch.setattr(function_child, "RESULT_BYTES_MAX", 1000)
    failures = fresh.result(fns.give_many_bytes, (4096,), (20 << 20,)).failures
    assert failures[0].detail in ("", "sent back more than 1000 bytes as its return value")
    assert failures[1].exitcode in (1, -signal.SIGTERM)
    assert all(returned.data == b"" for returned in fresh.made[0]._returned.values())


def test_a_value_that_cannot_be_pickled(callers: Callers) -> None:
    failure = callers.result(fns.give_lock, ()).failures[0]
    assert failure.exitcode == 1
    assert failure.recorded_message() == (
        "TypeError: the return value of give_lock cannot be sent back: "
        "cannot pickle '_thread.lock' object"
    )
    assert failure.recorded_message() in failure.stderr_tail


def test_a_value_that_cannot_be_read_again(callers: Callers) -> None:
    failure = callers.result(fns.give_unreadable, ()).failures[0]
    assert failure.exitcode == 0
    assert failure.detail == (
        "its return value cannot be read: RuntimeError: this value cannot be made again"
    )


# Failures.


def test_an_exception_is_recorded_and_printed(callers: Callers) -> None:
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


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [(3, 3, ""), (-1, 255, ""), ("a reason", 1, "a reason\n"), (True, 1, ""), (2.5, 1, "2.5\n")],
)
def test_leaving_with_a_code(callers: Callers, code: object, status: int, said: str) -> None:
    failure = callers.result(fns.leave, (code,)).failures[0]
    assert failure.exitcode == status
    assert failure.stderr_tail == said
    assert failure.recorded_message() == ""


def test_leaving_without_a_failure_returns_none(callers: Callers) -> None:
    assert callers.result(fns.leave, (0,), (None,)).return_values == {0: None, 1: None}


def test_a_worker_that_ends_without_returning_has_failed(callers: Callers) -> None:
    result = callers.result(fns.leave_at_once, (0,))
    failure = result.failures[0]
    assert failure.exitcode == 0
    assert failure.detail.startswith("ended with code 0 but did not return")
    assert result.is_failed()
    assert callers.result(fns.leave_at_once, (9,)).failures[0].exitcode == 9


# What cannot be sent.


def test_a_forked_worker_needs_no_pickling(forking: Callers) -> None:
    lock = threading.Lock()
    assert forking.value(lambda one: (one is lock) and lock.locked(), lock) is False


def test_an_argument_that_cannot_be_pickled_leaves_no_worker(fresh: Callers, news: News) -> None:
    context = fresh.make(fns.tell_and_wait, (str(news.path),), (threading.Lock(),))
    with pytest.raises(UsageError, match=r"cannot pickle '_thread\.lock' object"):
        context.start()
    assert context.running() == set()


def test_too_many_shared_objects(fresh: Callers) -> None:
    pipes = [os.pipe() for _ in range(150)]
    connections = [multiprocessing.connection.Connection(fd) for pair in pipes for fd in pair]
    with pytest.raises(UsageError, match="file descriptors"):
        fresh.start(fns.give, (connections,))
    for connection in connections:
        connection.close()


# What is shared.


def test_what_multiprocessing_shares(callers: Callers) -> None:
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


def test_a_queue_is_flushed_before_the_worker_ends(callers: Callers) -> None:
    queue = multiprocessing.get_context(callers.method).Queue()
    items = [bytes([number]) * 50_000 for number in range(20)]
    started = callers.start(fns.put_and_return, (queue, items))
    assert [queue.get(timeout=PATIENCE_S) for _ in items] == items
    assert finished(started).return_values == {0: 20}
    queue.close()
    queue.join_thread()


def test_a_queue_that_was_used_before_the_fork(forking: Callers) -> None:
    """Its feeder thread does not come along; the worker needs one of its own."""
    queue = multiprocessing.get_context("fork").Queue()
    queue.put("ours")
    assert queue.get(timeout=PATIENCE_S) == "ours"
    started = forking.start(fns.put_and_return, (queue, ["theirs"]))
    assert queue.get(timeout=PATIENCE_S) == "theirs"
    assert finished(started).return_values == {0: 1}
    queue.close()
    queue.join_thread()


def test_children_of_ours_are_not_a_forked_workers(forking: Callers, news: News) -> None:
    context = multiprocessing.get_context("fork")
    child = context.Process(target=fns.tell_and_wait, args=(str(news.path),), daemon=True)
    child.start()
    news.next()
    assert forking.value(fns.run_child) == 0
    assert child.is_alive()
    child.kill()
    child.join()
    child.close()


def test_workers_can_have_children(callers: Callers) -> None:
    assert callers.value(fns.run_child) == 0


def test_shared_memory_is_tracked_by_our_tracker(callers: Callers) -> None:
    """One of a worker's own would destroy it when the worker ends."""
    ours = fns.tracker_pipe()
    assert callers.result(fns.tracker_pipe, (), ()).return_values == {0: ours, 1: ours}


def test_exit_handlers_run_last_and_only_the_workers_own(callers: Callers, tmp_path: Path) -> None:
    atexit.register(fns.tell, str(tmp_path / "ours"), "ours")
    try:
        result = callers.result(fns.say_at_exit, ("at exit\n", "in a thread\n"))
    finally:
        atexit.unregister(fns.tell)
    assert not result.is_failed()
    with open(result.stdouts[0]) as stream:
        assert stream.read() == "in a thread\nat exit\n"
    assert not (tmp_path / "ours").exists()


# What a worker finds.


def test_signals_are_as_in_any_python(callers: Callers) -> None:
    handlers = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        assert callers.value(fns.signal_actions) == (True, True, set())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_workers_have_no_descriptors_of_the_keeper(fresh: Callers, news: News) -> None:
    """Nor any that we left inheritable. Two that wait come first, with descriptors of theirs."""
    with open(os.devnull) as careless:
        os.set_inheritable(careless.fileno(), True)  # noqa: FBT003
        check_descriptors(fresh, news)


def check_descriptors(fresh: Callers, news: News) -> None:
    context = fresh.start(fns.tell_and_wait, (str(news.path),), (str(news.path),))
    for _ in range(2):
        news.next()
    found = fresh.value(fns.descriptors)
    assert {fd for fd in found if fd <= 2} == {0, 1, 2}
    # What is left is the value's pipe, and that of `multiprocessing`'s resource tracker.
    rest = [target for fd, target in found.items() if fd > 2]
    assert len(rest) <= 2, rest
    assert all(target.startswith("pipe:") for target in rest), rest
    context.close(signal.SIGKILL)


def test_output_is_written_before_the_worker_ends(callers: Callers) -> None:
    result = callers.result(fns.say, ("to out", "to err"), ("", ""))
    for paths, said in ((result.stdouts, "to out\n"), (result.stderrs, "to err\n")):
        with open(paths[0]) as stream:
            assert stream.read() == said


def test_threads_are_waited_for(callers: Callers) -> None:
    result = callers.result(fns.say_in_thread, ("from the thread",))
    with open(result.stdouts[0]) as stream:
        assert stream.read() == "from the thread"


def test_it_can_be_started_in_any_thread(callers: Callers) -> None:
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(callers.value(fns.add, 1, 2)))
    thread.start()
    thread.join()
    assert values == [3]


def test_modules_are_preloaded_into_the_forkserver(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        import multiprocessing, sys
        from start import start
        def loaded():
            return "colorsys" in sys.modules, "no_such_module" in sys.modules
        if __name__ == "__main__":
            multiprocessing.set_forkserver_preload(["__main__", "colorsys", "no_such_module"])
            print(start(loaded, "forkserver"))
        """,
    )
    assert said == "(True, False)\n"


# As programs of their own.

START = """
    import os, tempfile
    from holdfast.processes.logs.specs import DefaultLogsSpecs
    from holdfast.processes.workers.start import start_processes
    def start(fn, method, *args):
        with tempfile.TemporaryDirectory() as folder:
            logs = DefaultLogsSpecs(log_dir=folder)
            context = start_processes("x", fn, {0: args}, {0: {}}, logs, start_method=method)
            result = context.wait(60)
            context.close()
            for failure in result.failures.values():
                return f"failed: {failure.exitcode} {failure.recorded_message()}"
            return result.return_values[0]
"""


def run_any(tmp_path: Path, *command: str, **how: Any) -> subprocess.CompletedProcess[str]:
    (tmp_path / "start.py").write_text(textwrap.dedent(START))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
        env=env,
        **how,
    )


def run_script(tmp_path: Path, code: str, *flags: str) -> str:
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    done = run_any(tmp_path, *flags, "script.py")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["script", "module"])
def test_a_function_of_the_main_script(tmp_path: Path, method: str, how: str) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            f"""
            import os, sys
            from start import start
            from dataclasses import dataclass
            @dataclass
            class Point:
                x: int
            def double(point):
                assert os.getpid() != int(os.environ["AGENT"])
                return Point(point.x * 2), sys.argv[1:]
            if __name__ == "__main__":
                os.environ["AGENT"] = str(os.getpid())
                print(start(double, {method!r}, Point(21)))
            """
        )
    )
    command = ("script.py",) if how == "script" else ("-m", "script")
    done = run_any(tmp_path, *command, "--flag")
    assert (done.stdout, done.stderr) == ("(Point(x=42), ['--flag'])\n", "")


@pytest.mark.parametrize("method", FRESH_METHODS)
def test_a_script_that_starts_workers_when_imported_is_refused(tmp_path: Path, method: str) -> None:
    """It would start workers that start workers, for ever."""
    (tmp_path / "script.py").write_text(
        f"from start import start\ndef fn(): pass\nprint('run')\nprint(start(fn, {method!r}))\n"
    )
    done = run_any(tmp_path, "script.py")
    assert done.stdout.count("run") == 2
    assert "if __name__ == '__main__':" in done.stderr
    assert re.search(r"^failed: (1|127) ", done.stdout, re.MULTILINE)


def test_a_script_that_cannot_be_imported_fails_the_workers(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        from start import start
        def fn(): pass
        if __name__ == "__main__":
            print(start(fn, "spawn"))
            print(start(fn, "forkserver"))
        else:
            raise ImportError("not in a worker")
        """,
    )
    first, second = said.splitlines()
    assert first == second == "failed: 1 ImportError: not in a worker"


def test_a_script_that_waits_when_imported_does_not_outlive_the_agent(
    tmp_path: Path, news: News
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
            with open({str(news.path)!r}, "w") as stream:
                stream.write(f"importing {{os.getpid()}}\\n")
            signal.pause()
            """
        )
    )
    agent = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path)
    server = Watched(int(news.next()[1]))
    agent.kill()
    agent.wait(PATIENCE_S)
    server.all_gone()


def test_files_that_the_main_script_opened_are_the_workers_too(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        import multiprocessing, os
        from start import start
        logs = [open(f"log{number}", "w") for number in range(30)]
        def check(connection):
            connection.send("through the pipe")
            return [os.readlink(f"/proc/self/fd/{log.fileno()}").rpartition("/")[2] for log in logs]
        if __name__ == "__main__":
            ours, theirs = multiprocessing.get_context("forkserver").Pipe()
            print(start(check, "forkserver", theirs) == [f"log{number}" for number in range(30)])
            print(ours.recv())
        """,
    )
    assert said == "True\nthrough the pipe\n"


def test_what_the_main_script_prints_when_imported_is_printed_once(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        from start import start
        def fn(): return "returned"
        if __name__ == "__main__":
            print(start(fn, "forkserver"))
        else:
            print("imported")
        """,
    )
    assert said == "imported\nreturned\n"


@pytest.mark.parametrize("how", ["-c", "-"])
def test_functions_of_an_interactive_session(tmp_path: Path, how: str) -> None:
    code = textwrap.dedent(
        """
        import functions_to_call
        from start import start
        def fn(number): return number + 1
        print(start(fn, "fork", 1))
        for method in ("spawn", "forkserver"):
            print(start(functions_to_call.add, method, 1, 2))
            try:
                start(fn, method, 1)
            except ValueError as error:
                print(type(error).__name__, error)
        """
    )
    (tmp_path / "functions_to_call.py").write_text("def add(one, two): return one + two\n")
    done = run_any(tmp_path, "-c", code) if how == "-c" else run_any(tmp_path, "-", input=code)
    refused = (
        "UsageError fn is defined in this interactive session, which a new worker process cannot "
        "import (put it in a module, use start_method='fork', or install cloudpickle)"
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["2", "3", refused, "3", refused]


def test_a_notebook_function_goes_by_value_where_that_is_possible(tmp_path: Path) -> None:
    (tmp_path / "cloudpickle.py").write_text(
        textwrap.dedent(
            """
            import marshal, pickle, types
            class ByValue:
                def __init__(self, fn): self.code = marshal.dumps(fn.__code__)
                def __call__(self, *args):
                    return types.FunctionType(marshal.loads(self.code), {})(*args)
            def dumps(call):
                fn, args = call
                return pickle.dumps((ByValue(fn), args))
            """
        )
    )
    code = """
from start import start
def fn(number): return number + 1
for method in ("spawn", "forkserver"):
    print(start(fn, method, 1))
"""
    done = run_any(tmp_path, "-c", code)
    assert (done.stdout, done.stderr) == ("2\n2\n", "")


@pytest.mark.parametrize("method", METHODS)
def test_the_interpreters_flags_are_passed_on(tmp_path: Path, method: str) -> None:
    code = f"""
        import sys
        from start import start
        def flags(): return sys.flags.optimize, sys.flags.dev_mode
        if __name__ == "__main__":
            print(start(flags, {method!r}))
    """
    assert run_script(tmp_path, code, "-O", "-X", "dev", "-W", "ignore") == "(1, True)\n"
