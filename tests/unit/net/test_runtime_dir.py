"""The folder with the sockets of a user's agents."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from typing import TYPE_CHECKING

from holdfast.net import runtime_dir

if TYPE_CHECKING:
    import pytest


def test_sockets_of_killed_agents_are_removed_and_others_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with tempfile.TemporaryDirectory() as folder:  # A socket's path must be short.
        monkeypatch.setenv(runtime_dir.BASE_ENV, folder)
        dead, new, elsewhere, own = (
            runtime_dir.socket_of(pid) for pid in (ended.pid, ended.pid, ended.pid, os.getpid())
        )
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(elsewhere)  # Its agent runs in another container.
            listener.listen()
            for path in (dead, new, own):
                with socket.socket(socket.AF_UNIX) as one:
                    one.bind(path)
            for path in (dead, elsewhere, own):
                os.utime(path, (0, 0))
            runtime_dir.remove_dead_sockets()
            assert sorted(runtime_dir.agent_sockets()) == sorted((new, elsewhere, own))
