"""Requests as lines, and the table of timers."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.timers.timer_requests import (
    LINE_BYTES_MAX,
    TIME_MAX,
    FileTimerRequest,
    InvalidRequest,
    LineSplitter,
    TimerRequest,
    parse_request,
)
from holdfast.timers.timer_table import PURGE_S, STALE_MAX, TimerTable

REQUEST = FileTimerRequest(7, "step {1}", 12.5, 9)
LINE = REQUEST.to_json().encode()
NOW, WALL = 1_000.0, 1_700_000_000.0


@given(st.lists(st.integers(0, 3 * len(LINE)), max_size=5))
def test_lines_can_arrive_in_any_pieces(cuts: list[int]) -> None:
    text = LINE + b"\n" + LINE + b"\n" + LINE + b"\n"
    lines = LineSplitter()
    found = [
        line
        for start, end in pairwise([0, *sorted(cuts), len(text)])
        for line in lines.feed(text[start:end])
    ]
    assert found == [LINE] * 3
    assert parse_request(LINE) == REQUEST


def test_too_long_line_does_not_affect_others() -> None:
    lines = LineSplitter()
    assert [line for _ in range(100) for line in lines.feed(b"x" * 5000)] == [b"x" * LINE_BYTES_MAX]
    assert len(lines._rest) <= LINE_BYTES_MAX
    whole, after = lines.feed(LINE + b"\n" + LINE + b"\n")
    assert parse_request(whole) == parse_request(after) == REQUEST
    assert len([*lines.feed(b"x" * 5000)]) == 1
    assert [*lines.feed(b"xx\n" + LINE + b"\n")] == [LINE]


def changed(**values: object) -> bytes:
    return json.dumps({**json.loads(LINE), **values}).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\xff\xfe{", b"[" * 4000, b"[1]", b"{}",
        changed(pid=0), changed(pid=-1), changed(pid=True), changed(pid="7"),
        changed(pid=1 << 31), changed(scope_id=3), changed(expiration_time="soon"),
        changed(expiration_time=float("nan")), changed(expiration_time=True),
        changed(expiration_time=float("-inf")), changed(signal=65), changed(signal=9.0),
        changed(signal=None), changed(scope_id="x" * 5000),
    ],
)  # fmt: skip
def test_invalid_line_is_rejected(line: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_request(line)


@given(st.binary(max_size=300))
def test_arbitrary_input_is_parsed_or_rejected(noise: bytes) -> None:
    lines = LineSplitter()
    *noisy, last = [*lines.feed(noise), *lines.feed(b"\n" + LINE + b"\n")]
    assert parse_request(last) == REQUEST
    for line in noisy:
        with suppress(InvalidRequest):
            parse_request(line)


def table(*timers: TimerRequest, at_most: int = 100) -> TimerTable[TimerRequest]:
    found: TimerTable[TimerRequest] = TimerTable(lambda pid: pid != 1, at_most)
    for one in timers:
        assert found.set(one, NOW, WALL)
    return found


def test_clock_step_does_not_affect_timers() -> None:
    never = [TimerRequest(2, "never", float("inf")), TimerRequest(3, "never", 10**400)]
    timers = table(TimerRequest(1, "a", WALL + 5), TimerRequest(1, "past", WALL - 5), *never)
    assert [one.scope_id for one in timers.due(NOW)[1]] == ["past"]
    assert timers.next_deadline() == NOW + 5
    assert timers.due(NOW + 4.9) == {}
    assert timers.due(NOW + 5) == {1: [TimerRequest(1, "a", WALL + 5)]}
    assert timers.due(NOW + 5) == {}
    assert (timers.next_deadline() or 0) > 1e14
    assert parse_request(changed(expiration_time=1e16)).expiration_time == TIME_MAX


def test_rescheduled_timer_is_due_again_unless_dropped() -> None:
    timers = table(TimerRequest(1, "a", WALL + 5), TimerRequest(2, "a", WALL + 5))
    late = timers.due(NOW + 5)
    timers.clear([2])
    for requests in late.values():
        timers.schedule_again(requests, NOW + 6)
    assert timers.due(NOW + 5.9) == {}
    assert [*timers.due(NOW + 6)] == [1]


def test_timers_of_ended_processes_make_room() -> None:
    timers = table(TimerRequest(2, "a", WALL), TimerRequest(3, "a", WALL), at_most=2)
    assert not timers.set(TimerRequest(4, "a", WALL), NOW, WALL)
    assert timers.set(TimerRequest(2, "a", WALL + 7), NOW, WALL)
    timers.release(2, "a")
    assert timers.set(TimerRequest(1, "a", WALL), NOW, WALL)  # This process has exited.
    assert not timers.set(TimerRequest(4, "a", WALL), NOW + PURGE_S / 2, WALL)
    assert timers.set(TimerRequest(4, "a", WALL), NOW + PURGE_S, WALL)
    assert [*timers.expired_by_wall(WALL)] == [3, 4]


def test_released_timers_do_not_accumulate() -> None:
    timers = table()
    for count in range(10_000):
        timers.set(TimerRequest(1, "step", WALL + count), NOW, WALL)
        timers.set(TimerRequest(1, f"block {count}", WALL), NOW, WALL)
        timers.release(1, f"block {count}")
    assert len(timers) == 1
    assert len(timers._heap) <= STALE_MAX + 4


PIDS, SCOPES, TIMES = st.integers(1, 3), st.sampled_from("abc"), st.integers(0, 20)
CALLS = st.one_of(
    st.tuples(st.just("set"), PIDS, SCOPES, TIMES),
    st.tuples(st.just("release"), PIDS, SCOPES),
    st.tuples(st.just("clear"), PIDS),
    st.tuples(st.just("due"), TIMES),
)


@given(st.lists(CALLS, max_size=60))
def test_table_finds_the_same_timers_as_a_full_search(calls: list[tuple[Any, ...]]) -> None:
    timers = table()
    plain: dict[tuple[int, str], int] = {}
    for call, *args in calls:
        match call:
            case "set":
                pid, scope, at = args
                timers.set(TimerRequest(pid, scope, at), 0.0, 0.0)
                plain[pid, scope] = at
            case "release":
                timers.set(TimerRequest(args[0], args[1], -1), 0.0, 0.0)
                plain.pop((args[0], args[1]), None)
            case "clear":
                timers.clear(args)
                plain = {key: at for key, at in plain.items() if key[0] != args[0]}
            case "due":
                found = timers.due(args[0])
                due = [one for requests in found.values() for one in requests]
                for requests in found.values():
                    assert requests == sorted(requests, key=lambda one: one.expiration_time)
                assert {(one.worker_id, one.scope_id) for one in due} == {
                    key for key, at in plain.items() if at <= args[0]
                }
                for one in due:
                    timers.release(one.worker_id, one.scope_id)
                    del plain[one.worker_id, one.scope_id]
        assert len(timers) == len(plain)
        assert timers.next_deadline() == min(plain.values(), default=None)
