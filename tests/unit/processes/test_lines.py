from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from holdfast.processes.logs.lines import PrefixedLines, Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pytest


class Shown:
    """Keeps what a sink gives to its stream, undecoded bytes as surrogates included."""

    def __init__(self) -> None:
        self.stream = io.StringIO(newline="")
        self.sink = Sink(self.stream)

    @property
    def text(self) -> str:
        return self.stream.getvalue()


def shown(
    chunks: Iterable[bytes],
    prefix: bytes = b"p:",
    *,
    line_bytes_max: int = 1 << 20,
    accept: Callable[[bytes], bool] | None = None,
) -> str:
    out = Shown()
    lines = PrefixedLines(prefix, out.sink, line_bytes_max=line_bytes_max, accept=accept)
    for chunk in chunks:
        lines.feed(chunk)
    lines.flush()
    return out.text


def test_line_ends_in_a_prefix_become_blanks() -> None:
    assert shown([b"x\ny\n"], prefix=b"a\r\nb:") == "a  b:x\na  b:y\n"


def test_an_overlong_line_is_shown_in_pieces_of_the_limit() -> None:
    assert shown([b"abcdefghij", b"k\n"], line_bytes_max=4) == "p:abcd\np:efgh\np:ijk\n"


def test_a_line_of_just_the_limit_stays_whole() -> None:
    assert shown([b"abcd", b"\nefgh", b"\n"], line_bytes_max=4) == "p:abcd\np:efgh\n"


def test_a_line_that_never_ends_takes_bounded_memory() -> None:
    sink = Sink(None)
    lines = PrefixedLines(b"p:", sink, line_bytes_max=1000)
    for _ in range(500):
        lines.feed(b"x" * 100)
        assert len(lines._held) <= 1000 + 100 + len(b"p:")


def filtered(chunks: Iterable[bytes], filters: Sequence[bytes]) -> tuple[str, str]:
    everything, some = Shown(), Shown()
    lines = PrefixedLines(b"p:", everything.sink, filters=filters, filtered_to=some.sink)
    for chunk in chunks:
        lines.feed(chunk)
    lines.flush()
    return everything.text, some.text


def test_lines_that_match_any_filter_go_to_the_second_sink_as_well() -> None:
    data = b"an orange\nplain\r\ntwo apples\r\nan apple and an orange\nlast orange"
    everything = "p:an orange\np:plain\r\np:two apples\r\np:an apple and an orange\np:last orange\n"
    some = "p:an orange\np:two apples\r\np:an apple and an orange\np:last orange\n"
    assert filtered([data], [b"orange", b"apple"]) == (everything, some)
    assert filtered([bytes([byte]) for byte in data], [b"orange", b"apple"]) == (everything, some)


def test_a_filter_sees_neither_the_prefix_nor_two_lines_at_once() -> None:
    assert filtered([b"one\ntwo\n"], [b"p:", b"one\ntwo"])[1] == ""


def test_only_accepted_lines_are_shown() -> None:
    seen: list[bytes] = []

    def accept(line: bytes) -> bool:
        seen.append(line)
        return b"yes" in line

    assert shown([b"yes 1\nno\nye", b"s 2\nyes 3"], accept=accept) == "p:yes 1\np:yes 2\np:yes 3\n"
    assert seen == [b"yes 1\n", b"no\n", b"yes 2\n", b"yes 3\n"]


def test_a_failing_accept_shows_the_lines_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def accept(line: bytes) -> bool:
        raise KeyError("oops")

    assert shown([b"a\nb\n"], accept=accept) == "p:a\np:b\n"
    (warning,) = caplog.messages
    assert "KeyError" in warning


def expected_lines(data: bytes) -> list[bytes]:
    """The rule, said slowly: a piece ends after its `\\n`, `\\r\\n` or lone `\\r`."""
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
def test_any_cutting_of_any_bytes_gives_the_same_lines(
    chunks: list[bytes], prefix: bytes, with_filter: bool
) -> None:
    read, write = os.pipe()
    try:
        sink, some = Sink(write), Shown()
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
