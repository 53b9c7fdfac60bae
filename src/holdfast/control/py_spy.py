"""Python stacks of another process by py-spy, where it is installed.

It reads the memory of the process, which needs nothing of the process itself: neither a signal nor
the interpreter's lock. The kernel allows that to root, and otherwise to the same user; where
`/proc/sys/kernel/yama/ptrace_scope` is 1, to ancestors alone, which an agent is of its workers.
"""

from __future__ import annotations

import os
import sys

PROGRAM = "py-spy"
SPY_S = 10.0
"""How long one look may take; it takes a tenth of a second."""
TEXT_BYTES_MAX = 4 << 20
SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
INSTALL = "install it beside Holdfast: pip install py-spy"


class CannotSpy(Exception):
    """Why there are no stacks by py-spy, in one line."""


def find_py_spy() -> str | None:
    """Return where py-spy is: beside this Python, else on the PATH; never in a relative folder."""
    folders = [os.path.dirname(sys.executable), *os.get_exec_path()]
    for folder in folders:
        program = os.path.join(folder, PROGRAM)
        if os.path.isabs(folder) and os.path.isfile(program) and os.access(program, os.X_OK):
            return program
    return None


def spy(
    pid: int, *, native: bool = False, pausing: bool = True, limit_s: float | None = None
) -> str:
    """Return the stacks of a process's Python threads; raise `CannotSpy` if there are none.

    `pausing` stops the process for the moment of the look, without which the stacks may be torn.
    `limit_s` is how long the look may take, `SPY_S` unless given.
    """
    program = find_py_spy()
    if program is None:
        raise CannotSpy(f"py-spy is not there; {INSTALL}")
    import subprocess

    limit_s = SPY_S if limit_s is None else limit_s
    flags = [*(["--native"] if native else []), *([] if pausing else ["--nonblocking"])]
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid), *flags],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, "RUST_BACKTRACE": "0", "NO_COLOR": "1"},
        )
    except subprocess.TimeoutExpired:
        raise CannotSpy(f"py-spy has found no stacks of {pid} in {limit_s:g} s") from None
    except OSError as problem:
        raise CannotSpy(f"{program} cannot be started: {problem.strerror}") from None
    if done.returncode != 0:
        raise CannotSpy(_why(pid, done.stderr.decode(errors="replace")))
    return done.stdout[:TEXT_BYTES_MAX].decode(errors="replace")


def _why(pid: int, told: str) -> str:
    """Make one line of what py-spy says when it fails."""
    if not os.path.exists(f"/proc/{pid}"):
        return f"process {pid} has ended"
    if "ermission denied" in told or "not permitted" in told:
        return f"this user may not look into process {pid}{_remedy()}"
    first = told.strip().partition("\n")[0].removeprefix("Error: ")
    return f"py-spy: {first or 'it failed without a word'}"


def _remedy() -> str:
    try:
        with open(SCOPE) as scope:
            limited = scope.read().strip() != "0"
    except OSError:
        limited = False
    if limited:
        return f"; {SCOPE} limits that: be root, or set it to 0"
    return "; be root, or give the container SYS_PTRACE"
