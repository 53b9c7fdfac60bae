"""What the kernel tells of any process: command, state, and what each thread waits in.

No stacks of Python, but enough to tell a process that computes from one that sleeps, and one that
waits for a lock from one that waits for a disk. It needs no rights beyond those of the same user.
"""

from __future__ import annotations

import os

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


def is_standing_still(pid: int) -> bool:
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
