from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from holdfast.timers import client as file_client
from holdfast.timers.client import FileTimerClient
from holdfast.timers.protocol import LINE_BYTES_MAX, FileTimerRequest, parse_request
from holdfast.timers.server import Fifo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    made = Fifo(str(tmp_path / "pipe"))
    yield made
    made.close()


def came(fifo: Fifo) -> list[FileTimerRequest]:
    return [parse_request(line) for line in b"".join(fifo.chunks()).splitlines()]


def test_a_timer_is_asked_for_and_released_in_a_line_each(fifo: Fifo) -> None:
    client = FileTimerClient(fifo.path, signal.SIGTERM)
    client.acquire("step", 12.5)
    client.release("step")
    assert came(fifo) == [
        FileTimerRequest(os.getpid(), "step", 12.5, signal.SIGTERM),
        FileTimerRequest(os.getpid(), "step", -1, 0),
    ]
    assert FileTimerClient(fifo.path).signal == signal.SIGKILL


def test_a_line_is_at_most_what_is_written_in_one_piece(fifo: Fifo) -> None:
    client = FileTimerClient(fifo.path)
    bare = len(FileTimerRequest(os.getpid(), "", 1.0, 9).to_json()) + 1
    client.acquire("x" * (LINE_BYTES_MAX - bare), 1.0)
    assert len(b"".join(fifo.chunks())) == LINE_BYTES_MAX
    for scope in ("x" * (LINE_BYTES_MAX - bare + 1), "ä" * 1000):
        with pytest.raises(RuntimeError, match="give the scope a shorter name"):
            client.acquire(scope, 1.0)


def test_it_waits_for_a_server_that_is_on_its_way(tmp_path: Path) -> None:
    path = str(tmp_path / "pipe")
    tried = threading.Event()

    class Waiting(FileTimerClient):
        def _open(self) -> int:
            tried.set()
            return super()._open()

    asking = threading.Thread(target=Waiting(path).acquire, args=("a", 1.0))
    asking.start()
    assert tried.wait(20)
    fifo = Fifo(path)
    asking.join(20)
    assert [one.scope_id for one in came(fifo)] == ["a"]
    fifo.close()


def test_without_a_server_the_pipe_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    client = FileTimerClient(str(tmp_path / "pipe"))
    with pytest.raises(
        BrokenPipeError, match=r"no timer server reads the pipe \(No such file.*pipe"
    ):
        client.acquire("a", 1.0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BrokenPipeError, match="No such device"):
        client.acquire("a", 1.0)
    assert len(pauses) == 2 * (file_client.OPEN_TRIES_MAX - 1)
    # So it is where an agent could not make its pipe: nobody is on the way there.
    with pytest.raises(BrokenPipeError, match="no pipe for timers here, and the agent has said"):
        FileTimerClient("").acquire("a", 1.0)
    assert len(pauses) == 2 * (file_client.OPEN_TRIES_MAX - 1)


def test_a_full_pipe_is_waited_for(fifo: Fifo, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FileTimerClient(fifo.path)
    monkeypatch.setattr(file_client, "FULL_S_MAX", 0.0)

    def fill() -> None:
        while True:
            client.acquire("x" * 3000, 1.0)

    with pytest.raises(BlockingIOError, match=r"does not read its pipe.*/pipe"):
        fill()
    monkeypatch.setattr(file_client, "FULL_S_MAX", 20.0)
    asking = threading.Thread(target=client.acquire, args=("last", 1.0))
    asking.start()
    lines = b""
    while b"last" not in lines:
        lines += b"".join(fifo.chunks())
    asking.join()
    assert {len(line) for line in lines.splitlines()[:-1]} == {len(lines.splitlines()[0])}


def test_many_at_once_do_not_mix(fifo: Fifo) -> None:
    client = FileTimerClient(fifo.path)

    def ask(number: int) -> None:
        for count in range(50):
            client.acquire(f"{number} {count} " + "x" * 3000, 1.0)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    lines = b""
    while any(one.is_alive() for one in threads):
        lines += b"".join(fifo.chunks())
    lines += b"".join(fifo.chunks())
    for one in threads:
        one.join()
    scopes = [parse_request(line).scope_id.split()[:2] for line in lines.splitlines()]
    assert sorted(scopes) == sorted([str(a), str(b)] for a in range(8) for b in range(50))
