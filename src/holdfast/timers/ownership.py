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


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or only waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read()
    except OSError:
        return True
    return fields.rpartition(b")")[2].split()[0] in (b"Z", b"X")


def root_of(pid: int, roots: Container[int]) -> int:
    """Return which of the roots a process is or is below, 0 for none; this process has none."""
    if pid == os.getpid():
        return 0
    for _ in range(ANCESTORS_MAX):
        if pid <= 0:
            return 0
        if pid in roots:
            return pid
        pid = parent_of(pid)
    return 0


def descends_from(pid: int, roots: Container[int]) -> bool:
    """Return whether a process is one of the roots or below one; this process itself never is."""
    return root_of(pid, roots) > 0


def is_below_this_process(pid: int) -> bool:
    """Return whether a process is a child of this one, or of its children, and is still there."""
    return descends_from(pid, (os.getpid(),))
