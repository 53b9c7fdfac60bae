"""The Python stacks of a process, read in any available way; otherwise the kernel's information.

1. By py-spy, from outside: it needs no help from the process and works even if the process is stuck. The
   kernel permits this to root and to the same user; if `/proc/sys/kernel/yama/ptrace_scope` is 1, only
   to root and to ancestors of the process, such as the agent of a worker.
2. By the worker's control socket, if it has one and responds.
3. If neither works: the threads as `/proc` shows them, with one line about the reason and the remedy.

The process may be any process: it need not import Holdfast, or be a Python process at all.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from holdfast.printable import one_line
from holdfast.processes import procfs
from holdfast.processes.worker_socket import peer_of, socket_path

if TYPE_CHECKING:
    from collections.abc import Mapping


PROGRAM = "py-spy"
PY_SPY_S = 10.0
"""How long one dump may take; usually it takes a tenth of a second."""
TEXT_BYTES_MAX = 4 << 20
FRAME_CHARS_MAX = 200
SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
INSTALL = "install it next to Holdfast: pip install py-spy"


class PySpyFailed(Exception):
    """py-spy returned no stacks; the message gives the reason in one line."""


def find_py_spy() -> str | None:
    """Return the path of py-spy: next to this Python, else on the PATH; never in a relative folder."""
    folders = [os.path.dirname(sys.executable), *os.get_exec_path()]
    for folder in folders:
        program = os.path.join(folder, PROGRAM)
        if os.path.isabs(folder) and os.path.isfile(program) and os.access(program, os.X_OK):
            return program
    return None


def run_py_spy(
    pid: int, *, native: bool = False, pausing: bool = True, limit_s: float | None = None
) -> str:
    """Return the stacks of a process's Python threads; raise `PySpyFailed` if there are none.

    `pausing` stops the process meanwhile; otherwise the stacks may be inconsistent. `limit_s` limits the
    time, `PY_SPY_S` by default.
    """
    program = find_py_spy()
    if program is None:
        raise PySpyFailed(f"py-spy is not installed; {INSTALL}")
    limit_s = PY_SPY_S if limit_s is None else limit_s
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
        raise PySpyFailed(f"py-spy found no stacks of {pid} in {limit_s:g} s") from None
    except OSError as problem:
        raise PySpyFailed(f"cannot start {program}: {problem.strerror}") from None
    if done.returncode != 0:
        raise PySpyFailed(_pyspy_problem(pid, done.stderr.decode(errors="replace")))
    return done.stdout[:TEXT_BYTES_MAX].decode(errors="replace")


def _pyspy_problem(pid: int, stderr: str) -> str:
    """Return one line on why py-spy failed."""
    if not procfs.exists(pid):
        return f"process {pid} has exited"
    if "ermission denied" in stderr or "not permitted" in stderr:
        return f"this user may not read the memory of process {pid}{_permission_hint()}"
    first = stderr.strip().partition("\n")[0].removeprefix("Error: ")
    return f"py-spy: {first or 'failed without a message'}"


def _permission_hint() -> str:
    try:
        with open(SCOPE) as scope:
            limited = scope.read().strip() != "0"
    except OSError:
        limited = False
    if limited:
        return f"; {SCOPE} forbids it: run as root, or set it to 0"
    return "; run as root, or give the container SYS_PTRACE"


LIMIT_S = 10.0
"""The limit for one dump by all means together; usually it takes a tenth of a second."""
PYTHONS = ("python", "libpython", "pypy", "libpypy")


def dump_stacks(pid: int, env: Mapping[str, str] | None = None, *, limit_s: float = LIMIT_S) -> str:
    """Return the stacks of a process, or other known facts about it, as text; never raises.

    A loop that must not block passes a small `limit_s`, or calls it in a thread. `env` is the
    environment of the process, if the caller knows it better than `/proc`.
    """
    deadline = time.monotonic() + limit_s
    try:
        # Half of the time is for the control socket, in case py-spy hangs. A stopped process
        # need not be paused, and cannot be.
        found = run_py_spy(pid, pausing=not procfs.is_stopped(pid), limit_s=limit_s / 2)
        return _with_newline(found)
    except PySpyFailed as problem:
        if procfs.has_ended(pid):
            return f"process {pid} has exited\n"
        why = str(problem) if is_python(pid) else "this is not a Python program"
    path = socket_path(procfs.initial_environment(pid)) or socket_path(
        procfs.current_environment(pid) if env is None else env
    )
    if path and (found := _stacks_from_socket(path, pid, deadline)):
        return _with_newline(found)
    return f"{procfs.describe(pid)}no Python stacks: {why}\n"


def activity_of(pid: int, *, limit_s: float) -> str:
    """Return in one line what the main thread of a process does: in the kernel and, if possible, in Python."""
    activity = procfs.activity_of(pid)
    try:
        text = run_py_spy(pid, pausing=not procfs.is_stopped(pid), limit_s=limit_s)
    except PySpyFailed:
        return activity
    frame = _innermost_frame(text, pid)
    return f"{activity}, called from {frame}" if frame else activity


def _innermost_frame(text: str, pid: int) -> str:
    """Return the innermost Python frame of the main thread in py-spy's text; empty if there is none."""
    lines = iter(text.splitlines())
    main = (
        f"Thread {pid} ",
        '"MainThread"',
    )  # It has a name only if the program imports `threading`.
    if not any(line.startswith(main[0]) or line.endswith(main[1]) for line in lines):
        return ""
    return one_line(next(lines, "").strip(), FRAME_CHARS_MAX)


def dump_into_log(pid: int, path: str, title: str = "", *, limit_s: float = LIMIT_S) -> None:
    """Append the stacks of a process to its log; raise `OSError` if it cannot be written."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"\n[holdfast] {title or 'stacks'} (pid {pid}, {when})\n"
    text += dump_stacks(pid, limit_s=limit_s)
    # The worker writes to the same file, so write in one piece. If it is a pipe, do not wait for
    # its reader.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        unwritten = memoryview(text.encode(errors="replace"))
        while unwritten:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
    finally:
        os.close(descriptor)


def is_python(pid: int) -> bool:
    """Whether a process may be a Python interpreter, as far as its mapped files show."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as maps:
            return any(os.path.basename(line.strip()).startswith(PYTHONS) for line in maps)
    except PermissionError:
        return True  # Another user's process: it may be.
    except OSError:
        return False


def _stacks_from_socket(path: str, pid: int, deadline: float) -> str:
    """Return the stacks from the worker's control socket; nothing if it does not respond."""
    request = b"POST /handler/dump_traceback HTTP/1.0\r\nContent-Length: 0\r\n\r\n"
    received = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            # A relative path is the worker's, unless it has changed its directory since.
            place = os.path.join(f"/proc/{pid}/cwd", path)
            if os.stat(place).st_uid != procfs.user_of(pid):
                return ""  # Another user's socket: do not connect to it on this user's behalf.
            connection.connect(place)
            if peer_of(connection)[0] != pid:
                return ""  # Another worker has the same path.
            connection.sendall(request)
            while len(received) < TEXT_BYTES_MAX:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                data = connection.recv(1 << 16)
                if not data:
                    break
                received += data
    except OSError:
        return ""
    head, _, body = received.partition(b"\r\n\r\n")
    return body.decode(errors="replace") if head.split()[1:2] == [b"200"] else ""


def _with_newline(text: str) -> str:
    return f"{text.rstrip()}\n"
