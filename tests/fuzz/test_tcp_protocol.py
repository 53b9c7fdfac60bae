"""The server of the TCPStore protocol parses any bytes, in any pieces, or closes the connection."""

from __future__ import annotations

from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st
from wire_strategies import cut, cuts

from holdfast.store.key_space import KeySpace, RequestRejected
from holdfast.store.tcp.store_server import WOKEN, respond
from holdfast.store.tcp.tcp_protocol import (
    ADD,
    BARRIER,
    CANCEL_WAIT,
    CHECK,
    COMPARE_SET,
    GETNUMKEYS,
    KEY_BYTES_MAX,
    KEYS_MAX,
    LIST_KEYS,
    MAGIC,
    MULTI_GET,
    MULTI_SET,
    PING,
    QUEUE_PUSH,
    SET,
    VALIDATE,
    VALUE_BYTES_MAX,
    WAIT,
    Requests,
)

untimed = settings(deadline=None, max_examples=300)  # Other programs may use the machine.

HELLO = bytes([VALIDATE]) + MAGIC.to_bytes(4, "little")
WITH_VALUE = (SET, 9, QUEUE_PUSH)  # 9 is APPEND.
WITH_KEY = (3, 8, 15, 16)  # GET, DELETE_KEY, QUEUE_POP, QUEUE_LEN.
BARE = (GETNUMKEYS, CANCEL_WAIT, LIST_KEYS)


def u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def blob(value: bytes) -> bytes:
    return u64(len(value)) + value


keys = st.sampled_from([b"", b"/a", b"/b", b"init/"]).map(blob)
values = st.one_of(st.sampled_from([b"", b"7", b"-1", b"word"]), st.binary(max_size=40)).map(blob)
numbers = st.integers(-3, 3).map(lambda number: number.to_bytes(8, "little", signed=True))


def request(operations: tuple[int, ...], *fields: st.SearchStrategy[bytes]) -> Any:
    first = st.sampled_from(operations).map(lambda operation: bytes([operation]))
    return st.tuples(first, *fields).map(b"".join)


def counted(one: st.SearchStrategy[bytes]) -> Any:
    return st.lists(one, max_size=4).map(lambda all_: u64(len(all_)) + b"".join(all_))


requests = st.one_of(
    request(WITH_VALUE, keys, values),
    request(WITH_KEY, keys),
    request((COMPARE_SET,), keys, values, values),
    request((ADD, BARRIER), keys, numbers),
    request((CHECK, WAIT, MULTI_GET), counted(keys)),
    request((MULTI_SET,), counted(st.tuples(keys, values).map(b"".join))),
    request((PING,), st.binary(min_size=4, max_size=4)),
    request(BARE),
)
wrong = st.one_of(
    st.binary(min_size=1, max_size=20),
    st.just(HELLO),
    request((SET, CHECK), st.integers(0, 2**64 - 1).map(u64)),
    request((SET, MULTI_SET), st.sampled_from([u64(KEY_BYTES_MAX + 1), u64(KEYS_MAX + 1)])),
    request((SET,), keys, st.just(u64(VALUE_BYTES_MAX + 1))),
    st.integers(19, 255).map(lambda operation: bytes([operation])),
)
greetings = st.one_of(st.just(HELLO), st.just(HELLO), st.just(HELLO), st.binary(max_size=6))
streams = st.tuples(
    greetings, st.lists(st.one_of(requests, requests, requests, wrong), max_size=8).map(b"".join)
).map(b"".join)


Parsed = list[tuple[int, list[Any]]]


def parse(reads: list[bytes]) -> tuple[Parsed, bool]:
    """Return the parsed requests, and whether the client must be disconnected."""
    parser = Requests()
    found: Parsed = []
    for read in reads:
        parser.feed(read)
        while (one := parser.next()) is not None:
            assert parser.validated
            found.append(one)
        assert parser.unfinished_bytes <= sum(map(len, reads))
        if parser.problem:
            assert parser.unfinished_bytes == parser.wanted_bytes == 0
        elif parser.unfinished_bytes:
            assert parser.wanted_bytes > 0
    return found, bool(parser.problem)


class Wrong(Exception):
    pass


class Missing(Exception):
    pass


class Plain:
    """A simple reference parser for a complete stream."""

    def __init__(self, stream: bytes) -> None:
        self.stream = stream

    def number(self, size: int = 8, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def take(self, size: int) -> bytes:
        if len(self.stream) < size:
            raise Missing
        taken, self.stream = self.stream[:size], self.stream[size:]
        return taken

    def blob(self, most: int) -> bytes:
        return self.take(self.limited(most))

    def limited(self, most: int) -> int:
        number = self.number()
        if number > most:
            raise Wrong
        return number

    def key(self) -> bytes:
        return self.blob(KEY_BYTES_MAX)

    def value(self) -> bytes:
        return self.blob(VALUE_BYTES_MAX)

    def fields(self, operation: int) -> list[Any]:
        if operation in WITH_VALUE:
            return [self.key(), self.value()]
        if operation in WITH_KEY:
            return [self.key()]
        if operation in BARE:
            return []
        match operation:
            case 2:
                return [self.key(), self.value(), self.value()]
            case 4 | 18:
                return [self.key(), self.number(signed=True)]
            case 5 | 6 | 10:
                return [self.key() for _ in range(self.limited(KEYS_MAX))]
            case 11:
                pairs = range(self.limited(KEYS_MAX))
                return [one for _ in pairs for one in (self.key(), self.value())]
            case 13:
                return [self.number(4)]
        raise Wrong


def reference_parse(stream: bytes) -> tuple[Parsed, bool]:
    found: Parsed = []
    plain = Plain(stream)
    try:
        if plain.number(1) != VALIDATE or plain.number(4) != MAGIC:
            raise Wrong
        while True:
            operation = plain.number(1)
            found.append((operation, plain.fields(operation)))
    except Missing:
        return found, False
    except Wrong:
        return found, True


@untimed
@given(streams, cuts)
def test_any_bytes_in_any_pieces_are_parsed_or_refused(stream: bytes, sizes: list[int]) -> None:
    expected = reference_parse(stream)
    assert parse([stream]) == expected
    assert parse(cut(stream, sizes)) == expected
    assert parse(cut(stream, [1])) == expected
    event(f"{min(len(expected[0]), 3)} or more requests, closed: {expected[1]}")


@untimed
@given(st.binary(max_size=100))
def test_no_request_is_accepted_before_validate(stream: bytes) -> None:
    found, _ = parse([stream])
    assert not found or stream.startswith(HELLO)


def converse(parsed: list[Parsed]) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Execute the clients' requests in turn; return the responses of each client, and the values."""
    space = KeySpace(4096)
    sent = [b""] * len(parsed)
    present = set(range(len(parsed)))
    for turn in range(max(map(len, parsed), default=0)):
        for client in sorted(present):
            if turn >= len(parsed[client]):
                continue
            try:
                sent[client] += respond(space, client, *parsed[client][turn]) or b""
            except RequestRejected:
                present.discard(client)
                space.leave(client)
            while space.woken:
                woken, space.woken = space.woken, []
                for other in woken:
                    assert other in present
                    sent[other] += WOKEN
    assert 0 <= space.bytes_held <= 4096
    values = {bytes(key): bytes(space.get(key)) for key in space.keys()}  # noqa: SIM118
    for client in present:
        space.leave(client)
    space.woken.clear()
    assert not any((space._waits, space._single, space._several, space._barriers, space.promises))
    return sent, values


# Valid requests only; otherwise nearly every client is disconnected before it waits for a key that another one sets.
conversations = st.lists(requests, min_size=4, max_size=12).map(lambda all_: HELLO + b"".join(all_))


@untimed
@given(st.lists(conversations | conversations | streams, min_size=1, max_size=4), cuts)
def test_several_clients_never_break_the_key_space(clients: list[bytes], sizes: list[int]) -> None:
    whole = converse([parse([one])[0] for one in clients])
    assert converse([parse(cut(one, sizes))[0] for one in clients]) == whole
