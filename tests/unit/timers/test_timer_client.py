"""A script's side: blocks with timers, and requests over the pipe."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import UsageError
from holdfast.timers import timer_client as clients
from holdfast.timers.pipe import TAKE_BYTES_MAX, RequestPipe
from holdfast.timers.timer_client import FileTimerClient, TimerClient, expires
from holdfast.timers.timer_requests import LINE_BYTES_MAX, FileTimerRequest, parse_request

if TYPE_CHECKING:
    from collections.abc import Iterator


class Kept(TimerClient):
    """Keeps all requests, as a server does."""

    def __init__(self) -> None:
        self.timers: dict[str, float] = {}

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        if scope_id == "refused":
            raise BrokenPipeError
        self.timers[scope_id] = expiration_time

    def release(self, scope_id: str) -> None:
        del self.timers[scope_id]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.setattr(clients, "_configured", None)
    kept = Kept()
    yield kept
    assert kept.timers == {}
    assert not clients._scopes_in_use


def test_block_has_a_timer_while_it_is_entered(client: Kept) -> None:
    before = time.time()
    with expires(60, "load", client):
        assert before + 60 <= client.timers["load"] <= time.time() + 60
    with pytest.raises(ZeroDivisionError), expires(60, "load", client):
        raise ZeroDivisionError
    with expires(60, client=client):
        (scope,) = client.timers
    file, _, line = scope.rpartition("#")
    assert "with expires(60, client=client)" in Path(file).read_text().splitlines()[int(line) - 1]
    with pytest.raises(BrokenPipeError), expires(60, "refused", client):
        pass


def test_nested_blocks_keep_their_own_time(client: Kept) -> None:
    def nest(times: list[float], scope: str | None) -> None:
        with expires(times[0], scope, client):
            if times[1:]:
                nest(times[1:], scope)
            left.append(sorted(round(at - start) for at in client.timers.values()))

    start = time.time()
    for scope in (None, "step"):
        left: list[list[int]] = []
        nest([60, 5, 30], scope)
        assert left == [[5, 30, 60], [5, 60], [60]]


def test_block_may_be_entered_repeatedly_and_by_several_threads(client: Kept) -> None:
    block = expires(60, "a", client)
    with block, block:
        assert sorted(client.timers) == ["a", "a (2)"]
    entered, leave = threading.Event(), threading.Event()

    def enter_block() -> None:
        with block:
            entered.set()
            leave.wait()

    other = threading.Thread(target=enter_block, daemon=True)
    with block:
        other.start()
        entered.wait()
    # If the other thread's timer were released, this thread's timer would never be released.
    assert [*client.timers] == ["a (2)"]
    with block:
        assert [*client.timers] == ["a (2)", "a"]
    assert [*client.timers] == ["a (2)"]
    leave.set()
    other.join()
    block.__enter__()
    leaving = threading.Thread(target=block.__exit__, args=(None, None, None))
    leaving.start()
    leaving.join()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[RequestPipe]:
    made = RequestPipe(str(tmp_path / "pipe"))
    yield made
    made.close()
    made.close()


def received(pipe: RequestPipe) -> list[FileTimerRequest]:
    return [parse_request(line) for line in b"".join(pipe.chunks()).splitlines()]


def test_each_request_is_one_write_of_one_line(pipe: RequestPipe) -> None:
    client = FileTimerClient(pipe.path, signal.SIGTERM)
    client.acquire("step", 12.5)
    client.release("step")
    assert received(pipe) == [
        FileTimerRequest(os.getpid(), "step", 12.5, signal.SIGTERM),
        FileTimerRequest(os.getpid(), "step", -1, 0),
    ]
    assert FileTimerClient(pipe.path).signal == signal.SIGKILL
    bare = len(FileTimerRequest(os.getpid(), "", 1.0, 9).to_json())
    client.acquire("x" * (LINE_BYTES_MAX - bare - 2), 1.0)
    for scope in ("x" * (LINE_BYTES_MAX - bare), "ä" * 1000):
        with pytest.raises(RuntimeError):
            client.acquire(scope, 1.0)


def test_client_waits_for_a_starting_server(tmp_path: Path) -> None:
    tried = threading.Event()

    class Waiting(FileTimerClient):
        def _open(self) -> int:
            tried.set()
            return super()._open()

    asking = threading.Thread(target=Waiting(str(tmp_path / "pipe")).acquire, args=("a", 1.0))
    asking.start()
    assert tried.wait(20)
    pipe = RequestPipe(str(tmp_path / "pipe"))
    asking.join(20)
    assert [one.scope_id for one in received(pipe)] == ["a"]
    pipe.close()


def test_client_without_a_server_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    client = FileTimerClient(str(tmp_path / "pipe"))
    with pytest.raises(BrokenPipeError, match="pipe"):
        client.acquire("a", 1.0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BrokenPipeError):
        client.acquire("a", 1.0)
    with pytest.raises(
        BrokenPipeError
    ):  # The agent could not create its pipe, so waiting is useless.
        FileTimerClient("").acquire("a", 1.0)
    assert len(pauses) == 2 * (clients.OPEN_TRIES_MAX - 1)


def test_client_waits_for_a_full_pipe(pipe: RequestPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FileTimerClient(pipe.path)
    monkeypatch.setattr(clients, "FULL_S_MAX", 0.0)

    def fill() -> None:
        while True:
            client.acquire("x" * 3000, 1.0)

    with pytest.raises(BlockingIOError):
        fill()
    monkeypatch.setattr(clients, "FULL_S_MAX", 20.0)
    asking = threading.Thread(target=client.acquire, args=("last", 1.0))
    asking.start()
    lines = b""
    while b"last" not in lines:
        lines += b"".join(pipe.chunks())
    asking.join()
    assert {len(line) for line in lines.splitlines()[:-1]} == {len(lines.splitlines()[0])}


def test_concurrent_clients_do_not_mix_requests(pipe: RequestPipe) -> None:
    client = FileTimerClient(pipe.path)

    def acquire_timers(number: int) -> None:
        for count in range(50):
            client.acquire(f"{number} {count} " + "x" * 3000, 1.0)

    threads = [threading.Thread(target=acquire_timers, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    lines = b""
    while any(one.is_alive() for one in threads):
        chunks = b"".join(pipe.chunks())
        assert len(chunks) < TAKE_BYTES_MAX + (1 << 16)
        lines += chunks
    lines += b"".join(pipe.chunks())
    for one in threads:
        one.join()
    scopes = [parse_request(line).scope_id.split()[:2] for line in lines.splitlines()]
    assert sorted(scopes) == sorted([str(a), str(b)] for a in range(8) for b in range(50))


def test_pipe_is_private_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o666)
    pipe = RequestPipe(str(path))
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    for _ in range(2):  # It neither blocks nor ends when writers open and close it.
        assert [*pipe.chunks()] == []
        path.write_bytes(b"line\n")
        assert b"".join(pipe.chunks()) == b"line\n"
    with pytest.raises(UsageError):
        RequestPipe(str(path))  # Another agent's.
    assert pipe.is_reachable()
    path.unlink()
    (tmp_path / "other").touch()  # So that it gets another number.
    path.write_text("mine")
    assert not pipe.is_reachable()
    pipe.close()
    assert path.read_text() == "mine"


def test_other_file_at_the_path_is_kept(tmp_path: Path) -> None:
    plain, link, folder = tmp_path / "plain", tmp_path / "link", tmp_path / "folder"
    plain.write_text("precious")
    link.symlink_to(plain)
    folder.mkdir()
    for path in (plain, link, folder, plain / "pipe", tmp_path / "missing" / "pipe"):
        with pytest.raises(UsageError, match=str(path)):
            RequestPipe(str(path))
    assert plain.read_text() == "precious"
