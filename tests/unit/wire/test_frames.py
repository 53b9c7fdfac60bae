"""Frames, their seals and parts; tests/fuzz has arbitrary bytes in arbitrary pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.frames import (
    HEADER_BYTES,
    TAG_BYTES,
    FrameReader,
    IncomingParts,
    OutgoingParts,
    Seal,
    encode_frame,
)
from holdfast.wire.messages import Part, StoreCall, decode
from holdfast.wire.wire_errors import BrokenSeal, EmptyFrame, FrameTooLarge
from holdfast.wire.wire_limits import FRAME_BYTES_MAX, HANDSHAKE_FRAME_BYTES_MAX, PART_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def header(length: int) -> bytes:
    return length.to_bytes(HEADER_BYTES, "big")


def test_message_above_the_other_sides_limit_is_not_encoded() -> None:
    call = StoreCall(id=1, run_id="job", op="set", keys=("k",), value=b"x" * 100)
    with pytest.raises(FrameTooLarge) as raised:
        encode_frame(call, 100)
    assert raised.value.frame_bytes > raised.value.frame_bytes_max == 100
    assert encode_frame(call, raised.value.frame_bytes)


def test_bodies_do_not_change_when_the_buffer_is_reused() -> None:
    """A transport may reuse the same memory for every read."""
    memory = bytearray(frame(b"first"))
    (body,) = FrameReader().feed(memory)
    memory[:] = frame(b"other")
    assert body == b"first"


@pytest.mark.parametrize("cut", [0, 1, 3])
@pytest.mark.parametrize(("bad", "error"), [(header(6), FrameTooLarge), (header(0), EmptyFrame)])
def test_invalid_length_raises_before_the_body_and_permanently(
    cut: int, bad: bytes, error: type[Exception]
) -> None:
    reader = FrameReader(5)
    assert reader.feed(frame(b"12345") + bad[:cut]) == [b"12345"]
    for data in (bad[cut:], frame(b"abc"), b"", b"x" * 1000):
        with pytest.raises(error):
            reader.feed(data)
        assert reader.buffered_bytes == 0


def test_larger_frame_in_the_same_read_is_returned_once_the_limit_is_raised() -> None:
    """A coordinator may send its welcome and a long view in one write."""
    long = b"v" * (HANDSHAKE_FRAME_BYTES_MAX + 1)
    stream = frame(b"welcome") + frame(long) + frame(b"next")
    for cut in (len(stream), len(stream) - 10):
        reader = FrameReader(HANDSHAKE_FRAME_BYTES_MAX)
        assert reader.feed(stream[:cut]) == [b"welcome"]
        reader.frame_bytes_max = FRAME_BYTES_MAX
        assert reader.feed(stream[cut:]) == [long, b"next"]
        assert reader.buffered_bytes == 0


# Seals, and everything that an attacker in the middle could do to sealed frames.

KEY, OTHER = b"k" * 32, b"o" * 32
BODIES = [b"one", b"two", b"three" * PART_BYTES, b"four"]

Stream = list[bytes]


def sealed(key: bytes = KEY) -> Stream:
    """Return the sealed frames that one side sends."""
    seal = Seal(key)
    return reader().feed(b"".join(seal.seal(frame(body)) for body in BODIES))


def reader(frame_bytes_max: int = FRAME_BYTES_MAX) -> FrameReader:
    return FrameReader(frame_bytes_max, tag_bytes=TAG_BYTES)


def opened(stream: Stream) -> list[bytes]:
    """Return the bodies that the other side accepts, until the seal breaks."""
    seal, taken = Seal(KEY), []
    try:
        for one in reader().feed(b"".join(stream)):
            taken.append(seal.open(one))  # noqa: PERF401 (bodies before an error count)
    except BrokenSeal:
        with pytest.raises(BrokenSeal):
            seal.open(sealed()[len(taken)])  # The seal stays broken.
    return taken


def flipped(stream: Stream, at: int) -> Stream:
    return [stream[0], stream[1][:at] + bytes([stream[1][at] ^ 1]) + stream[1][at + 1 :], stream[2]]


def joined(stream: Stream) -> bytes:
    """Join the first two frames to one, with the tag of the second."""
    return frame(BODIES[0] + BODIES[1]) + stream[1][-TAG_BYTES:]


def split(sealed: bytes) -> Stream:
    """Split one frame into two, each with a tag."""
    body, tag = sealed[HEADER_BYTES:-TAG_BYTES], sealed[-TAG_BYTES:]
    return [frame(body[:1]) + tag, frame(body[1:]) + tag]


# The manipulation of the four frames, and how many of them are still accepted.
TAMPERING: dict[str, tuple[Callable[[Stream], Stream], int]] = {
    "nothing": (lambda s: s, 4),
    "a bit of a length": (lambda s: flipped(s, HEADER_BYTES - 1), 1),
    "a bit of a body": (lambda s: flipped(s, HEADER_BYTES), 1),
    "a bit of a tag": (lambda s: flipped(s, -1 % len(s[1])), 1),
    "one is dropped": (lambda s: [s[0], *s[2:]], 1),
    "one is repeated": (lambda s: [s[0], s[0], *s[1:]], 1),
    "an old one is replayed": (lambda s: [*s[:3], s[0]], 3),
    "two are swapped": (lambda s: [s[0], s[2], s[1], s[3]], 1),
    "the end is cut off": (lambda s: [s[0], s[1][:-1]], 1),
    "a byte is removed": (lambda s: [s[0], s[1][:-1], *s[2:]], 1),
    "a byte is added": (lambda s: [s[0], s[1], b"x", *s[2:]], 2),
    "the tag is removed": (lambda s: [s[0][:-TAG_BYTES], *s[1:]], 0),
    "plain text": (lambda s: [s[0], frame(BODIES[1]), *s[2:]], 1),
    "two are joined": (lambda s: [joined(s), *s[2:]], 0),
    "one is split": (lambda s: [*split(s[0]), s[1]], 0),
    "the tag of another frame": (lambda s: [s[0], s[1][:-TAG_BYTES] + s[0][-TAG_BYTES:]], 1),
    "sent back to its sender": (lambda _: sealed(OTHER), 0),
}


@pytest.mark.parametrize("done", TAMPERING)
def test_every_manipulation_is_detected(done: str) -> None:
    tamper, taken = TAMPERING[done]
    assert opened(tamper(sealed())) == BODIES[:taken]


def test_sealed_frame_is_the_frame_and_its_tag() -> None:
    assert [one[:-TAG_BYTES] for one in sealed()] == [frame(body) for body in BODIES]


def test_limit_applies_to_the_body_without_the_tag() -> None:
    seal = Seal(KEY)
    first, second = seal.seal(frame(b"12345")), seal.seal(frame(b"123456"))
    five = reader(5)
    assert five.feed(first) == [first]
    with pytest.raises(FrameTooLarge):
        five.feed(second[:HEADER_BYTES])


@pytest.mark.parametrize("first", [0, 3, 6])
@pytest.mark.parametrize("cut", [9, 10, 13, 16, 17, 32, 33, 40])
def test_sealed_frames_may_follow_the_last_unsealed_one_in_one_read(first: int, cut: int) -> None:
    """An agent may send its proof and its status in one write."""
    stream = frame(b"proof") + b"".join(sealed())
    late = FrameReader(tag_bytes=None)
    assert late.feed(stream[:first]) == []
    assert late.feed(stream[first:cut]) == [b"proof"]
    late.tag_bytes = TAG_BYTES
    assert late.feed(b"") + late.feed(stream[cut:]) == sealed()
    assert late.buffered_bytes == 0


def test_frame_shorter_than_a_tag_breaks_the_seal_permanently() -> None:
    seal = Seal(KEY)
    for one in (b"x", sealed()[0]):
        with pytest.raises(BrokenSeal):
            seal.open(one)


# Parts: one side splits large messages and the other joins them.


def parts(data: bytes) -> list[Part]:
    found = [decode(body) for body in FrameReader().feed(data)]
    assert all(isinstance(one, Part) for one in found)
    return found  # type: ignore[return-value]


@given(st.integers(0, 5 * PART_BYTES))
def test_split_message_is_joined(size: int) -> None:
    body = bytes(at % 251 for at in range(size)) or b"x"
    outgoing, incoming = OutgoingParts(), IncomingParts()
    now = outgoing.send(frame(body))
    if len(frame(body)) <= PART_BYTES:
        assert now == frame(body)
        return
    joined = None
    while joined is None:
        (part,) = parts(now)
        joined = incoming.take(part)
        now = outgoing.next_part()
    assert (joined, now) == (body, b"")


def test_at_most_one_part_is_in_transit() -> None:
    outgoing = OutgoingParts()
    first, second = (frame(name * PART_BYTES * 2) for name in (b"a", b"b"))
    assert len(parts(outgoing.send(first))) == 1
    assert outgoing.send(second) == b""
    small = frame(b"beat")
    assert outgoing.send(small) == small
    assert outgoing.next_part()
    assert parts(outgoing.next_part())[0].data.startswith(b"b")


def test_waiting_message_is_replaced_by_a_newer_one_of_its_kind() -> None:
    outgoing = OutgoingParts()
    begun, old, other, new = (frame(name * PART_BYTES * 2) for name in (b"0", b"1", b"2", b"3"))
    outgoing.send(begun, "status")
    outgoing.send(old, "status")
    outgoing.send(other)
    outgoing.send(new, "status")
    outgoing.send(begun, "status")  # It is being sent.
    incoming = IncomingParts()
    bodies = [body for part in parts(b"".join(outgoing.rest())) if (body := incoming.take(part))]
    assert [body[-1:] for body in bodies] == [b"0", b"2", b"3"]


def test_parts_beyond_the_limit_are_refused() -> None:
    incoming = IncomingParts()
    part = Part(data=bytes(PART_BYTES))
    for _ in range(FRAME_BYTES_MAX // PART_BYTES):
        incoming.take(part)
    with pytest.raises(FrameTooLarge):
        incoming.take(part)
