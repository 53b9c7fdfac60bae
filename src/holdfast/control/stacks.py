"""Where a process is: its Python stacks by whatever means there is, else what the kernel tells.

1. By py-spy, from outside, which the process need not help with and cannot prevent by being stuck.
2. By its control socket, if it has one and still answers.
3. What `/proc` tells of its threads, and one line why there are no stacks and what would help.

The process may be any: it need not have imported anything of ours, nor be a Python at all.
"""

from __future__ import annotations

import os
import time

from holdfast.control.live_environment import has_now, started_with
from holdfast.control.process_facts import facts_of, has_ended, is_standing_still
from holdfast.control.py_spy import CannotSpy, spy
from holdfast.control.socket_file import place_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

LIMIT_S = 10.0
"""How long all of it may take; it takes a tenth of a second, unless the process is stuck."""
TEXT_BYTES_MAX = 4 << 20
PYTHONS = ("python", "libpython", "pypy", "libpypy")


def dump_stacks(pid: int, env: Mapping[str, str] | None = None, *, limit_s: float = LIMIT_S) -> str:
    """Return where a process is, as text that ends a line; never raises.

    A loop that must go on gives a small `limit_s`, or calls it in a thread. `env` is the
    environment of the process, if it is known better than `/proc` knows it.
    """
    deadline = time.monotonic() + limit_s
    try:
        # Half of the time is for the other way, should there be no end to this one. What stands
        # still already need not be stopped for the look, and cannot be.
        found = spy(pid, pausing=not is_standing_still(pid), limit_s=limit_s / 2)
        return _ending_a_line(found)
    except CannotSpy as problem:
        if has_ended(pid):
            return f"process {pid} has ended\n"
        why = str(problem) if is_python(pid) else "this is no Python program"
    place = place_from(started_with(pid)) or place_from(has_now(pid) if env is None else env)
    if place and (told := _ask_for_stacks(place, pid, deadline)):
        return _ending_a_line(told)
    return f"{facts_of(pid)}no Python stacks: {why}\n"


def dump_into_log(pid: int, path: str, title: str = "", *, limit_s: float = LIMIT_S) -> None:
    """Append where a process is to its log; a log that cannot be written raises `OSError`."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"\n[holdfast] {title or 'stacks'} (pid {pid}, {when})\n"
    text += dump_stacks(pid, limit_s=limit_s)
    # The worker writes to the same file: in one piece, so that its lines do not get in between.
    # Should it be a pipe, nobody waits until somebody reads it.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        unwritten = memoryview(text.encode(errors="replace"))
        while unwritten:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
    finally:
        os.close(descriptor)


def is_python(pid: int) -> bool:
    """Whether a process may be a Python interpreter, as far as can be seen from outside."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as maps:
            return any(os.path.basename(line.strip()).startswith(PYTHONS) for line in maps)
    except PermissionError:
        return True  # Another user's; who knows.
    except OSError:
        return False


def _ask_for_stacks(path: str, pid: int, deadline: float) -> str:
    """Return what the worker says at its socket; nothing if it is not there or does not answer."""
    import socket

    from holdfast.control.socket_file import peer_of

    request = b"POST /handler/dump_traceback HTTP/1.0\r\nContent-Length: 0\r\n\r\n"
    received = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            # A relative path is the worker's, unless it has gone elsewhere since.
            connection.connect(os.path.join(f"/proc/{pid}/cwd", path))
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


def _ending_a_line(text: str) -> str:
    return f"{text.rstrip()}\n"
