"""The folder in which the agents of a user can be found on this machine: one socket each.

`$XDG_RUNTIME_DIR/holdfast`, or `/tmp/holdfast-UID` where there is no such folder. It is the user's
alone (0700), so nobody else can open a socket in it, put one there, or even see which there are.
"""

from __future__ import annotations

import os

SUFFIX = ".sock"
FALLBACK = "/tmp"  # noqa: S108 (what is made there is checked)
PATH_BYTES_MAX = 107  # The kernel's: 108 with the zero at the end.


def runtime_dir(*, make: bool = False) -> str:
    """Return the folder, or nothing if there is none; raise `OSError` if it is not safe to use."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    user = os.geteuid()
    if base and os.path.isdir(base):
        folder = os.path.join(base, "holdfast")
    else:
        folder = os.path.join(FALLBACK, f"holdfast-{user}")
    try:
        if make:
            os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return ""
    if found.st_uid != user or found.st_mode & 0o170_077 != 0o040_000:
        raise PermissionError(f"{folder} is not a folder that only this user can use")
    return folder


def socket_of(pid: int) -> str:
    """Return the path for the socket of an agent; raise `OSError` if there can be none."""
    path = os.path.join(runtime_dir(make=True), f"{pid}-{os.urandom(3).hex()}{SUFFIX}")
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise OSError(f"{path} is too long for a socket")
    return path


def pid_of(path: str) -> str:
    """Return the process whose socket this is."""
    return os.path.basename(path).partition("-")[0]


def sockets_here() -> list[str]:
    """Return the sockets of all agents of this user, also of some that were killed."""
    folder = runtime_dir()
    names = sorted(os.listdir(folder)) if folder else []
    return [os.path.join(folder, name) for name in names if name.endswith(SUFFIX)]
