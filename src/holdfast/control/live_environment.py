"""The environment of another process: the one it was started with, or the one it has now.

`/proc/PID/environ` shows what a program was started with. A worker that was forked, from a zygote
or by `start_method="fork"`, got its variables later, and they are in its memory alone. There they
can be read if it runs the same Python as this process: then the C library's `environ` is as far
from the beginning of the same file in memory as it is here.
"""

from __future__ import annotations

import os
import struct

VARIABLES_MAX = 2000
VALUE_BYTES_MAX = 4096
POINTER = struct.Struct("P")


def started_with(pid: int) -> dict[str, str]:
    """Return the environment a process was started with; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return _parsed(file.read().split(b"\0"))
    except OSError:
        return {}


def has_now(pid: int) -> dict[str, str]:
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
