from __future__ import annotations

from holdfast.timers.protocol import TimerRequest
from holdfast.timers.server import PURGE_S, TimerTable

NOW, WALL = 1_000.0, 1_700_000_000.0


def watched(*timers: TimerRequest, at_most: int = 100) -> TimerTable[TimerRequest]:
    found: TimerTable[TimerRequest] = TimerTable(at_most)
    for one in timers:
        assert found.set(one, NOW, WALL)
    return found


def test_from_its_arrival_on_only_the_monotonic_clock_counts() -> None:
    timers = watched(TimerRequest(1, "a", WALL + 5))
    assert timers.next_deadline() == NOW + 5
    assert timers.due(NOW + 4.9) == {}
    assert timers.due(NOW + 5) == {1: [TimerRequest(1, "a", WALL + 5)]}


def test_one_that_expired_before_it_came_is_due_at_once() -> None:
    assert watched(TimerRequest(1, "a", WALL - 5)).due(NOW) != {}


def test_one_that_never_expires_is_in_nobodys_way() -> None:
    never = TimerRequest(1, "never", float("inf"))
    timers = watched(never, TimerRequest(2, "a", WALL + 5), TimerRequest(3, "b", 10**400))
    assert [*timers.due(NOW + 5)] == [2]
    assert (timers.next_deadline() or 0) > 1e14


def test_a_negative_time_releases_and_only_that_one() -> None:
    timers = watched(TimerRequest(1, "a", WALL + 5), TimerRequest(1, "b", WALL + 9))
    timers.set(TimerRequest(1, "a", -1), NOW, WALL)
    timers.set(TimerRequest(1, "never", -1), NOW, WALL)
    assert (len(timers), timers.next_deadline()) == (1, NOW + 9)
    timers.set(TimerRequest(1, "b", -1), NOW, WALL)
    assert (len(timers), timers.next_deadline()) == (0, None)


def test_a_scope_that_is_asked_for_again_is_moved() -> None:
    timers = watched(TimerRequest(1, "a", WALL + 5), TimerRequest(1, "a", WALL + 50))
    assert (len(timers), timers.next_deadline()) == (1, NOW + 50)


def test_what_is_put_off_is_due_again_unless_it_was_dropped() -> None:
    timers = watched(TimerRequest(1, "a", WALL + 5), TimerRequest(2, "a", WALL + 5))
    late = timers.due(NOW + 5)
    timers.clear([2])
    for requests in late.values():
        timers.put_off(requests, NOW + 6)
    assert timers.due(NOW + 5.9) == {}
    assert [*timers.due(NOW + 6)] == [1]


def test_there_is_a_limit_and_room_is_made_by_those_that_are_gone() -> None:
    timers = watched(TimerRequest(1, "a", WALL + 5), TimerRequest(2, "a", WALL + 5), at_most=2)
    assert not timers.set(TimerRequest(3, "a", WALL), NOW, WALL)
    assert timers.set(TimerRequest(2, "a", WALL + 7), NOW, WALL)
    timers.purge(NOW, lambda pid: pid != 1)
    assert timers.set(TimerRequest(3, "a", WALL), NOW, WALL)
    timers.purge(NOW + PURGE_S / 2, lambda _: False)
    assert len(timers) == 2
    timers.purge(NOW + PURGE_S, lambda _: False)
    assert len(timers) == 0


def test_by_hand_it_goes_by_the_time_of_day() -> None:
    timers = watched(
        TimerRequest(1, "b", 3), TimerRequest(1, "a", 2), TimerRequest(2, "a", 4),
    )  # fmt: skip
    assert timers.expired_by_wall(1) == {}
    assert timers.expired_by_wall(3) == {1: [TimerRequest(1, "a", 2), TimerRequest(1, "b", 3)]}
    assert len(timers) == 3
