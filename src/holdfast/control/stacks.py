"""Where a process is: its Python stacks by whatever means there is, else what the kernel tells.

1. By py-spy, from outside, which the process need not help with and cannot prevent by being stuck.
2. By its control socket, if it has one and still answers.
3. What `/proc` tells of its threads, and one line why there are no stacks and what would help.

The process may be any: it need not have imported anything of ours, nor be a Python at all.
"""

from __future__ import annotations

import os
import time

from holdfast.control.live_environment import started_with
from holdfast.control.process_facts import facts_of
from holdfast.control.py_spy import CannotSpy, spy
from holdfast.control.socket_file import place_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

ASK_S = 5.0
"""How long a worker may take to answer at its socket."""
TEXT_BYTES_MAX = 4 << 20
PYTHONS = ("python", "libpython", "pypy", "libpypy")


def dump_stacks(pid: int, env: Mapping[str, str] | None = None) -> str:
    """Return where a process is, as text that ends a line; never raises.

    It may take up to `SPY_S` and `ASK_S` for a process that is stuck, so a loop that must go on
    calls it in a thread. `env` is the environment of the process, if it is known better than
    `/proc` knows it.
    """
    try:
        return _ending_a_line(spy(pid))
    except CannotSpy as problem:
        why = str(problem) if is_python(pid) else "this is no Python program"
    place = place_from(started_with(pid) if env is None else env)
    if place and (told := _ask_for_stacks(place, pid)):
        return _ending_a_line(told)
    return f"{facts_of(pid)}no Python stacks: {why}\n"


def dump_into_log(pid: int, path: str, title: str = "") -> None:
    """Append where a process is to its log; a log that cannot be written raises `OSError`."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"\n[holdfast] {title or 'stacks'} (pid {pid}, {when})\n{dump_stacks(pid)}"
    # The worker writes to the same file: in one piece, so that its lines do not get in between.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        unwritten = memoryview(text.encode(errors="replace"))
        while unwritten:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
    finally:
        os.close(descriptor)


def is_python(pid: int) -> bool:
    """Whether a process is a Python interpreter, as far as can be seen from outside."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            return any(os.path.basename(line.strip()).startswith(PYTHONS) for line in maps)
    except OSError:
        return False


def _ask_for_stacks(path: str, pid: int) -> str:
    """Return what the worker says at its socket; nothing if it is not there or does not answer."""
    import socket

    from holdfast.control.socket_file import peer_of

    request = b"POST /handler/dump_traceback HTTP/1.0\r\nContent-Length: 0\r\n\r\n"
    deadline = time.monotonic() + ASK_S
    received = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ASK_S)
            connection.connect(path)
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
