from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.processes.failures import error_file as errors
from holdfast.processes.failures.error_file import record
from holdfast.processes.failures.failure import ChildFailedError, ProcessFailure
from holdfast.processes.workers.function_child import call_and_return

if TYPE_CHECKING:
    from pathlib import Path

PRELUDE = (
    "import os, sys\nfrom holdfast.processes.failures.error_file import ErrorHandler, record\n"
)


def run(
    tmp_path: Path, code: str, error_file: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a worker script with `tmp_path/error.json` (or another file) as its error file."""
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + textwrap.dedent(code))
    env = dict(os.environ, **variables)
    env["TORCHELASTIC_ERROR_FILE"] = (
        str(tmp_path / "error.json") if error_file is None else error_file
    )
    return subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)


def written(tmp_path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((tmp_path / "error.json").read_text())
    return data


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "train.py")


def test_exception_is_written_and_propagates(tmp_path: Path) -> None:
    before_ns = time.time_ns()
    done = run(tmp_path, '@record\ndef main():\n    raise ValueError("boom \\u00e9")\nmain()')
    after_ns = time.time_ns()
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: boom é")
    assert files(tmp_path) == ["error.json"]
    data = written(tmp_path)
    assert set(data) == {"message"}
    assert data["message"]["message"] == "ValueError: boom é"
    extra = data["message"]["extraInfo"]
    assert before_ns <= int(extra["timestamp_ns"]) <= after_ns
    assert extra["timestamp"] == str(int(extra["timestamp_ns"]) // 10**9)
    assert extra["py_callstack"].endswith("ValueError: boom é\n")


@pytest.mark.parametrize(
    ("argument", "status", "stderr", "goes_on"),
    [("0", 0, "", True), ("7", 7, "", False), ("", 0, "", False), ("'here'", 1, "here\n", False)],
)
def test_system_exit_is_not_written(
    tmp_path: Path, argument: str, status: int, stderr: str, goes_on: bool
) -> None:
    code = f'@record\ndef main():\n    sys.exit({argument})\nprint("returned", main())'
    done = run(tmp_path, code)
    assert (done.returncode, done.stderr) == (status, stderr)
    assert done.stdout == ("returned None\n" if goes_on else "")
    assert files(tmp_path) == []


def one_line_of_ours(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("[holdfast]")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("place", "reason"),
    [("missing/error.json", "No such file or directory"), (".", "Is a directory")],
)
def test_unwritable_error_file_does_not_hide_the_exception(
    tmp_path: Path, place: str, reason: str
) -> None:
    path = str(tmp_path / place)
    code = "@record\ndef main():\n    raise ValueError('boom')\n\nmain()\n"
    done = run(tmp_path, code, error_file=path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: boom")
    assert done.stderr.count("Traceback") == 1
    line = one_line_of_ours(done.stderr)
    assert path in line
    assert reason in line
    assert files(tmp_path) == []


def test_nested_records_write_an_exception_once(own_file: Path) -> None:
    error = ValueError("boom")
    raise_recorded(error)
    first = own_file.read_bytes()
    raise_recorded(error)
    assert own_file.read_bytes() == first
    raise_recorded(ValueError("another"))
    assert b"another" in own_file.read_bytes()


def test_failing_handler_does_not_hide_the_exception(tmp_path: Path) -> None:
    code = """
        class Handler(ErrorHandler):
            def record_exception(self, e):
                raise TypeError("handler is broken")
        def main():
            raise ValueError("boom")
        record(main, Handler())()
    """
    done = run(tmp_path, code)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: boom")
    assert done.stderr.count("Traceback") == 1
    assert "TypeError: handler is broken" in one_line_of_ours(done.stderr)


class Recorder(errors.ErrorHandler):
    """A handler that records its calls."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[str | None] = []
        self.fails = fails

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        super().set_entrypoint_fn_name(fn_name)
        self.calls.append(self._fn_name)

    def initialize(self) -> None:
        self.calls.append("initialize")

    def record_exception(self, e: BaseException) -> None:
        self.calls.append(type(e).__name__)

    def record_success(self) -> None:
        self.calls.append("success")
        if self.fails:
            raise LookupError("the handler is broken")


def test_handler_learns_the_name_of_the_function_and_that_it_returned() -> None:
    handler = Recorder(fails=True)

    def main(outcome: BaseException | None) -> int:
        if outcome is not None:
            raise outcome
        return 3

    recorded = record(main, handler)
    with pytest.raises(
        LookupError
    ):  # As in torch, an error of `record_success` reaches the caller.
        recorded(None)
    with pytest.raises(OSError, match="boom"):
        recorded(OSError("boom"))
    assert recorded(SystemExit(0)) is None
    start = [main.__qualname__, "initialize"]
    assert handler.calls == [*start, "success", *start, "OSError", *start]


def test_handler_of_a_function_worker_learns_of_that_function_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = Recorder()
    monkeypatch.setattr(errors, "get_error_handler", lambda: handler)
    reading, writing = os.pipe()
    peers = os.open(os.devnull, os.O_RDWR)  # There are no other workers to wait for.
    call_and_return(len, ("ab",), writing, peers)
    os.close(reading)
    assert [one for one in handler.calls if one != "initialize"] == ["len", "success"]


def test_handler_without_the_newer_methods_is_accepted() -> None:
    class Older:
        def initialize(self) -> None:
            pass

    assert record(partial(int, "3"), Older())() == 3  # type: ignore[arg-type]


def child_failed(error_file: Path, exitcode: int = 3) -> ChildFailedError:
    return ChildFailedError("train.py", {0: ProcessFailure(0, 42, exitcode, str(error_file))})


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def raise_recorded(error: Exception) -> None:
    @record
    def main() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        main()
    assert raised.value is error


def test_the_first_workers_error_file_is_copied_with_its_exit_code(
    tmp_path: Path, own_file: Path
) -> None:
    child = tmp_path / "child.json"
    child.write_bytes(errors.error_file_content(ValueError("boom")))
    raise_recorded(child_failed(child))
    expected = json.loads(child.read_bytes())
    expected["message"]["errorCode"] = 3
    assert json.loads(own_file.read_bytes()) == expected


@pytest.mark.parametrize(
    "content",
    [
        b" \n", b'{"message', b"\xff\xfe{}", b"[1]", b"[" * 100_000,
        b'{"message": ' + b"1" * 5000 + b"}", b'{"a": 1}' + b" " * errors.ERROR_FILE_CHARS_MAX,
    ],
    ids=["blank", "cut", "utf16", "list", "deep", "digits", "huge"],
)  # fmt: skip
def test_bad_error_file_is_a_one_line_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (of whatever wording)
        errors.read_error_file(str(path))
    assert "\n" not in str(raised.value)


def test_irreplaceable_error_file_stays_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: str) -> None:
        raise OSError("full")

    path = tmp_path / "error.json"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="full"):
        errors.write_whole(str(path), b"new")
    assert files(tmp_path) == ["error.json"]
    assert path.read_bytes() == b"old"


def test_a_fatal_signal_shows_the_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    """Even if the fault handler was enabled before, or `sys.stderr` is not a file."""

    script = """if 1:
        import faulthandler, io, os, signal, sys
        from holdfast.processes.failures.error_file import ErrorHandler
        faulthandler.enable(open(os.devnull, "w"))
        if len(sys.argv) > 1:
            sys.stderr = io.StringIO()
        ErrorHandler().initialize()
        os.kill(os.getpid(), signal.SIGSEGV)
    """
    for args in ([], ["captured"]):
        subprocess.run([sys.executable, "-c", script, *args], check=False)
        assert "Segmentation fault" in capfd.readouterr().err
