from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from unittest.mock import mock_open

import pytest

from holdfast.elastic._impl.scripts import (
    CyclingIterator,
    create_c10d_store,
    get_env_variable_or_raise,
    get_free_port,
    get_log_level,
    get_logger,
    get_socket_with_port,
    macros,
    read_proc_state,
)
from holdfast.processes.failures.error_file import read_error_file

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_env_variable_may_be_empty_but_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME", "")
    assert get_env_variable_or_raise("SOME") == ""
    monkeypatch.delenv("SOME")
    with pytest.raises(ValueError, match="SOME"):
        get_env_variable_or_raise("SOME")


ARGUMENTS = ["--rank=${local_rank}", "$local_rank", "$local_ranks", "${other}", "", 7, None]


def test_placeholders_are_replaced_in_strings_only() -> None:
    assert macros.substitute(ARGUMENTS, "3") == [
        "--rank=3", "3", "$local_ranks", "${other}", "", 7, None,
    ]  # fmt: skip
    assert macros.substitute([macros.local_rank], "3") == ["3"]


def torchs() -> Any:
    from torch.distributed.elastic.utils.data import CyclingIterator as Theirs

    return Theirs


@pytest.fixture(params=[lambda: CyclingIterator, pytest.param(torchs, marks=pytest.mark.torch)])
def kind(request: pytest.FixtureRequest) -> Any:
    """Our iterator, and torch's with the same interface."""
    return request.param()


def epoch(number: int) -> Iterator[tuple[int, str]]:
    return iter([(number, "a"), (number, "b")])


def nothing_in_some(number: int) -> Iterator[int]:
    return iter([number] if number % 3 == 0 else [])


def test_iterator_yields_all_epochs_in_order(kind: Any) -> None:
    elements = kind(2, epoch)
    assert iter(elements) is elements
    assert list(elements) == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert list(elements) == []
    # The first epoch exists even beyond the last, and an epoch without elements is skipped.
    assert list(kind(n=2, generator_fn=epoch, start_epoch=7)) == [(7, "a"), (7, "b")]
    assert list(kind(8, nothing_in_some)) == [0, 3, 6]


def test_epoch_is_created_when_it_begins(kind: Any) -> None:
    made = []

    def make(number: int) -> Iterator[int]:
        made.append(number)
        return iter([number])

    elements = kind(3, make)
    assert (next(elements), made) == (0, [0])
    assert (next(elements), made) == (1, [0, 1])


def test_many_empty_epochs_do_not_recurse() -> None:
    """torch's iterator recurses."""
    assert list(CyclingIterator(10_000, lambda number: iter([]))) == []


def test_a_port_is_held_while_its_socket_is_open() -> None:
    with get_socket_with_port() as held:
        port = held.getsockname()[1]
        # It holds the port on every address, and accepts no connection that is meant for its successor.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=30)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.2", port))
    assert get_free_port() > 0


def test_log_level_follows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGLEVEL", raising=False)
    assert get_log_level() == "WARNING"
    assert get_logger("some").level == logging.WARNING
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    assert get_logger("some").level == logging.DEBUG
    assert get_logger("some") is logging.getLogger("some")
    assert get_logger().name == __name__
    monkeypatch.setenv("LOGLEVEL", "LOUD")
    with pytest.raises(ValueError, match="LOUD"):
        get_logger("some")


def test_process_state_is_read_and_none_after_exit() -> None:
    assert read_proc_state(os.getpid()) == "R"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    assert read_proc_state(gone.pid) is None


@pytest.mark.parametrize(
    ("text", "state"), [("7 (a b) c) D 1 7 7", "D"), ("7 (x)", None), ("7 x", None), ("", None)]
)
def test_process_state_is_read_from_a_file_that_a_test_replaces(
    monkeypatch: pytest.MonkeyPatch, text: str, state: str | None
) -> None:
    """Tests of agents replace `open`, by one whose files contain text."""
    monkeypatch.setattr("builtins.open", mock_open(read_data=text))
    found = read_proc_state(7)
    monkeypatch.undo()
    assert found == state


def test_error_file_is_read_from_a_file_that_a_test_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("builtins.open", mock_open(read_data='{"message": "broken"}'))
    found = read_error_file("error.json")
    monkeypatch.undo()
    assert found == {"message": "broken"}


def test_create_c10d_store_waits_for_all_workers() -> None:
    with get_socket_with_port() as held:
        port = held.getsockname()[1]
    with ThreadPoolExecutor(3) as pool:
        tasks = [
            pool.submit(create_c10d_store, number == 0, "localhost", port, 3, 30.0)
            for number in range(3)
        ]
        stores = [one.result() for one in tasks]
    assert stores[1].get("_tcp_store/num_members/num_members") == b"3"
    for store in stores:
        store.close()
    with create_c10d_store(
        is_server=True, server_addr="localhost", world_size=1, wait_for_workers=False
    ) as store:
        assert store.num_keys() == 0
    with pytest.raises(TimeoutError, match="1 of 2"):
        create_c10d_store(
            is_server=True, server_addr="localhost", server_port=port, world_size=2, timeout=1.0
        )


@pytest.mark.parametrize("options", [{"is_server": True, "world_size": 2}, {"is_server": False}])
def test_create_c10d_store_rejects_an_unknown_port(options: Any) -> None:
    with pytest.raises(ValueError, match="server_port"):
        create_c10d_store(server_addr="localhost", **options)
