"""What the kernel tells of any process: command, state, and what each thread waits in.

No stacks of Python, but enough to tell a process that computes from one that sleeps, and one that
waits for a lock from one that waits for a disk. It needs no rights beyond those of the same user.
"""

from __future__ import annotations

import os
import struct

THREADS_MAX = 32
COMMAND_CHARS_MAX = 500
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended, not yet reaped",
    "X": "ended",
    "I": "idle",
}


def facts_of(pid: int) -> str:
    """Return lines about a process; one that says so if it is gone."""
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return f"process {pid} has ended\n"
    lines = [f"command: {command_of(pid)}"]
    for thread in threads[:THREADS_MAX]:
        lines.append(_thread_line(f"/proc/{pid}/task/{thread}", thread))
        lines += [f"    {line}" for line in _read(f"/proc/{pid}/task/{thread}/stack").splitlines()]
    if len(threads) > THREADS_MAX:
        lines.append(f"  ... and {len(threads) - THREADS_MAX} more threads")
    return "\n".join(lines) + "\n"


def command_of(pid: int) -> str:
    """Return the command line of a process in one line, or its name where it has none."""
    words = " ".join(_read(f"/proc/{pid}/cmdline").replace("\0", " ").split())
    return words[:COMMAND_CHARS_MAX] or f"[{_read(f'/proc/{pid}/comm').strip()}]"


def name_of(pid: int) -> str:
    """Return the short name a process has in `ps`."""
    return _read(f"/proc/{pid}/comm").strip()


def state_of(pid: int) -> str:
    """Return the letter of the state a process is in, empty if it is gone."""
    return _state(f"/proc/{pid}")


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or by another that looks into it."""
    return state_of(pid) in ("T", "t")


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped."""
    return state_of(pid) in ("", "Z", "X")


def _thread_line(folder: str, thread: int) -> str:
    name = _read(f"{folder}/comm").strip()
    letter = _state(folder)
    state = STATES.get(letter, letter) or "gone"
    place = _read(f"{folder}/wchan").strip()
    where = f", in {place}" if place not in ("", "0") else ""
    return f'  thread {thread} "{name}": {state}{where}'


def _state(folder: str) -> str:
    # The name of the program, in brackets, may have blanks and brackets in it.
    return "".join(_read(f"{folder}/stat").rpartition(")")[2].split()[:1])


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""  # Gone meanwhile, or not for us to read.


# The environment of another process: the one it was started with, or the one it has now.
#
# `/proc/PID/environ` shows what a program was started with. A worker that was forked, from a
# zygote
# or by `start_method="fork"`, got its variables later, and they are in its memory alone. There
# they
# can be read if it runs the same Python as this process: then the C library's `environ` is as far
# from the beginning of the same file in memory as it is here.


VARIABLES_MAX = 2000
VALUE_BYTES_MAX = 4096
POINTER = struct.Struct("P")


def initial_environment(pid: int) -> dict[str, str]:
    """Return the environment a process was started with; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return _parsed(file.read().split(b"\0"))
    except OSError:
        return {}


def current_environment(pid: int) -> dict[str, str]:
    """Return the environment out of a process's memory; empty if that cannot be found or read."""
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
        return {}  # Not for us to read, or it ended, or changed just now.


def _texts(memory: int, place: int) -> list[bytes]:
    size = POINTER.size
    (array,) = POINTER.unpack(os.pread(memory, size, place))
    pointers = os.pread(memory, size * VARIABLES_MAX, array)
    texts = []
    for at in range(0, len(pointers) - size + 1, size):
        (text,) = POINTER.unpack_from(pointers, at)
        if not text:
            break
        texts.append(os.pread(memory, VALUE_BYTES_MAX, text).partition(b"\0")[0])
    return texts


def _parsed(texts: list[bytes]) -> dict[str, str]:
    pairs = (text.partition(b"=") for text in texts)
    return {os.fsdecode(name): os.fsdecode(value) for name, sign, value in pairs if name and sign}


def _place_of_environ() -> tuple[tuple[str, str], int] | None:
    """Return the file of which `environ` is a part in memory, and how far from its beginning."""
    import ctypes

    try:
        place = ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ"))
        bases = _bases(os.getpid())
    except (OSError, ValueError):
        return None
    # What is zero at first has no file of its own, but follows what has.
    below = [(base, file) for file, base in bases.items() if base <= place]
    if not below:
        return None
    base, file = max(below)
    return file, place - base


def _bases(pid: int) -> dict[tuple[str, str], int]:
    """Return where in memory each mapped file begins, by device and number of the file."""
    found: dict[tuple[str, str], int] = {}
    with open(f"/proc/{pid}/maps", errors="replace") as maps:
        for line in maps:
            span, _, _, device, number = line.split(maxsplit=5)[:5]
            if number != "0":
                found.setdefault((device, number), int(span.partition("-")[0], 16))
    return found
