from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.failures.tracebacks import (
    exception_line,
    find_last_traceback,
    last_traceback,
    readable_lines,
)

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = """\
Traceback (most recent call last):
  File "train.py", line 5, in <module>
    step(0)
ZeroDivisionError: division by zero"""

OTHER = PLAIN.replace("ZeroDivisionError: division by zero", "OSError: disk on fire")


def stderr_of(tmp_path: Path, code: str, **settings: str) -> str:
    """Return what a real Python program writes to standard error."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=settings
    ).stderr


def test_the_traceback_is_found_between_other_lines() -> None:
    text = f"step 1\n{PLAIN}\n\n[W1116 01:02:03.4 socket.cpp:1] closing\nbye\n"
    assert last_traceback(text) == PLAIN
    assert find_last_traceback(readable_lines(text)) == (1, 5)


@pytest.mark.parametrize(
    "connector",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_chained_tracebacks_are_one(connector: str) -> None:
    chain = f"{PLAIN}\n\n{connector}\n\n{OTHER}\n\n{connector}\n\n{PLAIN}"
    assert last_traceback(f"{OTHER}\n\nretrying\n{chain}\n\nbye\n") == chain


def test_exception_group_is_found_as_one_traceback(tmp_path: Path) -> None:
    code = """
        try:
            1 / 0
        except ZeroDivisionError:
            raise ExceptionGroup("two", [ValueError("a"), OSError("b\\nc")])
    """
    stderr = stderr_of(tmp_path, code)
    found = last_traceback(f"noise\n{stderr}bye\n")
    assert found == stderr.rstrip()
    assert found.startswith("Traceback")
    assert "  + Exception Group Traceback" in found


def test_fatal_error_includes_the_stacks_of_all_threads(tmp_path: Path) -> None:
    code = """
        import ctypes, faulthandler, threading
        faulthandler.enable()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        ctypes.string_at(0)
    """
    stderr = stderr_of(tmp_path, code)
    found = last_traceback(f"{PLAIN}\n\nstep\n{stderr}\nsome wrapper: core dumped\n")
    assert found == stderr.rstrip()
    assert found.startswith("Fatal Python error: Segmentation fault\n")
    assert found.count("(most recent call first)") == 2
    assert exception_line(found) == "Fatal Python error: Segmentation fault"


def test_ignored_exception_at_shutdown_is_not_the_cause(tmp_path: Path) -> None:
    code = """
        class Odd:
            def __del__(self):
                raise OSError("in a destructor")

        odd = Odd()
        raise ValueError("the cause")
    """
    stderr = stderr_of(tmp_path, code)
    assert stderr.index("the cause") < stderr.index("in a destructor")
    assert exception_line(last_traceback(stderr)) == "ValueError: the cause"
    assert last_traceback(stderr[stderr.index("Exception ignored") :]) == ""
