from __future__ import annotations

import io
import os
import threading
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from holdfast.processes.logs.lines import (
    MUCH_BYTES,
    PIPE_PIECE_BYTES_MAX,
    PrefixedLines,
    Sink,
)

if TYPE_CHECKING:
    import pytest


def test_lines_reach_a_pipe_in_writes_that_the_kernel_keeps_whole() -> None:
    """A pipe in packet mode shows the boundaries between writes."""
    read, write = os.pipe2(os.O_DIRECT)
    try:
        sink = Sink(write)
        lines = [b"%04d " % number + b"x" * (number % 300) + b"\n" for number in range(200)]
        sink.write(bytearray(b"0000 "), b"".join(lines)[5:])
        lengths = []
        rest = b"".join(lines)
        while rest:
            piece = os.read(read, 1 << 16)
            assert rest.startswith(piece)
            assert piece.endswith(b"\n")
            rest = rest[len(piece) :]
            lengths.append(len(piece))
        assert max(lengths) <= PIPE_PIECE_BYTES_MAX
        assert len(lengths) < len(lines) / 5
    finally:
        os.close(read)
        os.close(write)


def test_a_sink_that_favors_speed_writes_everything_to_a_full_pipe() -> None:
    read, write = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(read, True)
    body = b"%d\n" * MUCH_BYTES % (*range(MUCH_BYTES),)

    def write_all() -> None:
        Sink(write, favors_speed=True).write(b"head ", body + b"tail", len(body))
        os.close(write)

    writer = threading.Thread(target=write_all)
    writer.start()
    with open(read, "rb") as reader:
        assert reader.read() == b"head " + body
    writer.join()


def test_full_disk_is_reported_once_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        sink = Sink(full.fileno())
        sink.write(b"", b"lost\n")
        sink.write(b"", b"lost\n")
        assert not sink.quiet
    (warning,) = caplog.messages
    assert "log lines are being lost" in warning


class CapturedSink:
    """Keeps the text that a sink writes to its stream, with undecodable bytes as surrogates."""

    def __init__(self) -> None:
        self.stream = io.StringIO(newline="")
        self.sink = Sink(self.stream)

    @property
    def text(self) -> str:
        return self.stream.getvalue()


def test_an_overlong_line_is_shown_in_pieces_of_the_limit() -> None:
    out = CapturedSink()
    lines = PrefixedLines(b"p:", out.sink, line_bytes_max=4)
    lines.feed(b"abcdefghij")
    lines.feed(b"k\n")
    lines.flush()
    assert out.text == "p:abcd\np:efgh\np:ijk\n"


def test_a_line_that_never_ends_takes_bounded_memory() -> None:
    sink = Sink(None)
    lines = PrefixedLines(b"p:", sink, line_bytes_max=1000)
    for _ in range(500):
        lines.feed(b"x" * 100)
        assert len(lines._held) <= 1000 + 100 + len(b"p:")


def expected_lines(data: bytes) -> list[bytes]:
    """The rule: a piece ends after its `\\n`, `\\r\\n` or lone `\\r`."""
    lines, start, at = [], 0, 0
    while at < len(data):
        at += 1
        end_of_line = data[at - 1 : at] == b"\n"
        lone_cr = data[at - 1 : at] == b"\r" and data[at : at + 1] != b"\n"
        if end_of_line or lone_cr:
            lines.append(data[start:at])
            start = at
    if start < len(data):
        lines.append(data[start:])
    if lines and not lines[-1].endswith(b"\n"):
        lines[-1] += b"\n"
    return lines


@given(
    st.lists(st.text("ab\r\n>", max_size=12).map(str.encode), max_size=6),
    st.sampled_from([b"", b">", b"a", b"[0]:"]),
    st.booleans(),
)
def test_chunking_does_not_change_the_lines(
    chunks: list[bytes], prefix: bytes, with_filter: bool
) -> None:
    read, write = os.pipe()
    try:
        sink, some = Sink(write), CapturedSink()
        filters = [b"b"] if with_filter else []
        lines = PrefixedLines(prefix, sink, filters=filters, filtered_to=some.sink)
        for chunk in chunks:
            lines.feed(chunk)
        lines.flush()
        os.write(write, b"!")
        expected = [prefix + line for line in expected_lines(b"".join(chunks))]
        assert os.read(read, 1 << 16) == b"".join(expected) + b"!"
        matching = [line for line in expected if b"b" in line[len(prefix) :]]
        assert some.text.encode() == (b"".join(matching) if with_filter else b"")
    finally:
        os.close(read)
        os.close(write)
