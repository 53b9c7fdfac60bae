"""Large messages in parts: one side splits them and the other joins them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.frames import HEADER_BYTES, FrameReader
from holdfast.wire.messages import Part, decode
from holdfast.wire.parts import IncomingParts, OutgoingParts
from holdfast.wire.wire_errors import FrameTooLarge
from holdfast.wire.wire_limits import FRAME_BYTES_MAX, PART_BYTES


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER_BYTES, "big") + body


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
