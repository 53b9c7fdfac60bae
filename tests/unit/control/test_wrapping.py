"""`worker_main`: the exception is recorded, the socket is there for as long as main runs."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.elastic.control_plane import TORCH_WORKER_SERVER_SOCKET, worker_main
from holdfast.errors import EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr("faulthandler.is_enabled", lambda: True)
    return tmp_path / "error.json"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(TORCH_WORKER_SERVER_SOCKET, str(tmp_path / "${local_rank}.sock"))
    monkeypatch.setenv("LOCAL_RANK", "3")
    return tmp_path / "3.sock"


def decorated(body: Callable[[], object]) -> None:
    worker_main()(body)()


def in_context(body: Callable[[], object]) -> None:
    with worker_main():
        body()


both = pytest.mark.parametrize("way", [decorated, in_context])


def fail() -> None:
    raise RuntimeError("boom")


def answers(place: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(str(place))
        client.sendall(b"POST /handler/ping HTTP/1.0\r\n\r\n")
        return b" 200 " in client.recv(100)


@both
def test_an_exception_is_recorded_and_goes_on(
    way: Callable[[Callable[[], object]], None], error_file: Path
) -> None:
    with pytest.raises(RuntimeError, match="boom") as caught:
        way(fail)
    message: dict[str, Any] = json.loads(error_file.read_text())["message"]
    assert message["message"] == "RuntimeError: boom"
    assert "in fail" in message["extraInfo"]["py_callstack"]
    frames = [entry.name for entry in caught.traceback]
    assert "_raise" not in frames


@both
def test_the_worker_can_be_asked_while_it_runs(
    way: Callable[[Callable[[], object]], None], place: Path, error_file: Path
) -> None:
    said: list[bool] = []
    way(lambda: said.append(answers(place)))
    assert said == [True]
    assert not place.exists()
    assert not error_file.exists()
    with pytest.raises(RuntimeError):
        way(fail)
    assert not place.exists()


@both
def test_a_socket_that_cannot_be_is_the_recorded_reason(
    way: Callable[[Callable[[], object]], None], place: Path, error_file: Path
) -> None:
    place.write_text("no socket")
    with pytest.raises(EnvironmentProblem, match="is no socket"):
        way(fail)
    assert "is no socket" in error_file.read_text()


@both
def test_without_the_variable_there_is_no_server(
    way: Callable[[Callable[[], object]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TORCH_WORKER_SERVER_SOCKET, raising=False)
    monkeypatch.chdir(tmp_path)
    way(lambda: None)
    assert os.listdir(tmp_path) == []


def test_a_decorated_function_is_what_it_was() -> None:
    @worker_main()
    def main(number: int, *, more: int = 1) -> int:
        """Do it."""
        return number + more

    assert main.__name__ == "main"
    assert main.__doc__ == "Do it."
    assert main(1, more=2) == 3
    assert main(5) == 6


def test_leaving_is_no_failure(error_file: Path) -> None:
    with pytest.raises(SystemExit), worker_main():
        raise SystemExit(3)
    assert not error_file.exists()
