"""Reads the state, parent, command and environment of any process from `/proc`.

It needs no rights beyond those of the user who owns the process. A process may exit at any moment, so every reader
returns a default for a process that has exited or that this user may not read. The keeper imports
nothing of Holdfast and has its own readers for children.

`/proc/PID/environ` shows the variables with which a program was started. A worker that was forked,
from a zygote or by `start_method="fork"`, gets its variables later, and they are only in its memory.
This module can read them there if the worker runs the same Python as this process: the C library's
`environ` then has the same offset from the start of the same mapped file in both.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING

from holdfast.core.values import Value
from holdfast.printable import one_line

if TYPE_CHECKING:
    from collections.abc import Container

ANCESTORS_MAX = 64
THREADS_MAX = 32
COMMAND_CHARS_MAX = 500
VARIABLES_MAX = 2000
VALUE_BYTES_MAX = 4096
POINTER = "P"  # As `struct` names it.
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "exited, not yet reaped",
    "X": "exited",
    "I": "idle",
}


class Stat(Value):
    """The beginning of `/proc/PID/stat`; the state is empty if the process has exited."""

    state: str = ""
    parent: int = 0
    group: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether it has exited, even if it was not reaped yet."""
        return self.state in ("", "Z", "X")


def stat_of(pid: int) -> Stat:
    """Return a process's state, parent and group."""
    return _stat(f"/proc/{pid}")


def state_of(pid: int) -> str:
    """Return the letter of a process's state; empty if it has exited."""
    return stat_of(pid).state


def has_ended(pid: int) -> bool:
    """Whether a process has exited, even if it was not reaped yet."""
    return stat_of(pid).has_ended


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or by a debugger."""
    return state_of(pid) in ("T", "t")


def exists(pid: int) -> bool:
    """Whether there is such a process, reaped or not."""
    return pid > 0 and os.path.exists(f"/proc/{pid}")


def all_pids() -> list[int]:
    """Return the ids of all processes that this user can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def user_of(pid: int) -> int:
    """Return the user id of a process; -1 if it has exited."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if it has exited."""
    return stat_of(pid).parent


def root_of(pid: int, roots: Container[int]) -> int:
    """Return the nearest of `roots`, from a process up through its ancestors.

    Returns 0 if there is none, or if `pid` is this process.
    """
    if pid == os.getpid():
        return 0
    for _ in range(ANCESTORS_MAX):
        if pid <= 0:
            return 0
        if pid in roots:
            return pid
        pid = parent_of(pid)
    return 0


def is_descendant(pid: int) -> bool:
    """Whether a process still exists and is a descendant of this process."""
    return root_of(pid, (os.getpid(),)) > 0


def usage_of(pid: int) -> tuple[float, int]:
    """Return the CPU time of a process in seconds (below 0 if unknown), and its memory."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    try:
        ticks, pages = int(fields[11]) + int(fields[12]), int(fields[21])
    except (IndexError, ValueError):
        return -1.0, 0
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def name_of(pid: int) -> str:
    """Return the short name of a process, as `ps` shows it."""
    return _read(f"/proc/{pid}/comm").strip()


def command_of(pid: int) -> str:
    """Return the command line of a process in one line, or its name if it has none."""
    words = " ".join(_read(f"/proc/{pid}/cmdline").replace("\0", " ").split())
    return one_line(words or f"[{name_of(pid)}]", COMMAND_CHARS_MAX)


def describe(pid: int) -> str:
    """Return lines that describe a process and what each of its threads waits for; one line if it has exited.

    They contain no Python stacks, but distinguish a process that computes from one that sleeps, and one
    that waits for a lock from one that waits for a disk.
    """
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return f"process {pid} has exited\n"
    lines = [f"command: {command_of(pid)}"]
    for thread in threads[:THREADS_MAX]:
        folder = f"/proc/{pid}/task/{thread}"
        name = one_line(_read(f"{folder}/comm").strip())
        lines.append(f'  thread {thread} "{name}": {_activity(folder)}')
        lines += [f"    {line}" for line in _read(f"{folder}/stack").splitlines()]
    if len(threads) > THREADS_MAX:
        lines.append(f"  ... and {len(threads) - THREADS_MAX} more threads")
    return "\n".join(lines) + "\n"


def activity_of(pid: int) -> str:
    """Return what the main thread of a process does, as far as the kernel shows it."""
    return _activity(f"/proc/{pid}")


def _activity(folder: str) -> str:
    state = _stat(folder).state
    place = _read(f"{folder}/wchan").strip()
    where = f" in {place}" if place not in ("", "0") else ""
    return f"{STATES.get(state, state) or 'exited'}{where}"


def _stat(folder: str) -> Stat:
    # The name of the program, in brackets, may contain blanks and brackets.
    _, bracket, fields = _read(f"{folder}/stat").rpartition(")")
    state, *numbers = (fields.split()[:3] if bracket else ()) or ("",)
    return Stat(state, *map(int, numbers))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            return file.read()
    except OSError:
        return ""  # It has exited meanwhile, or this user may not read it.


def initial_environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return _parsed(file.read().split(b"\0"))
    except OSError:
        return {}


def current_environment(pid: int) -> dict[str, str]:
    """Return the environment in a process's memory; empty if it cannot be found or read."""
    here = _place_of_environ()
    if here is None:
        return {}
    file, offset = here
    try:
        base = _bases(pid).get(file)
        if base is None:
            return {}
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            return _parsed(_texts(memory.fileno(), base + offset))
    except (OSError, OverflowError, struct.error):
        return {}  # This user may not read it, or it has exited, or it is changing.


def _texts(memory: int, place: int) -> list[bytes]:
    size = struct.calcsize(POINTER)
    (array,) = struct.unpack(POINTER, os.pread(memory, size, place))
    pointers = os.pread(memory, size * VARIABLES_MAX, array)
    texts = []
    for at in range(0, len(pointers) - size + 1, size):
        (text,) = struct.unpack_from(POINTER, pointers, at)
        if not text:
            break
        texts.append(os.pread(memory, VALUE_BYTES_MAX, text).partition(b"\0")[0])
    return texts


def _parsed(texts: list[bytes]) -> dict[str, str]:
    pairs = (text.partition(b"=") for text in texts)
    return {os.fsdecode(name): os.fsdecode(value) for name, sign, value in pairs if name and sign}


def _place_of_environ() -> tuple[tuple[str, str], int] | None:
    """Return the mapped file that contains `environ`, and its offset from the start of the mapping."""
    try:
        place = ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ"))
        bases = _bases(os.getpid())
    except (OSError, ValueError):
        return None
    # `environ` may be in memory that is not mapped from a file. Such memory follows the library's mapping.
    below = [(base, file) for file, base in bases.items() if base <= place]
    if not below:
        return None
    base, file = max(below)
    return file, place - base


def _bases(pid: int) -> dict[tuple[str, str], int]:
    """Return the address at which each mapped file begins, by the file's device and inode number."""
    found: dict[tuple[str, str], int] = {}
    with open(f"/proc/{pid}/maps", errors="replace") as maps:
        for line in maps:
            span, _, _, device, number = line.split(maxsplit=5)[:5]
            if number != "0":
                found.setdefault((device, number), int(span.partition("-")[0], 16))
    return found
