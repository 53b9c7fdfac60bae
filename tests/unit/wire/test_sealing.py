"""Sealed frames, and each thing that somebody in between could do to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.wire.errors import BrokenSeal
from holdfast.wire.frames import HEADER_BYTES, FrameReader
from holdfast.wire.limits import PART_BYTES
from holdfast.wire.sealing import TAG_BYTES, Seal

if TYPE_CHECKING:
    from collections.abc import Callable

KEY, OTHER = b"k" * 32, b"o" * 32
BODIES = [b"one", b"two", b"three" * PART_BYTES, b"four"]

Stream = list[bytes]


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def sealed(key: bytes = KEY) -> Stream:
    """Return the bodies of the frames that one side sends."""
    seal = Seal(key)
    return FrameReader().feed(b"".join(seal.seal(frame(body)) for body in BODIES))


def opened(stream: Stream) -> list[bytes]:
    """Return what the other side takes, until it is over."""
    seal, taken = Seal(KEY), []
    for body in stream:
        try:
            taken.append(seal.open(body))
        except BrokenSeal:
            with pytest.raises(BrokenSeal):
                seal.open(sealed()[len(taken)])  # Nothing mends it.
            break
    return taken


def flipped(stream: Stream, at: int) -> Stream:
    return [stream[0], stream[1][:at] + bytes([stream[1][at] ^ 1]) + stream[1][at + 1 :], stream[2]]


# What is done to the four frames, and how many of them are still taken.
TAMPERING: dict[str, tuple[Callable[[Stream], Stream], int]] = {
    "nothing": (lambda s: s, 4),
    "a bit of a body": (lambda s: flipped(s, 0), 1),
    "a bit of a tag": (lambda s: flipped(s, -1 % len(s[1])), 1),
    "one is left out": (lambda s: [s[0], *s[2:]], 1),
    "one is repeated": (lambda s: [s[0], s[0], *s[1:]], 1),
    "an old one comes again": (lambda s: [*s[:3], s[0]], 3),
    "two change places": (lambda s: [s[0], s[2], s[1], s[3]], 1),
    "the end is cut off": (lambda s: [s[0], s[1][:-1]], 1),
    "something is added": (lambda s: [s[0], s[1] + b"x"], 1),
    "the tag is taken away": (lambda s: [s[0][:-TAG_BYTES]], 0),
    "less than a tag": (lambda _: [b"x"], 0),
    "plain text": (lambda s: [s[0], BODIES[1]], 1),
    "two become one": (lambda s: [s[0][:-TAG_BYTES] + s[1]], 0),
    "the tag of another frame": (lambda s: [s[0], s[1][:-TAG_BYTES] + s[0][-TAG_BYTES:]], 1),
    "sent back to its sender": (lambda _: sealed(OTHER), 0),
}


@pytest.mark.parametrize("done", TAMPERING)
def test_whatever_is_done_on_the_way_is_noticed(done: str) -> None:
    tamper, taken = TAMPERING[done]
    assert opened(tamper(sealed())) == BODIES[:taken]


def test_a_sealed_frame_is_longer_by_its_tag_alone() -> None:
    assert [len(body) for body in sealed()] == [len(body) + TAG_BYTES for body in BODIES]
