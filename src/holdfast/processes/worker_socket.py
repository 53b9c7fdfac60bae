"""A unix socket at a path, which only its owner can open. The stale socket of a dead server is replaced.

The file has mode 0600 from the start. If the path has the socket of a live server, or is not a socket,
listening fails. It also fails if other users can replace files in the folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
import sys
import time
from typing import TYPE_CHECKING

from holdfast.errors import EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
PATH_BYTES_MAX = 107  # The kernel's: 108 with the zero at the end.
BACKLOG = 16
CONNECT_S = 1.0
"""How long to wait for a connection; if the server is alive, the kernel accepts it at once."""
LOCK_S = 1.0
"""How long to wait while another process checks the same folder."""
CREDENTIALS = struct.Struct("3i")


def socket_path(environ: Mapping[str, str]) -> str:
    """Return the path of the socket of a worker with this environment; empty for none.

    All workers of a node have the same value, so `${rank}` and `${local_rank}` in it are replaced.
    """
    place = environ.get(VARIABLE, "")
    for name, variable in (("rank", "RANK"), ("local_rank", "LOCAL_RANK")):
        place = place.replace(f"${{{name}}}", environ.get(variable, f"${{{name}}}"))
    return place


def listen_on_private_socket(path: str) -> socket.socket:
    """Return a socket that listens at `path`; raise `EnvironmentProblem` if that is impossible."""
    if not 0 < len(os.fsencode(path)) <= PATH_BYTES_MAX:
        raise EnvironmentProblem(
            f"{VARIABLE}: {path!r} is longer than {PATH_BYTES_MAX} bytes, the limit for a socket"
        )
    folder = os.path.dirname(path) or "."
    try:
        _check_folder(folder)
        lock = _lock(folder)
        try:
            _remove_stale(path)
            return _bind(path)
        finally:
            os.close(lock)
    except OSError as problem:
        raise EnvironmentProblem(
            f"{VARIABLE}: cannot listen at {path}: {problem.strerror or problem}"
        ) from None


def remove(path: str, inode: tuple[int, int]) -> None:
    """Remove the socket's file, if it is still the same one."""
    try:
        if identity(path) == inode:
            os.unlink(path)
    except OSError:
        pass  # It was removed, or the folder was.


def identity(path: str) -> tuple[int, int]:
    """Return an identity that distinguishes a file from another one at the same path."""
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a unix socket."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(found)
    return pid, uid


def is_owner(uid: int) -> bool:
    """Whether a user is the owner of this process, or root."""
    return uid in (os.geteuid(), 0)


def _check_folder(folder: str) -> None:
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    found = os.stat(folder)
    open_to_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not is_owner(found.st_uid) or (open_to_others and not found.st_mode & stat.S_ISVTX):
        raise EnvironmentProblem(
            f"{VARIABLE}: other users can replace the socket in {folder}",
            hint="use a folder that only you can write to: chmod 700",
        )


def _lock(folder: str) -> int:
    """Lock the folder, so that workers check it one at a time; continue if that takes too long."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno == errno.EWOULDBLOCK and time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            # A folder that cannot be locked, or that is locked for another purpose.
        return descriptor


def _remove_stale(path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise EnvironmentProblem(f"{VARIABLE}: {path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(CONNECT_S)
        try:
            trial.connect(path)
            pid, _ = peer_of(trial)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except TimeoutError:
            pid = 0
        except OSError as problem:
            if problem.errno != errno.EAGAIN:
                raise
            pid = 0  # Its queue is full, so the server is alive.
    raise EnvironmentProblem(
        f"{VARIABLE}: {path} is in use by {f'process {pid}' if pid else 'another process'}",
        hint="give each worker its own path, with ${local_rank} in it",
    )


def _bind(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if sys.platform == "linux":
            os.fchmod(listener.fileno(), 0o600)  # The file is created with this mode.
        listener.bind(path)
        try:
            os.chmod(path, 0o600)
            listener.listen(BACKLOG)
        except BaseException:
            os.unlink(path)
            raise
    except BaseException:
        listener.close()
        raise
    return listener
