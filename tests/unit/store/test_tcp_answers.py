"""The short way to an answer says what the long way does, or nothing."""

from __future__ import annotations

from struct import pack

import pytest

from holdfast.store.key_space import KeySpace
from holdfast.store.tcp.protocol import Requests
from holdfast.store.tcp.server import answer, answers_at_once

ME, OTHER = 1, 2


def blob(data: bytes) -> bytes:
    return pack("<Q", len(data)) + data


def get(key: bytes) -> bytes:
    return pack("<B", 3) + blob(key)


def wait(*keys: bytes) -> bytes:
    return pack("<BQ", 6, len(keys)) + b"".join(map(blob, keys))


@pytest.fixture
def space() -> KeySpace:
    made = KeySpace()
    made.set(b"/key", b"value")
    made.set(b"/empty", b"")
    made.push(b"/queue", b"one")
    return made


def long_way(space: KeySpace, data: bytes) -> bytes:
    requests = Requests()
    requests.feed(b"\x00\xce\xf7\x85\x3c" + data)
    request = requests.next()
    assert request is not None
    return answer(space, ME, *request)


@pytest.mark.parametrize("data", [get(b"/key"), get(b"/empty"), wait(b"/key"), wait(b"/empty")])
def test_what_is_there_is_answered_at_once_and_alike(space: KeySpace, data: bytes) -> None:
    assert answers_at_once(space)(ME, data) == long_way(space, data)


@pytest.mark.parametrize(
    "data",
    [
        get(b"/missing"),
        get(b"/queue"),
        wait(b"/missing"),
        wait(b"/queue"),
        wait(b"/key", b"/empty"),
        wait(),
        get(b"/key") + b"\x07",
        get(b"/key") + get(b"/key"),
        wait(b"/key") + get(b"/key"),
        get(b"/key")[:-1],
        wait(b"/key")[:-1],
        b"\x03",
        b"\x06",
        b"\x06" + pack("<Q", 1),
        b"\x03" + pack("<Q", 1 << 63) + b"/key",
        b"\x05" + wait(b"/key")[1:],
        b"\x07",
        b"\xff",
    ],
)
def test_all_else_takes_the_long_way(space: KeySpace, data: bytes) -> None:
    assert answers_at_once(space)(ME, data) is None


def test_a_client_that_waits_takes_the_long_way(space: KeySpace) -> None:
    assert not space.wait(ME, [b"/missing"])
    assert answers_at_once(space)(ME, get(b"/key")) is None
    assert answers_at_once(space)(OTHER, get(b"/key")) is not None


def test_while_anything_of_a_queue_is_promised_all_take_the_long_way(space: KeySpace) -> None:
    assert space.wait(ME, [b"/queue"])
    assert answers_at_once(space)(ME, get(b"/key")) is None
