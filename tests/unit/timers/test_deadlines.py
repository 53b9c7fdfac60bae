from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.timers.deadlines import STALE_MAX, Deadlines


def test_the_next_one_is_the_earliest_that_is_still_set() -> None:
    deadlines = Deadlines()
    assert deadlines.next_deadline() is None
    deadlines.set(1, "outer", 60.0)
    deadlines.set(1, "inner", 5.0)
    deadlines.set(2, "inner", 7.0)
    assert deadlines.next_deadline() == 5.0
    assert deadlines.release(1, "inner")
    assert deadlines.next_deadline() == 7.0
    deadlines.forget(2)
    assert deadlines.next_deadline() == 60.0
    assert (deadlines.owners(), deadlines.of(1)) == ([1], {"outer": 60.0})


def test_one_that_is_moved_counts_at_its_new_time_only() -> None:
    deadlines = Deadlines()
    deadlines.set(1, "a", 5.0)
    deadlines.set(1, "a", 50.0)
    assert len(deadlines) == 1
    assert deadlines.due(5.0) == []
    assert deadlines.due(50.0) == [(1, "a")]
    assert deadlines.due(50.0) == []


def test_one_that_is_moved_away_and_back_is_due_once() -> None:
    deadlines = Deadlines()
    for at in (5.0, 50.0, 5.0):
        deadlines.set(1, "a", at)
    assert deadlines.due(60.0) == [(1, "a")]
    assert len(deadlines) == 0


def test_what_is_due_comes_in_order_and_at_the_very_moment() -> None:
    deadlines = Deadlines()
    for name, at in (("c", 3.0), ("a", 1.0), ("d", 4.0), ("b", 2.0)):
        deadlines.set(7, name, at)
    assert deadlines.due(3.0) == [(7, "a"), (7, "b"), (7, "c")]
    assert deadlines.next_deadline() == 4.0


def test_releasing_what_is_not_set_is_told_and_changes_nothing() -> None:
    deadlines = Deadlines()
    deadlines.set(1, "a", 1.0)
    assert not deadlines.release(1, "b")
    assert not deadlines.release(2, "a")
    deadlines.forget(2)
    assert len(deadlines) == 1


def test_what_no_longer_counts_does_not_pile_up() -> None:
    deadlines = Deadlines()
    for count in range(10_000):
        deadlines.set(1, "step", 1e6 + count)
        deadlines.set(1, f"block {count}", 1e6)
        deadlines.release(1, f"block {count}")
    assert len(deadlines) == 1
    assert len(deadlines._heap) <= STALE_MAX + 4


OWNERS, NAMES = st.integers(1, 3), st.sampled_from("abc")
TIMES = st.integers(0, 20)
CALLS = st.one_of(
    st.tuples(st.just("set"), OWNERS, NAMES, TIMES),
    st.tuples(st.just("release"), OWNERS, NAMES),
    st.tuples(st.just("forget"), OWNERS),
    st.tuples(st.just("due"), TIMES),
)


@given(st.lists(CALLS, max_size=60))
def test_it_is_what_looking_through_all_would_find(
    calls: list[tuple[str, int] | tuple[str, int, str] | tuple[str, int, str, int]],
) -> None:
    deadlines = Deadlines()
    plain: dict[tuple[int, str], int] = {}
    for call in calls:
        if call[0] == "set":
            _, owner, name, at = call  # type: ignore[misc]
            deadlines.set(owner, name, at)
            plain[owner, name] = at
        elif call[0] == "release":
            _, owner, name = call  # type: ignore[misc]
            assert deadlines.release(owner, name) == (plain.pop((owner, name), None) is not None)
        elif call[0] == "forget":
            deadlines.forget(call[1])
            plain = {key: at for key, at in plain.items() if key[0] != call[1]}
        else:
            due = deadlines.due(call[1])
            assert [plain[key] for key in due] == sorted(plain[key] for key in due)
            assert set(due) == {key for key, at in plain.items() if at <= call[1]}
            plain = {key: at for key, at in plain.items() if key not in due}
        assert len(deadlines) == len(plain)
        assert deadlines.next_deadline() == min(plain.values(), default=None)
