"""Waits, promises, barriers and limits of a key space, without a network.

tests/contract has the tests of all stores, tests/fuzz those with arbitrary requests of several clients.
"""

from __future__ import annotations

import pytest

from holdfast.store.key_space import (
    APPENDED_BYTES_MAX,
    ENTRY_BYTES,
    ClientShare,
    KeySpace,
    RequestRejected,
    ShareUsedUp,
)

A, B, C, D = 1, 2, 3, 4  # Clients.


def woken(space: KeySpace) -> list[int]:
    """Return the clients woken since the last call."""
    clients, space.woken = space.woken, []
    return clients


@pytest.fixture
def space() -> KeySpace:
    return KeySpace()


# Waiting


def test_waiting_clients_are_woken_in_order(space: KeySpace) -> None:
    for client in (C, A, B):
        assert not space.wait(client, [b"k"])
    assert not space.wait(D, [b"k", b"other"])
    space.set(b"k", b"v")
    assert woken(space) == [C, A, B]
    space.set(b"other", b"v")
    assert woken(space) == [D]


def test_wait_ends_only_when_all_keys_exist_at_once(space: KeySpace) -> None:
    assert not space.wait(A, [b"x", b"y"])
    space.set(b"x", b"")
    space.delete(b"x")
    space.set(b"y", b"")
    assert woken(space) == []
    space.push(b"x", b"item")  # A queue counts like a value,
    assert woken(space) == [A]
    assert not space.wait(A, [b"x", b"z"])
    assert space.pop(B, b"x") == (1, b"item")  # while it is not empty.
    space.set(b"z", b"")
    assert woken(space) == []
    space.set(b"x", b"")
    assert woken(space) == [A]


@pytest.mark.parametrize("keys", [[b"k"], [b"k", b"l"]])
@pytest.mark.parametrize("way", ["cancel", "leave"])
def test_cancelled_client_is_not_woken(keys: list[bytes], way: str, space: KeySpace) -> None:
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


def test_client_cannot_wait_twice(space: KeySpace) -> None:
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
    """Whether no waits, barriers and promises are left."""
    return not any(
        getattr(space, name)
        for name in ("_waits", "_single", "_several", "_barriers", "_promises", "_promised")
    )


# Queues


def test_push_wakes_one_client_in_order_of_arrival(space: KeySpace) -> None:
    for client in (B, A, C):
        space.wait(client, [b"q"])
    space.push(b"q", b"1")
    assert woken(space) == [B]
    space.push(b"q", b"2")
    assert woken(space) == [A]
    space.cancel(C)
    space.push(b"q", b"3")
    assert woken(space) == []


def test_promised_value_is_not_popped_by_another_client(space: KeySpace) -> None:
    space.wait(A, [b"q"])
    space.push(b"q", b"1")
    assert woken(space) == [A]
    assert space.pop(B, b"q") == (0, b"")
    assert not space.wait(B, [b"q"])
    space.release(A, b"q")  # Its next request is for that queue.
    assert space.pop(A, b"q") == (1, b"1")
    assert woken(space) == []
    space.push(b"q", b"2")
    assert woken(space) == [B]
    assert space.pop(B, b"q") == (1, b"2")
    assert forgotten(space)


@pytest.mark.parametrize("how", ["other request", "leave"])
def test_promise_ends_with_the_next_request(how: str, space: KeySpace) -> None:
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


def test_repeated_wait_keeps_the_promised_value(space: KeySpace) -> None:
    space.push(b"q", b"1")
    assert space.wait(A, [b"q"])
    space.release(A, b"q")
    assert space.wait(A, [b"q"])
    assert space.pop(A, b"q") == (1, b"1")
    assert forgotten(space)


def test_old_promise_ends(space: KeySpace) -> None:
    space.push(b"q", b"1")
    assert space.wait(A, [b"q"])  # It never pops.
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


def test_barrier_survives_the_deletion_of_its_key(space: KeySpace) -> None:
    space.barrier(A, b"b", 2)
    space.delete(b"b")
    space.barrier(B, b"c", 3)
    space.delete(b"c")
    space.cancel(B)
    assert not space.has([b"c"])
    assert space.barrier(B, b"b", 2)
    assert woken(space) == [A]


# Limits


def test_rejected_operation_beyond_the_limit_changes_nothing() -> None:
    space = KeySpace(10 * ENTRY_BYTES)
    large = bytes(9 * ENTRY_BYTES)  # Too large by at most one entry.
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
        lambda: space.wait(A, [b"%d" % number for number in range(10)]),
    ):
        with pytest.raises(RequestRejected, match="full"):
            refused()
        assert space.bytes_held == held
    assert list(space.keys()) == [b"k"]
    assert space.get(b"k") == b"v"
    assert forgotten(space)
    space.delete(b"k")
    assert space.bytes_held == 0


def test_client_can_leave_a_barrier_of_a_full_store() -> None:
    space = KeySpace(2 * ENTRY_BYTES + 2)
    space.barrier(A, b"b", 2)
    space.set(b"b", b"")
    space.set(b"f", b"")
    assert space.bytes_held == 2 * ENTRY_BYTES + 2  # No room for another digit.
    space.leave(A)
    assert space.get(b"b") == b"0"
    space.delete(b"b")
    space.delete(b"f")
    assert space.bytes_held == 0


def test_append_is_limited(space: KeySpace) -> None:
    piece = bytes(APPENDED_BYTES_MAX // 4 + 1)
    for _ in range(3):
        space.append(b"k", piece)
    with pytest.raises(RequestRejected):
        space.append(b"k", piece)
    assert len(space.get(b"k")) == 3 * len(piece)


# Shares


def fill(space: KeySpace, way: str, name: bytes, size: int) -> None:
    """Use space of this size for a client."""
    match way:
        case "set":
            space.set(name, bytes(size))
        case "multi_set":
            space.multi_set([name], [bytes(size)])
        case "append":
            space.append(name, bytes(size))
        case "append to another's":
            space.append(b"another's", bytes(size))
        case "push":
            space.push(name, bytes(size))
        case "push to another's":
            space.push(b"another's queue", bytes(size))
        case "wait":
            space.wait(int.from_bytes(name, "big"), [name, bytes(size)])


@pytest.mark.parametrize(
    "way",
    ["set", "multi_set", "append", "append to another's", "push", "push to another's", "wait"],
)
def test_share_limits_its_clients(way: str) -> None:
    space, share = KeySpace(100_000), ClientShare("they", 100_000, 4)
    space.set(b"another's", b"")
    space.push(b"another's queue", b"")
    space.share = share

    def fill_up() -> None:
        for number in range(1000):
            fill(space, way, number.to_bytes(2, "big"), 1000)

    with pytest.raises(ShareUsedUp):
        fill_up()
    assert 10_000 < space.bytes_held < 26_000
    assert share.bytes_held <= share.bytes_max
    space.share = None  # Other clients have room.
    space.set(b"large", bytes(70_000))


def test_deleted_values_no_longer_count_against_a_share() -> None:
    space, share = KeySpace(), ClientShare("they", 1 << 20, 1)
    for _ in range(2):
        space.share = share
        space.set(b"deleted", b"value")
        space.set(b"replaced", b"value")
        space.append(b"replaced", b"more")
        space.set(b"taken over", b"value")
        space.add(b"counter", 1)
        space.push(b"queue", b"value")
        space.push(b"queue", b"value")
        space.wait(A, [b"one", b"two"])
        space.barrier(B, b"barrier", 2)
        assert share.bytes_held > 0
        space.set(b"replaced", b"")
        space.share = None
        space.set(b"taken over", b"mine")
        for key in (b"deleted", b"replaced", b"taken over", b"counter"):
            assert space.delete(key)
        for _ in range(2):
            space.pop(C, b"queue")
        space.leave(A)
        space.leave(B)
        space.delete(b"barrier")
        assert share.bytes_held == 0
        assert space.bytes_held == 0


def test_smaller_value_frees_space_in_a_full_share() -> None:
    space, share = KeySpace(), ClientShare("they", 2000, 1)
    space.share = share
    space.set(b"key", bytes(1800))
    with pytest.raises(ShareUsedUp):
        space.set(b"key", bytes(1900))
    assert space.get(b"key") == bytes(1800)
    space.set(b"key", bytes(10))
    space.set(b"other", bytes(1000))
