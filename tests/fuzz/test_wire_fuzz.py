"""Any bytes, in any pieces, are decoded into messages, or raise a `WireError`."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from wire_strategies import anything, cut, cuts, messages, structs

from holdfast.core.protocol import Request
from holdfast.wire.frames import HEADER_BYTES, TAG_BYTES, FrameReader, Seal, encode_frame
from holdfast.wire.handshake import ClientHandshake, ServerHandshake
from holdfast.wire.messages import (
    AgentIdentity,
    Challenge,
    Contacts,
    Events,
    EventsQuery,
    Goodbye,
    HandshakeMessage,
    Hello,
    JobSummaries,
    LogLines,
    LogsQuery,
    Message,
    NodeReport,
    Proof,
    Stacks,
    StatusQuery,
    StreamCredit,
    Welcome,
    decode,
    decode_handshake,
    encode,
    pack,
    unpack,
)
from holdfast.wire.sniff import check_client_bytes, check_server_bytes
from holdfast.wire.wire_errors import (
    BadMessage,
    BrokenSeal,
    EmptyFrame,
    FrameTooLarge,
    HandshakeRefused,
    NotOurProtocol,
    WireError,
)
from holdfast.wire.wire_limits import HANDSHAKE_FRAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

untimed = settings(deadline=None)  # Other programs may use the machine.

frame_limits = st.integers(1, 64)
tokens = st.none() | st.binary(min_size=1, max_size=100)


def headers(length: int) -> bytes:
    return length.to_bytes(HEADER_BYTES, "big")


def framed(body: bytes) -> bytes:
    return headers(len(body)) + body


pieces = st.one_of(
    st.binary(max_size=80),
    st.binary(max_size=70).map(framed),
    st.binary(min_size=1, max_size=20).map(framed),
    messages.map(encode_frame),
    st.integers(0, 200).map(headers),
    st.sampled_from([b"\x16\x03\x01", b"GET / HTTP/1.1\r\n", headers(0), b"\xff\xff\xff\xff"]),
)
streams = st.lists(pieces, max_size=8).map(b"".join)


def outcome(call: Callable[..., T], *args: Any) -> T | WireError:
    """Return the result of a call, or its `WireError`."""
    try:
        return call(*args)
    except WireError as error:
        return error


def read_all(reads: list[bytes], limit: int) -> tuple[list[bytes], type[Exception] | None]:
    """Return the bodies that a reader finds, and its error at the end."""
    reader = FrameReader(limit)
    bodies: list[bytes] = []
    try:
        for read in reads:
            bodies += reader.feed(read)
            assert reader.buffered_bytes <= HEADER_BYTES + limit + len(read)
        bodies += reader.feed(b"")  # The next call raises a fault after complete frames.
    except (FrameTooLarge, EmptyFrame) as fault:
        assert reader.buffered_bytes == 0
        return bodies, type(fault)
    return bodies, None


def reference_read(stream: bytes, limit: int) -> tuple[list[bytes], type[Exception] | None]:
    """A simple reference implementation, for comparison."""
    bodies: list[bytes] = []
    while len(stream) >= HEADER_BYTES:
        length = int.from_bytes(stream[:HEADER_BYTES], "big")
        if length == 0:
            return bodies, EmptyFrame
        if length > limit:
            return bodies, FrameTooLarge
        if len(stream) < HEADER_BYTES + length:
            break
        bodies.append(stream[HEADER_BYTES : HEADER_BYTES + length])
        stream = stream[HEADER_BYTES + length :]
    return bodies, None


@untimed
@given(streams, cuts, frame_limits | st.just(10_000))
def test_any_bytes_in_any_pieces_are_parsed_or_refused(
    stream: bytes, sizes: list[int], limit: int
) -> None:
    bodies, fault = read_all(cut(stream, sizes), limit)
    assert (bodies, fault) == reference_read(stream, limit)
    for body in bodies:
        check_body(body)


@untimed
@given(st.lists(messages, max_size=5), cuts)
def test_messages_survive_a_round_trip(sent: list[Message], sizes: list[int]) -> None:
    stream = b"".join(map(encode_frame, sent))
    bodies, fault = read_all(cut(stream, sizes), 100_000)
    assert fault is None
    assert [decode(body) for body in bodies] == sent


def check_body(body: bytes) -> None:
    """Decode a body that may be broken. An accepted body must be a valid message."""
    message = outcome(decode, body)
    early = outcome(decode_handshake, body)
    if isinstance(message, HandshakeMessage):
        assert early == message
    else:
        assert isinstance(early, BadMessage)
    if isinstance(message, WireError):
        event("refused")
        assert type(message) is BadMessage
        assert str(message).isprintable()
        assert len(str(message)) < 1000
    else:
        event("accepted")
        assert decode(encode(message)) == message


@untimed
@given(st.binary(max_size=200))
def test_any_body_is_a_message_or_refused(body: bytes) -> None:
    check_body(body)


@st.composite
def corrupted_message(draw: st.DrawFn) -> bytes:
    """A real message with some bytes changed, added, removed or repeated."""
    body = bytearray(encode(draw(messages)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        match draw(st.sampled_from(["change", "add", "remove", "repeat", "cut"])):
            case "change":
                body[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "add":
                body[at:at] = draw(st.binary(min_size=1, max_size=6))
            case "remove":
                del body[at : at + draw(st.integers(1, 6))]
            case "repeat":
                body[at:at] = body[at : at + draw(st.integers(1, 30))]
            case _:
                del body[at:]
    return bytes(body)


@settings(untimed, max_examples=400)
@given(corrupted_message())
def test_corrupted_message_is_valid_or_refused(body: bytes) -> None:
    check_body(body)


@st.composite
def mistyped_message(draw: st.DrawFn) -> bytes:
    """A real message with another value in one of its fields, at any depth."""
    whole: Any = msgspec.to_builtins(
        draw(messages), builtin_types=(bytes, bytearray), enc_hook=lambda one: one
    )
    place = whole
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        within = place[key]
        if isinstance(within, (dict, list)) and within and draw(st.booleans()):
            place = within
            continue
        place[key] = draw(anything)
        return msgspec.msgpack.encode(whole)


@settings(untimed, max_examples=400)
@example(msgspec.msgpack.encode({"type": "\t"}))  # `quoted` replaces a tab with a space.
@given(mistyped_message())
def test_message_with_a_field_of_another_type_is_valid_or_refused(body: bytes) -> None:
    check_body(body)


@untimed
@given(st.integers(1, 5000), st.integers(1, 200), st.integers(1, 10))
def test_reader_holds_at_most_one_frame(limit: int, size: int, count: int) -> None:
    stream = framed(b"x" * limit) * count
    reader = FrameReader(limit)
    bodies = []
    for read in cut(stream, [size]):
        bodies += reader.feed(read)
        assert reader.buffered_bytes < HEADER_BYTES + limit
        # A bytearray overallocates by an eighth and a few bytes.
        assert sys.getsizeof(reader._buffer) <= 200 + (HEADER_BYTES + limit) * 9 // 8 + size
    assert bodies == [b"x" * limit] * count


@untimed
@given(st.binary(max_size=12))
def test_any_first_bytes_are_ours_or_foreign(first: bytes) -> None:
    for check in (check_client_bytes, check_server_bytes):
        found = outcome(check, first)
        # Exactly the bytes that no reader would accept as a frame are foreign.
        ours = int.from_bytes(first[:4].ljust(4, b"\0"), "big") <= HANDSHAKE_FRAME_BYTES_MAX
        assert isinstance(found, NotOurProtocol) is not ours
        assert str(found).isprintable()


def body_in(frame: bytes) -> bytes:
    (body,) = FrameReader(HANDSHAKE_FRAME_BYTES_MAX).feed(frame)
    return body


def message_in(frame: bytes) -> Message:
    return decode(body_in(frame))


def run_handshake(client: ClientHandshake, server: ServerHandshake) -> None:
    challenge = server.receive(body_in(client.start()))
    proof = client.receive(body_in(challenge))
    welcome = server.receive(body_in(proof))
    client.receive(welcome if client.tag_bytes else body_in(welcome))


@untimed
@given(tokens, tokens, st.booleans(), st.text(max_size=3))
def test_handshake_succeeds_only_with_equal_tokens(
    mine: bytes | None, theirs: bytes | None, alike: bool, run_id: str
) -> None:
    if alike:
        theirs = mine
    client, server = ClientHandshake(mine, run_id=run_id), ServerHandshake(theirs)
    refused = outcome(run_handshake, client, server)
    assert client.done is server.done is (mine == theirs)
    if mine != theirs:
        assert isinstance(refused, HandshakeRefused)
        assert refused.permanent
        assert isinstance(message_in(refused.reply), Goodbye)


nonces = st.binary(min_size=16, max_size=64)
handshake_messages: SearchStrategy[Message] = st.one_of(
    messages,
    st.builds(Hello, nonce=nonces),
    st.builds(
        Challenge,
        nonce=nonces,
        token_wanted=st.booleans(),
        proof=st.binary(max_size=64),
    ),
    st.builds(Proof, proof=st.binary(max_size=64)),
    st.just(Proof()),
    st.just(Welcome()),
)


@settings(untimed, max_examples=300)
@given(st.lists(handshake_messages, max_size=8), st.booleans(), st.booleans(), st.data())
def test_peer_without_the_token_is_never_accepted(
    output: list[Message], serving: bool, echo: bool, data: st.DataObject
) -> None:
    """The peer sends anything, and also reflects every proof and nonce that it receives."""
    machine: ClientHandshake | ServerHandshake
    machine = ServerHandshake(b"secret") if serving else ClientHandshake(b"secret")
    received = [] if isinstance(machine, ServerHandshake) else [message_in(machine.start())]
    for message in output:
        again = data.draw(st.sampled_from(received)) if echo and received else None
        said_now = with_received_proof(message, again) if again else message
        reply = outcome(machine.receive, encode(said_now))
        assert not machine.done
        if isinstance(reply, WireError):
            assert str(reply).isprintable()
            assert "secret" not in str(reply)
        else:
            received.append(message_in(reply))


def with_received_proof(message: Message, received: Message) -> Message:
    """Put the received proof and nonce into a message, if it has such fields."""
    changes = {
        name: getattr(received, name)
        for name in ("proof", "nonce")
        if hasattr(received, name) and hasattr(message, name)
    }
    return msgspec.structs.replace(message, **changes)


@untimed
@given(st.lists(handshake_messages, max_size=8), st.booleans())
def test_any_order_of_messages_without_a_token_is_accepted_or_refused(
    output: list[Message], serving: bool
) -> None:
    machine: ClientHandshake | ServerHandshake
    machine = ServerHandshake(None) if serving else ClientHandshake(None)
    for message in output:
        reply = outcome(machine.receive, encode(message))
        if isinstance(reply, WireError):
            assert str(reply).isprintable()
        elif machine.done:
            return
        else:
            message_in(reply)


changes = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "add", "drop", "repeat", "swap", "reflect"]), st.integers(0)
    ),
    max_size=3,
)


def changed(frames: list[bytes], others: list[bytes], what: str, at: int) -> list[bytes]:
    """Manipulate the frames of one side as an attacker in the middle can; `others` are the other side's."""
    if not frames:
        return frames
    at, where = at % len(frames), at // len(frames)
    before, one, after = frames[:at], frames[at], frames[at + 1 :]
    where %= len(one)
    match what:
        case "flip":
            return [*before, one[:where] + bytes([one[where] ^ 1]) + one[where + 1 :], *after]
        case "cut":
            return [*before, one[: where or 1], *after]
        case "add":
            return [*before, one + b"x", *after]
        case "drop":
            return before + after
        case "repeat":
            return [*before, one, one, *after]
        case "swap":
            return [*before, *after[:1], one, *after[1:]]
    return [*before, others[at % len(others)], *after]


@untimed
@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6), changes)
def test_only_sealed_frames_are_accepted_and_in_order(
    bodies: list[bytes], done: list[tuple[str, int]]
) -> None:
    client, server = ClientHandshake(b"token"), ServerHandshake(b"token")
    run_handshake(client, server)
    assert server.seals is not None
    sent, others = (
        [machine.seals[0].seal(framed(body)) for body in bodies]  # type: ignore[index]
        for machine in (client, server)
    )
    arrived = sent
    for what, at in done:
        arrived = changed(arrived, others, what, at)
    taken = []
    for body in arrived:
        found = outcome(server.seals[1].open, body)
        if isinstance(found, BrokenSeal):
            break
        taken.append(found)
    unharmed = next(
        (at for at, (a, b) in enumerate(zip(arrived, sent, strict=False)) if a != b), len(arrived)
    )
    assert taken == bodies[:unharmed]


@untimed
@given(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0), st.integers(0, 60), st.binary(max_size=30)), max_size=2),
    cuts,
)
def test_sealed_stream_is_accepted_up_to_the_first_change(
    bodies: list[bytes], changes: list[tuple[int, int, bytes]], sizes: list[int]
) -> None:
    """Bytes are removed, inserted and replaced anywhere, also across frames, and split in any way."""
    sends, takes = Seal(bytes(32)), Seal(bytes(32))
    reader = FrameReader(40, tag_bytes=TAG_BYTES)
    sent = [sends.seal(framed(body)) for body in bodies]
    stream = arrived = b"".join(sent)
    for at, count, instead in changes:
        at %= len(arrived) + 1  # noqa: PLW2901 (an index within the data)
        arrived = arrived[:at] + instead + arrived[at + count :]
    taken: list[bytes] = []
    is_noticed = False
    try:
        for read in cut(arrived, sizes):
            for one in reader.feed(read):
                taken.append(takes.open(one))  # noqa: PERF401 (bodies before an error count)
            assert reader.buffered_bytes < HEADER_BYTES + 40 + TAG_BYTES + len(read)
    except WireError:
        is_noticed = True
    assert not is_noticed or arrived != stream
    pairs = enumerate(zip(stream, arrived, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(stream), len(arrived)))
    ends = itertools.accumulate(map(len, sent))
    assert taken == bodies[: sum(end <= same for end in ends)]


bodies: tuple[type[msgspec.Struct], ...] = (
    Request,
    AgentIdentity,
    EventsQuery,
    Events,
    LogsQuery,
    LogLines,
    Stacks,
    StatusQuery,
    JobSummaries,
    StreamCredit,
    Contacts,
    NodeReport,
)


@given(st.sampled_from(bodies), st.binary(max_size=200))
def test_any_bytes_as_a_reply_body_are_decoded_or_refused(
    kind: type[msgspec.Struct], body: bytes
) -> None:
    try:
        found = unpack(kind, body)
    except BadMessage:
        return
    assert unpack(kind, pack(found)) == found


@given(st.data(), st.sampled_from((Request, LogsQuery, StatusQuery, StreamCredit)))
def test_reply_bodies_survive_a_round_trip(data: st.DataObject, kind: Any) -> None:
    sent = data.draw(structs(kind))
    assert unpack(kind, pack(sent)) == sent
