from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.timers.protocol import (
    LINE_BYTES_MAX,
    TIME_MAX,
    FileTimerRequest,
    InvalidRequest,
    LineSplitter,
    parse_request,
)

REQUEST = FileTimerRequest(7, "step {1}", 12.5, 9)
LINE = REQUEST.to_json().encode()


def fed(*chunks: bytes) -> list[bytes]:
    lines = LineSplitter()
    return [line for chunk in chunks for line in lines.feed(chunk)]


def test_a_request_is_read_as_it_was_written() -> None:
    assert parse_request(LINE) == REQUEST
    assert parse_request(LINE.replace(b'"version": 1', b'"version": 2')) == REQUEST


@given(st.lists(st.integers(0, 3 * len(LINE)), max_size=5))
def test_lines_may_come_in_any_pieces(cuts: list[int]) -> None:
    text = LINE + b"\n" + LINE + b"\n" + LINE + b"\n"
    ends = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(ends)]
    assert fed(*pieces) == [LINE] * 3


def test_what_follows_a_piece_without_an_end_is_found() -> None:
    (line,) = fed(LINE[:20] + LINE + b"\n")
    assert parse_request(line) == REQUEST


def test_a_line_without_an_end_is_kept_up_to_a_limit_and_costs_no_other() -> None:
    lines = LineSplitter()
    seen = [line for _ in range(100) for line in lines.feed(b"x" * 5000)]
    assert seen == [b"x" * LINE_BYTES_MAX]
    assert len(lines._rest) <= LINE_BYTES_MAX
    (whole, after) = lines.feed(LINE + b"\n" + LINE + b"\n")
    assert parse_request(whole) == parse_request(after) == REQUEST


def test_the_end_of_a_line_that_was_too_long_is_no_line() -> None:
    lines = LineSplitter()
    assert len([*lines.feed(b"x" * 5000)]) == 1
    assert [*lines.feed(b"xx\n" + LINE + b"\n")] == [LINE]


def changed(**values: object) -> bytes:
    return json.dumps({**json.loads(LINE), **values}).encode()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe{", "no JSON"),
        (b"[" * 4000, "no JSON"),
        (b"[1]", "no object"),
        (b"{}", "pid is no process"),
        (changed(pid=0), "pid is no process"),
        (changed(pid=-1), "pid is no process"),
        (changed(pid=True), "pid is no process"),
        (changed(pid="7"), "pid is no process"),
        (changed(pid=1 << 31), "pid is no process"),
        (changed(scope_id=3), "scope_id is no text"),
        (changed(expiration_time="soon"), "expiration_time is no time"),
        (changed(expiration_time=float("nan")), "expiration_time is no time"),
        (changed(expiration_time=True), "expiration_time is no time"),
        (changed(expiration_time=float("-inf")), "expiration_time is no time"),
        (changed(signal=65), "signal is none"),
        (changed(signal=9.0), "signal is none"),
        (changed(signal=None), "signal is none"),
        (changed(scope_id="x" * 5000), "longer than"),
    ],
)
def test_a_line_that_is_no_request_is_refused_in_words(line: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        parse_request(line)


@pytest.mark.parametrize("never", [float("inf"), 10**400, 1e16])
def test_what_never_expires_does_so_in_the_far_future(never: float) -> None:
    assert parse_request(changed(expiration_time=never)).expiration_time == TIME_MAX


@given(st.binary(max_size=300))
def test_nothing_that_comes_does_any_harm(noise: bytes) -> None:
    *noisy, last = fed(noise, b"\n" + LINE + b"\n")
    assert parse_request(last) == REQUEST
    for line in noisy:
        with suppress(InvalidRequest):
            parse_request(line)
