"""Whose a process is: only what descends from a worker may be watched and ended."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

ANCESTORS_MAX = 64
"""How far up is looked for a worker."""


def parent_of(pid: int) -> int:
    """Return the parent of a process, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read()
    except OSError:
        return 0
    # The name of the program, in brackets, may have blanks and brackets in it.
    return int(fields.rpartition(b")")[2].split()[1])


def descends_from(pid: int, roots: Container[int]) -> bool:
    """Return whether a process is one of the roots or below one; this process itself never is."""
    if pid == os.getpid():
        return False
    for _ in range(ANCESTORS_MAX):
        if pid <= 0:
            return False
        if pid in roots:
            return True
        pid = parent_of(pid)
    return False


def is_below_this_process(pid: int) -> bool:
    """Return whether a process is a child of this one, or of its children, and is still there."""
    return descends_from(pid, (os.getpid(),))
