"""Requests out of bytes, however they come. The rest of it is in `tests/fuzz`."""

from __future__ import annotations

import pytest

from holdfast.store.tcp import protocol
from holdfast.store.tcp.protocol import (
    CHECK,
    GET,
    KEYS_MAX,
    MULTI_SET,
    SET,
    VALUE_BYTES_MAX,
    Requests,
)

HELLO = bytes.fromhex("00 ce f7 85 3c")


def u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def blob(value: bytes) -> bytes:
    return u64(len(value)) + value


def greeted() -> Requests:
    requests = Requests()
    requests.feed(HELLO)
    assert requests.next() is None
    assert requests.validated
    return requests


def test_the_greeting_may_come_in_pieces() -> None:
    requests = Requests()
    for byte in HELLO[:-1]:
        requests.feed(bytes([byte]))
        assert requests.next() is None
        assert not requests.validated
    requests.feed(HELLO[-1:] + bytes([GET]) + blob(b"k"))
    assert requests.next() == (GET, [b"k"])
    assert requests.next() is None


@pytest.mark.parametrize(
    "first", [b"\x03", b"G", b"\xff", HELLO[:4] + b"\x00", bytes([GET]) + blob(b"k") + HELLO]
)
def test_whoever_does_not_greet_is_refused(first: bytes) -> None:
    requests = Requests()
    requests.feed(first)
    assert requests.next() is None
    assert requests.problem
    requests.feed(HELLO + bytes([GET]) + blob(b"k"))
    assert requests.next() is None


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (HELLO, "a client that introduces itself twice"),
        (b"\x13", "an operation that does not exist: 19"),
        (bytes([GET]) + u64(8193), "a key of 8193 bytes; 8192 is the most"),
        (bytes([GET]) + u64(2**64 - 1), "a key of 18446744073709551615 bytes"),
        (bytes([SET]) + blob(b"k") + u64(VALUE_BYTES_MAX + 1), "a value of 8388609 bytes"),
        (bytes([CHECK]) + u64(KEYS_MAX + 1), "a request of 131073 keys; 131072 is the most"),
    ],
)
def test_what_is_wrong_is_said_as_soon_as_it_is_known(sent: bytes, problem: str) -> None:
    requests = greeted()
    requests.feed(bytes([GET]) + blob(b"before") + sent)
    assert requests.next() == (GET, [b"before"])
    assert requests.next() is None
    assert problem in requests.problem


def test_a_large_value_in_pieces_is_put_together_once() -> None:
    requests = greeted()
    value = bytes(range(256)) * 4096
    stream = bytes([SET]) + blob(b"k") + blob(value)
    for at in range(0, len(stream), 1000):
        assert requests.next() is None
        before = requests.wanted_bytes
        requests.feed(stream[at : at + 1000])
        if at:
            assert requests.wanted_bytes in (0, before - 1000) or before < 1000
    assert requests.next() == (SET, [b"k", value])
    assert requests.unfinished_bytes == 0


def test_fields_that_are_here_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's server, a request of many keys is read anew with each piece of it."""
    looks = 0
    real = protocol._UNPACK[1]

    def counting(data: bytes, at: int) -> tuple[int]:
        nonlocal looks
        looks += 1
        number: tuple[int] = real(data, at)
        return number

    requests = greeted()
    monkeypatch.setattr(protocol, "_UNPACK", (counting,) * 6)
    keys = [b"key %d" % number for number in range(2000)]
    stream = bytes([CHECK]) + u64(len(keys)) + b"".join(map(blob, keys))
    for at in range(0, len(stream), 100):
        assert requests.next() is None
        requests.feed(stream[at : at + 100])
    assert requests.next() == (CHECK, keys)
    assert looks <= len(keys) + 2 * len(stream) // 100


def test_a_whole_request_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "REQUEST_BYTES_MAX", 1000)
    requests = greeted()
    requests.feed(bytes([MULTI_SET]) + u64(100))
    for _ in range(20):
        assert requests.next() is None
        assert requests.unfinished_bytes < 1000
        requests.feed(blob(b"k") + blob(bytes(100)))
    assert requests.problem == "a request of more than 1000 bytes"
