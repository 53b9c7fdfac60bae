"""The folder with the sockets of a user's agents on this machine.

It is `$XDG_RUNTIME_DIR/holdfast`, or `/tmp/holdfast-UID` if `$XDG_RUNTIME_DIR` is not a folder. Only the
user can access it (0700), so no other user can connect to a socket in it, create one, or list them.

Connections to these sockets have no handshake. The name of a socket contains the protocol version of its agent.
"""

from __future__ import annotations

import os

from holdfast.defaults import PROTOCOL_VERSION

SUFFIX = ".sock"
FALLBACK = "/tmp"  # noqa: S108 (checked before use)
PATH_BYTES_MAX = 107  # The kernel's limit is 108, with the zero byte at the end.


def runtime_dir(*, make: bool = False) -> str:
    """Return the folder; empty if it does not exist. Raise `OSError` if it is not safe to use."""
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
        raise PermissionError(f"{folder} is not a folder that only this user can access")
    return folder


def socket_of(pid: int) -> str:
    """Return the path for the socket of an agent; raise `OSError` if no path is safe and short enough."""
    name = f"{pid}-{os.urandom(3).hex()}-v{PROTOCOL_VERSION}{SUFFIX}"
    path = os.path.join(runtime_dir(make=True), name)
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise OSError(f"{path} is too long for a socket")
    return path


def pid_of(path: str) -> str:
    """Return the process id of the agent with this socket."""
    return os.path.basename(path).partition("-")[0]


def version_of(path: str) -> str:
    """Return the protocol version of the agent with this socket."""
    return path.removesuffix(SUFFIX).rpartition("-v")[2]


def agent_sockets() -> list[str]:
    """Return the sockets of all agents of this user, including agents that were killed."""
    folder = runtime_dir()
    names = sorted(os.listdir(folder)) if folder else []
    return [os.path.join(folder, name) for name in names if name.endswith(SUFFIX)]
