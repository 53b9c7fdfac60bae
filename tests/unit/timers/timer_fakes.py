"""Real processes to watch, and a record of the server's actions."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.elastic._impl.file_timer import FileTimerServer
    from holdfast.timers.timer_requests import FileTimerRequest

WAIT_S = 20.0


class Record:
    """The reports, dumps and kills, in order."""

    def __init__(self, dump_fails: bool = False, kill_fails: int = 0) -> None:
        self.log: list[str] = []
        self.requests: list[FileTimerRequest] = []
        self._dump_fails = dump_fails
        self.kill_fails = kill_fails

    def report(self, what: str, request: FileTimerRequest | None) -> None:
        self.log.append(what if request is None else f"{what}: {request.scope_id}")
        if request is not None:
            self.requests.append(request)

    def dump(self, pid: int) -> None:
        assert os.path.exists(f"/proc/{pid}")
        self.log.append(f"dump {pid}")
        if self._dump_fails:
            raise OSError("no stacks")

    def kill(self, pid: int, signum: int) -> None:
        self.log.append(f"kill {pid} with {int(signum)}")
        if self.kill_fails:
            self.kill_fails -= 1
            raise PermissionError(1, "Operation not permitted")
        os.kill(pid, signum)


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A child that does nothing until it is killed."""
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def run_python(program: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A child that runs this Python program, and is killed afterwards."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        try:
            yield child
        finally:
            child.kill()


def drive(server: FileTimerServer, ended: int) -> None:
    """Drive a server as an agent does, with its descriptor and deadline, until it has killed this many."""
    give_up = time.monotonic() + WAIT_S
    poll = select.poll()
    poll.register(server.fileno(), select.POLLIN)
    while ended > 0:
        now = time.monotonic()
        assert now < give_up, "nothing happened in time"
        deadline = min(server.next_deadline() or give_up, give_up)
        poll.poll(max(0.0, deadline - now) * 1000 + 1)
        ended -= server.check(time.monotonic())
