"""Who listens at a port of this machine, as far as this user may know.

It reads `/proc`: the kernel's table of sockets has the inode of each, and the descriptors of a
process show whose it is. Of other users' processes nothing can be seen; then nothing is said.
"""

from __future__ import annotations

import os

LISTENING = "0A"
COMMAND_CHARS_MAX = 80


def owner_of(port: int) -> str:
    """Return who has the port (`pid 17, python train.py`), or nothing if that cannot be seen."""
    inodes = _listening_inodes(port)
    if not inodes:
        return ""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for name in os.listdir("/proc"):
        if name.isdigit() and _has_one(int(name), wanted):
            command = _command(int(name))
            return f"pid {name}, {command}" if command else f"pid {name}"
    return ""


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    ending = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                rows = [line.split() for line in lines]
        except OSError:
            continue  # No IPv6 here, or no `/proc`.
        # Columns: number, local address, remote address, state, ..., inode.
        found |= {
            row[9]
            for row in rows
            if len(row) > 9 and row[1].endswith(ending) and row[3] == LISTENING
        }
    return found


def _has_one(pid: int, wanted: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            try:
                if os.readlink(f"{folder}/{name}") in wanted:
                    return True
            except OSError:
                continue  # It was closed meanwhile.
    except OSError:
        pass  # Another user's, or gone.
    return False


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            text = words.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    text = "".join(one if one.isprintable() else "?" for one in text)
    return text if len(text) <= COMMAND_CHARS_MAX else text[: COMMAND_CHARS_MAX - 3] + "..."
