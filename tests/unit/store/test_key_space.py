"""What clients share and wait for, decided without a network."""

from __future__ import annotations

import pytest

from holdfast.store.key_space import APPENDED_BYTES_MAX, ENTRY_BYTES, KeySpace, RequestRejected

A, B, C, D = 1, 2, 3, 4  # Clients.


def woken(space: KeySpace) -> list[int]:
    """Return who was woken since the last time."""
    clients, space.woken = space.woken, []
    return clients


@pytest.fixture
def space() -> KeySpace:
    return KeySpace()


def test_values(space: KeySpace) -> None:
    assert space.get(b"k") == b""
    space.set(b"k", b"v")
    assert space.get(b"k") == b"v"
    space.append(b"k", b"w")
    space.append(b"k", b"x")
    assert space.get(b"k") == b"vwx"
    space.append(b"new", b"n")
    assert space.get(b"new") == b"n"
    space.multi_set([b"k", b"m"], [b"1", b"2"])
    assert (space.get(b"k"), space.get(b"m")) == (b"1", b"2")
    assert len(space) == 3
    assert sorted(space.keys()) == [b"k", b"m", b"new"]
    assert space.delete(b"k")
    assert not space.delete(b"k")
    assert space.has([b"m", b"new"])
    assert not space.has([b"m", b"k"])
    assert space.has([])


@pytest.mark.parametrize(
    ("before", "expected", "returned", "after"),
    [
        (None, b"", b"new", b"new"),
        (None, b"old", b"old", None),
        (b"old", b"old", b"new", b"new"),
        (b"old", b"other", b"old", b"old"),
        (b"", b"", b"new", b"new"),
    ],
)
def test_compare_set(
    before: bytes | None, expected: bytes, returned: bytes, after: bytes | None, space: KeySpace
) -> None:
    if before is not None:
        space.set(b"k", before)
    assert space.compare_set(b"k", expected, b"new") == returned
    assert space.has([b"k"]) == (after is not None)
    assert space.get(b"k") == (after or b"")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (b"12", 12),
        (b"-3", -3),
        (b" \t+7 apples", 7),
        (b"1_000", 1),
        (b"9223372036854775806", 2**63 - 2),
    ],
)
def test_adding_to_a_number(value: bytes, number: int, space: KeySpace) -> None:
    space.set(b"k", value)
    assert space.add(b"k", 1) == number + 1
    assert space.get(b"k") == b"%d" % (number + 1)


@pytest.mark.parametrize(
    "value",
    [b"", b"word", b"+-1", b"--1", b"9223372036854775808", b"9" * 5000, b"\xd9\xa1", b"-", b"- 1"],
)
def test_what_is_no_number_cannot_be_counted(value: bytes, space: KeySpace) -> None:
    space.set(b"k", value)
    with pytest.raises(RequestRejected):
        space.add(b"k", 1)
    with pytest.raises(RequestRejected):
        space.barrier(A, b"k", 2)
    assert space.get(b"k") == value


def test_adding_begins_with_nothing_and_ends_at_64_bits(space: KeySpace) -> None:
    assert space.add(b"k", 0) == 0
    assert space.get(b"k") == b"0"
    assert space.add(b"k", 2**63 - 1) == 2**63 - 1
    with pytest.raises(RequestRejected):
        space.add(b"k", 1)
    assert space.get(b"k") == b"9223372036854775807"


# Waiting


@pytest.mark.parametrize("how", ["set", "add", "append", "multi_set", "compare_set", "push"])
@pytest.mark.parametrize("keys", [[b"k"], [b"k", b"k"], [b"k", b"there"]])
def test_a_wait_ends_when_the_key_comes(how: str, keys: list[bytes], space: KeySpace) -> None:
    space.set(b"there", b"")
    assert not space.wait(A, keys)
    assert woken(space) == []
    match how:
        case "set":
            space.set(b"k", b"v")
        case "add":
            space.add(b"k", 1)
        case "append":
            space.append(b"k", b"v")
        case "multi_set":
            space.multi_set([b"x", b"k"], [b"1", b"2"])
        case "compare_set":
            space.compare_set(b"k", b"", b"v")
        case _:
            space.push(b"k", b"v")
    assert woken(space) == [A]
    space.set(b"k", b"again")
    assert woken(space) == []
    assert space.wait(A, keys)


def test_all_who_wait_are_woken_in_their_order(space: KeySpace) -> None:
    for client in (C, A, B):
        assert not space.wait(client, [b"k"])
    assert not space.wait(D, [b"k", b"other"])
    space.set(b"k", b"v")
    assert woken(space) == [C, A, B]
    space.set(b"other", b"v")
    assert woken(space) == [D]


def test_all_keys_have_to_be_there_at_the_same_time(space: KeySpace) -> None:
    assert not space.wait(A, [b"x", b"y"])
    space.set(b"x", b"")
    space.delete(b"x")
    space.set(b"y", b"")
    assert woken(space) == []
    space.push(b"x", b"item")  # A queue is as good as a value,
    assert woken(space) == [A]
    assert not space.wait(A, [b"x", b"z"])
    assert space.pop(B, b"x") == (1, b"item")  # as long as it has something.
    space.set(b"z", b"")
    assert woken(space) == []
    space.set(b"x", b"")
    assert woken(space) == [A]


def test_a_key_with_a_value_and_a_queue_is_there_until_both_are_gone(space: KeySpace) -> None:
    assert not space.wait(A, [b"x", b"y"])
    space.set(b"x", b"")
    space.push(b"x", b"item")
    space.delete(b"x")
    space.set(b"x", b"")
    space.pop(B, b"x")
    space.set(b"y", b"")
    assert woken(space) == [A]


def test_an_exchange_that_fails_wakes_nobody(space: KeySpace) -> None:
    assert not space.wait(A, [b"k"])
    space.compare_set(b"k", b"something", b"new")
    assert woken(space) == []


@pytest.mark.parametrize("keys", [[b"k"], [b"k", b"l"]])
@pytest.mark.parametrize("way", ["cancel", "leave"])
def test_who_gives_up_is_not_woken(keys: list[bytes], way: str, space: KeySpace) -> None:
    held = space.bytes_held
    space.wait(A, keys)
    space.wait(B, keys)
    getattr(space, way)(A)
    getattr(space, way)(A)
    space.multi_set([b"k", b"l"], [b"", b""])
    assert woken(space) == [B]
    space.delete(b"k")
    space.delete(b"l")
    assert space.bytes_held == held
    assert forgotten(space)


def test_nobody_waits_for_two_things(space: KeySpace) -> None:
    space.wait(A, [b"k"])
    for again in ([b"l"], [b"l", b"m"]):
        with pytest.raises(RequestRejected):
            space.wait(A, again)
    with pytest.raises(RequestRejected):
        space.barrier(A, b"b", 2)
    assert not space.has([b"b"])
    space.set(b"k", b"")
    assert woken(space) == [A]


def forgotten(space: KeySpace) -> bool:
    """Whether nothing is left of waits, barriers and promises."""
    return not any(
        getattr(space, name)
        for name in ("_waits", "_single", "_several", "_barriers", "_promises", "_promised")
    )


# Queues


def test_a_queue(space: KeySpace) -> None:
    assert space.pop(A, b"q") == (0, b"")
    assert space.queue_length(b"q") == 0
    for value in (b"1", b"", b"3"):
        space.push(b"q", value)
    assert space.queue_length(b"q") == 3
    assert len(space) == 0
    assert space.has([b"q"])
    assert [space.pop(A, b"q") for _ in range(4)] == [(3, b"1"), (2, b""), (1, b"3"), (0, b"")]
    assert not space.has([b"q"])
    assert space.bytes_held == 0


def test_a_push_wakes_one_in_order_of_arrival(space: KeySpace) -> None:
    for client in (B, A, C):
        space.wait(client, [b"q"])
    space.push(b"q", b"1")
    assert woken(space) == [B]
    space.push(b"q", b"2")
    assert woken(space) == [A]
    space.cancel(C)
    space.push(b"q", b"3")
    assert woken(space) == []


def test_what_was_promised_is_taken_by_nobody_else(space: KeySpace) -> None:
    space.wait(A, [b"q"])
    space.push(b"q", b"1")
    assert woken(space) == [A]
    assert space.pop(B, b"q") == (0, b"")
    assert not space.wait(B, [b"q"])
    space.release(A, b"q")  # It asks for that queue.
    assert space.pop(A, b"q") == (1, b"1")
    assert woken(space) == []
    space.push(b"q", b"2")
    assert woken(space) == [B]
    assert space.pop(B, b"q") == (1, b"2")
    assert forgotten(space)


@pytest.mark.parametrize("how", ["other request", "leave"])
def test_a_promise_ends_with_the_next_request(how: str, space: KeySpace) -> None:
    space.push(b"q", b"1")
    assert space.wait(A, [b"q"])
    assert space.promises
    assert not space.wait(B, [b"q"])
    if how == "leave":
        space.leave(A)
    else:
        space.release(A)
    assert woken(space) == [B]
    assert space.pop(B, b"q") == (1, b"1")
    assert forgotten(space)


def test_waiting_again_keeps_the_promise(space: KeySpace) -> None:
    space.push(b"q", b"1")
    assert space.wait(A, [b"q"])
    space.release(A, b"q")
    assert space.wait(A, [b"q"])
    assert space.pop(A, b"q") == (1, b"1")
    assert forgotten(space)


def test_a_promise_ends_when_it_is_old(space: KeySpace) -> None:
    space.push(b"q", b"1")
    assert space.wait(A, [b"q"])  # It only wanted to know.
    space.end_old_promises()
    assert space.pop(B, b"q") == (0, b"")
    assert not space.wait(C, [b"q"])
    space.end_old_promises()
    assert woken(space) == [C]
    assert space.pop(B, b"q") == (0, b"")
    assert space.pop(C, b"q") == (1, b"1")
    space.push(b"q", b"2")
    assert space.wait(C, [b"q"])
    space.end_old_promises()
    assert space.pop(C, b"q") == (1, b"2")
    assert forgotten(space)


# Barriers


def test_a_barrier_lets_all_pass_when_the_last_has_come(space: KeySpace) -> None:
    for turn in range(2):
        assert not space.barrier(A, b"b", 3)
        assert space.get(b"b") == b"1"
        assert not space.barrier(B, b"b", 3)
        assert space.get(b"b") == b"2"
        assert woken(space) == [], turn
        assert space.barrier(C, b"b", 3)
        assert space.get(b"b") == b"3"
        assert woken(space) == [A, B]
        assert forgotten(space)


@pytest.mark.parametrize("way", ["cancel", "leave"])
def test_who_gives_up_at_a_barrier_is_not_counted(way: str, space: KeySpace) -> None:
    space.barrier(A, b"b", 3)
    space.barrier(B, b"b", 3)
    getattr(space, way)(A)
    assert space.get(b"b") == b"1"
    assert not space.barrier(C, b"b", 3)
    assert woken(space) == []
    assert space.barrier(A, b"b", 3)
    assert woken(space) == [B, C]


def test_a_barrier_whose_key_is_deleted_still_counts(space: KeySpace) -> None:
    space.barrier(A, b"b", 2)
    space.delete(b"b")
    space.barrier(B, b"c", 3)
    space.delete(b"c")
    space.cancel(B)
    assert not space.has([b"c"])
    assert space.barrier(B, b"b", 2)
    assert woken(space) == [A]


def test_a_barrier_of_one_or_none_is_passed_at_once(space: KeySpace) -> None:
    assert space.barrier(A, b"b", 1)
    assert space.barrier(A, b"b", -1)
    assert forgotten(space)


# Limits


def test_what_is_held_has_a_limit_and_nothing_changes_beyond_it() -> None:
    space = KeySpace(10 * ENTRY_BYTES)
    large = bytes(20 * ENTRY_BYTES)
    space.set(b"k", b"v")
    held = space.bytes_held
    for refused in (
        lambda: space.set(b"k", large),
        lambda: space.set(b"new", large),
        lambda: space.append(b"k", large),
        lambda: space.append(b"new", large),
        lambda: space.compare_set(b"k", b"v", large),
        lambda: space.multi_set([b"a", b"b"], [b"", large]),
        lambda: space.push(b"q", large),
        lambda: space.wait(A, [b"%d" % number for number in range(20)]),
    ):
        with pytest.raises(RequestRejected, match="full"):
            refused()
        assert space.bytes_held == held
    assert list(space.keys()) == [b"k"]
    assert space.get(b"k") == b"v"
    assert forgotten(space)
    space.delete(b"k")
    assert space.bytes_held == 0


def test_who_goes_from_a_barrier_is_not_refused_that() -> None:
    space = KeySpace(2 * ENTRY_BYTES + 2)
    space.barrier(A, b"b", 2)
    space.set(b"b", b"")
    space.set(b"f", b"")
    assert space.bytes_held == 2 * ENTRY_BYTES + 2  # There is no room for a digit.
    space.leave(A)
    assert space.get(b"b") == b"0"
    space.delete(b"b")
    space.delete(b"f")
    assert space.bytes_held == 0


def test_appending_has_a_limit(space: KeySpace) -> None:
    piece = bytes(APPENDED_BYTES_MAX // 4 + 1)
    for _ in range(3):
        space.append(b"k", piece)
    with pytest.raises(RequestRejected):
        space.append(b"k", piece)
    assert len(space.get(b"k")) == 3 * len(piece)
