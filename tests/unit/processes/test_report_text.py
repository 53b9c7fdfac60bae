from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.processes.failures import report_text
from holdfast.processes.failures.error_file import ErrorHandler, error_file_content
from holdfast.processes.failures.failure import ChildFailedError, ProcessFailure

if TYPE_CHECKING:
    from pathlib import Path

WHEN: dict[str, Any] = {"observed_ns": 1_700_000_000_000_000_000, "host": "node-1"}


def failure(rank: int, exitcode: int = 1, **known: Any) -> ProcessFailure:
    return ProcessFailure(rank, 40 + rank, exitcode, known.pop("error_file", ""), **(WHEN | known))


def text_of(*failures: ProcessFailure) -> str:
    return str(ChildFailedError("train.py", {one.local_rank: one for one in failures}))


def test_report_has_the_first_failure_in_full_and_a_line_for_each_other() -> None:
    stderr = (
        "loading\n"
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n'
        "KeyError: 'lr'\n"
    )
    first = failure(1, stderr_tail=stderr, stdout_file="/logs/1/out", stderr_file="/logs/1/err")
    later = failure(2, order=2, observed_ns=first.observed_ns + 1_000_000_000)
    error = ChildFailedError(
        "train.py", {8: failure(0, -15, consequence=True, order=1), 9: first, 10: later}
    )
    error.log_dir = "/logs"
    error.report_file = "/logs/failure.json"
    error.restarts = "after 3 of 3 restarts"
    error.many_nodes = True
    when = first.timestamp_isoformat()
    assert error.format_msg("#", "~") == textwrap.dedent(f"""
        ############################################################
        train.py FAILED after 3 of 3 restarts
        ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
        Root Cause (first observed failure):
          time      : {when}
          host      : node-1
          rank      : 9 (local_rank: 1)
          exitcode  : 1 (pid: 41)
          error_file: <N/A>
          traceback : (the last one on stderr)
            Traceback (most recent call last):
              File "train.py", line 3, in <module>
            KeyError: 'lr'
          stderr    : (the last 2 lines)
            loading
            [the traceback above]
          stdout log: /logs/1/out
          stderr log: /logs/1/err
        ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
        Other Failures:
          rank 10 (local_rank: 2, pid: 42): exit code 1
          rank 8 (local_rank: 0, pid: 40): terminated by SIGTERM (termination request) [consequence: \
after the stop began]
          (on this node and on the node of the root cause; other nodes report their own)
        ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
        Logs:   /logs
        Report: /logs/failure.json
        ############################################################""")


def test_the_end_of_a_long_stderr_is_shown() -> None:
    text = text_of(failure(0, stderr_tail="".join(f"line {n}\n" for n in range(1000))))
    assert f"stderr    : (the last {report_text.STDERR_LINES_MAX} lines)\n    line 980\n" in text
    assert "    line 999\n" in text
    assert "line 979" not in text
    assert "traceback : none found (no error file, none at the end of stderr)\n" in text


def test_middle_of_a_long_traceback_is_omitted() -> None:
    frames = "".join(f'  File "train.py", line {n}, in f\n' for n in range(1000))
    stderr = f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n"
    text = text_of(failure(0, stderr_tail=stderr))
    assert len(text.splitlines()) < report_text.TRACEBACK_LINES_MAX + 20
    left_out = 1002 - report_text.TRACEBACK_LINES_MAX + 1
    assert f"[... {left_out} lines omitted ...]" in text
    assert "line 0, in f" in text
    assert "RecursionError: too deep" in text


def test_all_possible_first_failures_are_named() -> None:
    text = text_of(failure(0), failure(1, order=1), failure(2, order=2, observed_ns=1 << 62))
    assert "one of ranks 0, 1 failed first" in text
    assert "failed first" not in text_of(failure(0))


EVIL = "\x1b]0;mine\x07\x1b[2J\u202e"


def test_control_characters_of_workers_are_escaped(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    error_file.write_bytes(
        error_file_content(ValueError(f"red \x1b[31m{EVIL}\n  host : elsewhere"))
    )
    first = failure(
        0,
        error_file=str(error_file),
        stderr_tail=f"said {EVIL}\n",
        stdout_file=f"/logs/{EVIL}\n  host : elsewhere",
        host=f"node {EVIL}\n  host : elsewhere",
        detail=EVIL,
    )
    others = [failure(rank, detail=f"{EVIL}\n", host=EVIL, order=rank) for rank in (1, 2)]
    error = ChildFailedError(f"{EVIL}\ntrain.py", {0: first, 1: others[0], 2: others[1]})
    error.log_dir = f"/logs/{EVIL}\nLogs: elsewhere"
    text = str(error)
    assert text.replace("\n", "").isprintable()
    lines = text.split("\n")
    assert sum(line.startswith("  host") for line in lines) == 1
    assert sum(line.startswith("Logs:") for line in lines) == 1
    assert "\\x1b[31m" not in text  # Colours are removed, not escaped.
    assert text.count("\\x1b]0;mine\\x07") >= 6


class DeviceHandler(ErrorHandler):
    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        if error_file != "<N/A>":
            raise OSError("no device log")
        return f"{message}\nXid 79: the GPU has fallen off the bus"


@pytest.mark.parametrize(
    "module", ["holdfast.elastic.multiprocessing.errors", "holdfast.processes.failures.error_file"]
)
def test_error_handler_adds_to_the_message_of_a_signal(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{module}.get_error_handler", DeviceHandler)
    here = os.uname().nodename
    text = text_of(failure(0, -11, host=here), failure(1, -9, host=here), failure(2, 1, host=here))
    assert "  message   :\n    Xid 79: the GPU has fallen off the bus\n" in text
    assert text.count("Xid 79") == 2
    # The handler of another node has described it there.
    assert "Xid 79" not in text_of(failure(0, -11, host="another"))


def test_failing_error_handler_does_not_hide_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.processes.failures.error_file.get_error_handler", DeviceHandler)
    path = tmp_path / "error.json"
    path.write_text('{"message": "broken"}')
    one = failure(0, -11, host=os.uname().nodename, error_file=str(path))
    assert "SIGSEGV" in text_of(one)
    assert "OSError: no device log" in caplog.text
