"""Watchdog timers with the real torch on either side of the pipe."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from holdfast.elastic._impl.file_timer import FileTimerServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.timers.timer_requests import FileTimerRequest

pytestmark = pytest.mark.torch

WAIT_S = 60.0

# A worker with torch's own client. It prints a line before and after each action.
WORKER_OF_TORCH = """
import signal, sys, time
from torch.distributed.elastic import timer

timer.configure(timer.FileTimerClient(sys.argv[1], signal=signal.SIGTERM))
with timer.expires(after=60, scope="in time"):
    print("entered", flush=True)
    input()
print("left", flush=True)
input()
with timer.expires(after=0.1, scope="late"):
    print("hangs", flush=True)
    time.sleep(600)
"""

# torch's own server, in a separate process because it signals its own process too.
SERVER_OF_TORCH = """
import sys, time
from torch.distributed.elastic.timer import FileTimerServer

def log(what, request):
    print(what, request.scope_id if request else "", flush=True)

server = FileTimerServer(sys.argv[1], "job", max_interval=0.05, log_event=log)
server.start()
input()
server.stop()
"""

WORKER_OF_OURS = """
import sys, time
from holdfast.elastic import timer

timer.configure(timer.FileTimerClient(sys.argv[1]))
with timer.expires(after=600, scope="outer"):
    with timer.expires(after=600, scope="outer"):
        pass
    # If leaving the inner block had released both timers, no timer could expire.
    with timer.expires(after=0.1, scope="late"):
        time.sleep(600)
"""


@contextmanager
def started(program: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture
def logged() -> list[str]:
    return []


@pytest.fixture
def server(tmp_path: Path, logged: list[str]) -> Iterator[FileTimerServer]:
    def log(what: str, request: FileTimerRequest | None) -> None:
        logged.append(what if request is None else f"{what}: {request.scope_id} {request.signal}")

    made = FileTimerServer(str(tmp_path / "pipe"), "job", log_event=log)
    yield made
    made.close()


def take_until(server: FileTimerServer, timers: int) -> int:
    """Drive the server until this many timers are set, or it has killed a worker."""
    give_up = time.monotonic() + WAIT_S
    poll = select.poll()
    poll.register(server.fileno(), select.POLLIN)
    while len(server._timers) != timers:
        now = time.monotonic()
        assert now < give_up
        poll.poll((min(server.next_deadline() or give_up, give_up) - now) * 1000 + 1)
        if ended := server.check(time.monotonic()):
            return ended
    return 0


def test_torchs_client_is_served(
    server: FileTimerServer, logged: list[str], tmp_path: Path
) -> None:
    with started(WORKER_OF_TORCH, tmp_path / "pipe") as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == "entered\n"
        assert take_until(server, timers=1) == 0
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "left\n"
        assert take_until(server, timers=0) == 0
        assert server.next_deadline() is None
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "hangs\n"
        assert take_until(server, timers=-1) == 1
        assert worker.wait() == -15
    assert logged == ["timer expired: late 15", "kill worker process: late 15"]


def test_our_client_is_served_by_torchs_server(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    with started(SERVER_OF_TORCH, path) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "watchdog started \n"
        with started(WORKER_OF_OURS, path) as worker:
            assert worker.wait() == -9
        output = server.stdout.read()
        assert server.wait() == -9  # It also kills itself.
    assert output.splitlines() == ["timer expired late", "kill worker process late"]
    # The server was killed by itself and could not remove its pipe; ours does.
    assert os.path.exists(path)
    FileTimerServer(str(path), "job").stop()
    assert not os.path.exists(path)
