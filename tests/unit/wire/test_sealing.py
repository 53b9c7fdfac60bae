"""Sealed frames, and everything that an attacker in the middle could do to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.wire.frames import HEADER_BYTES, FrameReader
from holdfast.wire.sealing import TAG_BYTES, Seal
from holdfast.wire.wire_errors import BrokenSeal, FrameTooLarge
from holdfast.wire.wire_limits import FRAME_BYTES_MAX, PART_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

KEY, OTHER = b"k" * 32, b"o" * 32
BODIES = [b"one", b"two", b"three" * PART_BYTES, b"four"]

Stream = list[bytes]


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER_BYTES, "big") + body


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
            taken.append(seal.open(one))  # noqa: PERF401 (what is before a fault counts)
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
