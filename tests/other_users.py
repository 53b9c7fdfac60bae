"""Another user of this host, for tests: a forked child that changes its user."""

from __future__ import annotations

import ctypes
import encodings.idna  # noqa: F401 (for names of hosts, where another user cannot read it)
import os
import shutil
import socket
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.net import peer_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STRANGER = 2002


def as_user(user: int, act: Callable[[], str], network_of: int = 0) -> str:
    """Return the result of a function in a process of another user, or its failure.

    The caller must import its modules first, because the other user may not be able to read them. The function can
    run in the network of another process.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if network_of:
                with open(f"/proc/{network_of}/ns/net") as namespace:
                    assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            result = act()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
            if isinstance(error, AssertionError):
                result += traceback.format_exc()
        finally:
            os.write(write, result.encode()[:4096])
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said_by_it:
        result = said_by_it.read()
    os.waitpid(pid, 0)
    return result


def hide_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel report no owner of any connection to this process."""

    def no_netlink(*_: object) -> int:
        raise OSError

    monkeypatch.setattr(peer_user, "_query_kernel", no_netlink)
    monkeypatch.setattr(peer_user, "TCP_TABLES", ())


@contextmanager
def shared_folder(mode: int = 0o1777) -> Iterator[Path]:
    """Create a folder that, unlike pytest's, other users can access; with this mode they may write to it."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-tests-"))
    try:
        folder.chmod(mode)
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def listening_as(user: int, host: str = "127.0.0.1") -> Iterator[int]:
    """Let another user listen on a free port of this address without serving it; return the port."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    (port_read, port_write), (stop_read, stop_write) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(stop_write)
            os.setgroups([])
            os.setresuid(user, user, user)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as one:
                os.write(port_write, str(one.getsockname()[1]).encode())
                os.close(port_write)
                os.read(stop_read, 1)
        finally:
            os._exit(0)
    try:
        os.close(port_write)
        os.close(stop_read)
        with os.fdopen(port_read) as port:
            yield int(port.read())
    finally:
        os.close(stop_write)
        os.waitpid(pid, 0)
