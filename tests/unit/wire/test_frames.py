"""Faults and limits of frames; tests/fuzz has arbitrary bytes in arbitrary pieces."""

from __future__ import annotations

import pytest

from holdfast.wire.frames import FrameReader, encode_frame
from holdfast.wire.messages import StoreCall
from holdfast.wire.wire_errors import EmptyFrame, FrameTooLarge
from holdfast.wire.wire_limits import FRAME_BYTES_MAX, HANDSHAKE_FRAME_BYTES_MAX


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def header(length: int) -> bytes:
    return length.to_bytes(4, "big")


def test_message_above_the_other_sides_limit_is_not_encoded() -> None:
    call = StoreCall(id=1, run_id="job", op="set", keys=("k",), value=b"x" * 100)
    with pytest.raises(FrameTooLarge) as raised:
        encode_frame(call, 100)
    assert raised.value.frame_bytes > raised.value.frame_bytes_max == 100
    assert encode_frame(call, raised.value.frame_bytes)


def test_bodies_do_not_change_when_the_buffer_is_reused() -> None:
    """A transport may reuse the same memory for every read."""
    memory = bytearray(framed(b"first"))
    (body,) = FrameReader().feed(memory)
    memory[:] = framed(b"other")
    assert body == b"first"


@pytest.mark.parametrize("cut", [0, 1, 3])
@pytest.mark.parametrize(("bad", "error"), [(header(6), FrameTooLarge), (header(0), EmptyFrame)])
def test_invalid_length_raises_before_the_body_and_permanently(
    cut: int, bad: bytes, error: type[Exception]
) -> None:
    reader = FrameReader(5)
    assert reader.feed(framed(b"12345") + bad[:cut]) == [b"12345"]
    for data in (bad[cut:], framed(b"abc"), b"", b"x" * 1000):
        with pytest.raises(error):
            reader.feed(data)
        assert reader.buffered_bytes == 0


def test_larger_frame_in_the_same_read_is_returned_once_the_limit_is_raised() -> None:
    """A coordinator may send its welcome and a long view in one write."""
    long = b"v" * (HANDSHAKE_FRAME_BYTES_MAX + 1)
    stream = framed(b"welcome") + framed(long) + framed(b"next")
    for cut in (len(stream), len(stream) - 10):
        reader = FrameReader(HANDSHAKE_FRAME_BYTES_MAX)
        assert reader.feed(stream[:cut]) == [b"welcome"]
        reader.frame_bytes_max = FRAME_BYTES_MAX
        assert reader.feed(stream[cut:]) == [long, b"next"]
        assert reader.buffered_bytes == 0
