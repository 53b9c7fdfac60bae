"""Calls that may hang run in a side thread, so that the caller does not hang."""

from __future__ import annotations

import os
import threading

import pytest

from holdfast.side_thread import CallTimedOut, SideThread

SOON_S = 0.05
PATIENCE_S = 30.0


def test_call_returns_or_raises_in_the_caller() -> None:
    side = SideThread("test-side", PATIENCE_S)
    assert side.call(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        side.call(divmod, 7, 0)
    assert side.call(threading.get_ident) != threading.get_ident()


def test_while_one_call_hangs_the_next_fails_at_once() -> None:
    read, write = os.pipe()
    side = SideThread("test-side", SOON_S)
    with pytest.raises(CallTimedOut):
        side.call(os.read, read, 1)
    with pytest.raises(CallTimedOut):
        side.call(os.getpid)
    (hanging,) = [one for one in threading.enumerate() if one.name == "test-side"]
    assert side.is_hanging
    os.write(write, b"x")
    hanging.join(PATIENCE_S)
    assert not side.is_hanging
    assert side.call(os.getpid) == os.getpid()
    os.close(read)
    os.close(write)


def test_forked_child_has_its_own_thread() -> None:
    side = SideThread("test-side", PATIENCE_S)
    side.call(os.getpid)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if side.call(os.getpid) == os.getpid() else 1)
    assert os.waitpid(pid, 0) == (pid, 0)
