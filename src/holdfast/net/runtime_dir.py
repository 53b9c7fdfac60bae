"""The folder with the sockets and locks of a user's agents on this machine.

It is `holdfast-UID` in `/tmp`, or in the folder that `HOLDFAST_RUNTIME_DIR` names. `XDG_RUNTIME_DIR` is not used: for
agents from cron, systemd or a container it differs from that of their user's shell, or is not set. Only the user can
access the folder (0700), so no other user can connect to a socket in it, create one, or list them. If another user
took the name first, an agent makes `holdfast-UID-RANDOM`; commands look in every such folder.

Connections to these sockets have no handshake. The name of a socket contains the protocol version of its agent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

from holdfast.defaults import PROTOCOL_VERSION

BASE_ENV = "HOLDFAST_RUNTIME_DIR"
BASE = "/tmp"  # noqa: S108 (the folder in it is checked before use)
SUFFIX = ".sock"
CONNECT_S = 3.0
NEW_S = 10.0
"""A socket younger than this may not listen yet."""
PATH_BYTES_MAX = 107  # The kernel's limit is 108, with the zero byte at the end.


def runtime_dir() -> str:
    """Return a folder that only this user can access, and create it if necessary."""
    base, name = _base(), f"holdfast-{os.geteuid()}"
    folder = os.path.join(base, name)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if found := runtime_dirs():
            return found[0]
        folder = f"{folder}-{os.urandom(4).hex()}"
        os.mkdir(folder, 0o700)
    return folder


def runtime_dirs() -> list[str]:
    """Return the folders with sockets of this user's agents."""
    base, name = _base(), f"holdfast-{os.geteuid()}"
    try:
        names = sorted(os.listdir(base))
    except FileNotFoundError:
        return []
    found = (os.path.join(base, one) for one in names if one == name or one.startswith(f"{name}-"))
    return [*filter(_is_private, found)]


def _base() -> str:
    return os.environ.get(BASE_ENV) or BASE


def _is_private(folder: str) -> bool:
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return False
    return found.st_uid == os.geteuid() and found.st_mode & 0o170_077 == 0o040_000


def socket_of(pid: int) -> str:
    """Return the path for the socket of an agent; raise `OSError` if no path is safe and short enough."""
    name = f"{pid}-{os.urandom(3).hex()}-v{PROTOCOL_VERSION}{SUFFIX}"
    path = os.path.join(runtime_dir(), name)
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
    return [
        os.path.join(folder, name)
        for folder in runtime_dirs()
        for name in sorted(os.listdir(folder))
        if name.endswith(SUFFIX)
    ]


def remove_if_dead(path: str) -> None:
    """Remove the socket of an agent that was killed."""
    with socket.socket(socket.AF_UNIX) as trial:
        trial.settimeout(CONNECT_S)
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):  # Another process was quicker.
                os.unlink(path)
        except OSError:
            pass


def remove_dead_sockets() -> None:
    """Remove the sockets of all killed agents. It connects to no agent that runs among this process's processes."""
    with contextlib.suppress(OSError):
        for path in agent_sockets():
            # The agent may run in another container that shares the folder.
            is_known = os.path.exists(f"/proc/{pid_of(path)}")
            if not is_known and time.time() - os.lstat(path).st_mtime > NEW_S:
                remove_if_dead(path)
