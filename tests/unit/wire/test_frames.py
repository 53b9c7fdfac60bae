from __future__ import annotations

import pytest

from holdfast.wire.errors import BadMessage, EmptyFrame, FrameTooLarge
from holdfast.wire.frames import (
    FRAME_BYTES_MAX,
    HANDSHAKE_FRAME_BYTES_MAX,
    FrameReader,
    encode_frame,
)
from holdfast.wire.messages import Goodbye, StoreCall, decode


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def header(length: int) -> bytes:
    return length.to_bytes(4, "big")


def test_a_message_is_framed_and_found_again() -> None:
    message = Goodbye(why="the job is over")
    frame = encode_frame(message)
    assert frame == framed(frame[4:])
    (body,) = FrameReader().feed(frame)
    assert decode(body) == message


def test_a_message_that_the_other_side_would_not_take_is_not_made() -> None:
    call = StoreCall(id=1, run_id="job", op="set", keys=("k",), value=b"x" * 100)
    with pytest.raises(FrameTooLarge) as raised:
        encode_frame(call, 100)
    assert raised.value.frame_bytes > 100
    assert raised.value.frame_bytes_max == 100
    assert encode_frame(call, raised.value.frame_bytes)


@pytest.mark.parametrize(
    "message",
    [
        Goodbye(why="half a character: \udcff"),
        StoreCall(id=1, run_id="job", op="add", amount=2**64),
        StoreCall(id=1, run_id="job", op="set", value=object()),  # type: ignore[arg-type]
    ],
)
def test_a_message_that_cannot_be_written_is_a_bad_message(message: Goodbye | StoreCall) -> None:
    with pytest.raises(BadMessage, match=f"a {type(message).__name__} cannot be sent"):
        encode_frame(message)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 11, 100])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_frames_come_out_however_they_were_cut(size: int, kind: type) -> None:
    bodies = [b"a", b"bc" * 20, b"d" * 3, b"e" * 4, b"f"]
    stream = b"".join(map(framed, bodies))
    reader = FrameReader()
    found: list[bytes] = []
    for at in range(0, len(stream), size):
        found += reader.feed(kind(stream[at : at + size]))
    assert found == bodies
    assert all(type(body) is bytes for body in found)
    assert reader.buffered_bytes == 0


def test_bodies_do_not_change_when_the_readers_buffer_is_used_again() -> None:
    """A transport may read into the same memory again and again."""
    memory = bytearray(framed(b"first"))
    (body,) = FrameReader().feed(memory)
    memory[:] = framed(b"other")
    assert body == b"first"


def test_nothing_comes_of_nothing() -> None:
    reader = FrameReader()
    assert reader.feed(b"") == []
    assert reader.feed(header(3)) == []
    assert reader.feed(b"") == []
    assert reader.feed(b"abc") == [b"abc"]


def test_a_frame_may_be_as_long_as_allowed() -> None:
    assert FrameReader(5).feed(framed(b"12345")) == [b"12345"]


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_length_over_the_limit_raises_before_the_body_is_there(cut: int) -> None:
    reader = FrameReader(5)
    reader.feed(header(6)[:cut]) if cut < 4 else None
    with pytest.raises(FrameTooLarge, match="a frame of 6 bytes, where 5 are allowed"):
        reader.feed(header(6)[cut:] if cut < 4 else header(6))
    assert reader.buffered_bytes == 0


@pytest.mark.parametrize("cut", [0, 2])
def test_an_empty_frame_raises(cut: int) -> None:
    reader = FrameReader()
    reader.feed(header(0)[:cut])
    with pytest.raises(EmptyFrame, match="a frame without a body"):
        reader.feed(header(0)[cut:])


def test_after_a_fault_nothing_is_read_any_more() -> None:
    reader = FrameReader(5)
    with pytest.raises(FrameTooLarge):
        reader.feed(header(6))
    for data in (framed(b"abc"), b"", b"x" * 1000):
        with pytest.raises(FrameTooLarge):
            reader.feed(data)
        assert reader.buffered_bytes == 0


@pytest.mark.parametrize(("bad", "error"), [(header(6), FrameTooLarge), (header(0), EmptyFrame)])
def test_frames_before_a_fault_are_not_lost(bad: bytes, error: type[Exception]) -> None:
    reader = FrameReader(5)
    assert reader.feed(framed(b"one") + framed(b"two") + bad + b"more") == [b"one", b"two"]
    with pytest.raises(error):
        reader.feed(b"")


def test_the_frame_that_was_begun_earlier_is_not_lost_to_a_fault_either() -> None:
    reader = FrameReader(5)
    whole = framed(b"one")
    assert reader.feed(whole[:5]) == []
    assert reader.feed(whole[5:] + header(6)) == [b"one"]
    with pytest.raises(FrameTooLarge):
        reader.feed(b"x")


def test_a_larger_frame_may_follow_in_the_same_read_once_the_limit_is_raised() -> None:
    """A coordinator may send its welcome and a long view together."""
    reader = FrameReader(HANDSHAKE_FRAME_BYTES_MAX)
    long = b"v" * (HANDSHAKE_FRAME_BYTES_MAX + 1)
    assert reader.feed(framed(b"welcome") + framed(long) + framed(b"next")) == [b"welcome"]
    reader.frame_bytes_max = FRAME_BYTES_MAX
    assert reader.feed(b"") == [long, b"next"]
    assert reader.buffered_bytes == 0


def test_so_it_may_if_it_is_not_whole_yet() -> None:
    reader = FrameReader(5)
    assert reader.feed(framed(b"one") + header(6) + b"abc") == [b"one"]
    reader.frame_bytes_max = 6
    assert reader.feed(b"def" + framed(b"two")) == [b"abcdef", b"two"]


def test_no_more_is_held_than_one_frame() -> None:
    reader = FrameReader(1000)
    stream = framed(b"x" * 1000) * 50
    for at in range(0, len(stream), 333):
        reader.feed(stream[at : at + 333])
        assert reader.buffered_bytes < 1004


def test_a_long_frame_in_single_bytes() -> None:
    body = bytes(range(256)) * 256
    reader = FrameReader()
    found = [one for byte in framed(body) for one in reader.feed(bytes((byte,)))]
    assert found == [body]
