"""Which half-open connection is closed when all places are taken."""

from __future__ import annotations

import random

import pytest

from holdfast.net.half_open import HalfOpen, network_of


def names(address: str, count: int) -> list[str]:
    return [f"{address} {number}" for number in range(count)]


def filled(places: int, *groups: tuple[str, int], silent: bool = True) -> HalfOpen:
    """Return connections that arrived one per second, group by group."""
    half_open = HalfOpen(places, min_s=100.0, oversized_min_s=10.0)
    for address, count in groups:
        for name in names(address, count):
            half_open.add(name, address, float(len(half_open.since)), silent=silent)
    return half_open


def test_without_an_oversized_group_the_oldest_is_closed_after_its_minimum_time() -> None:
    half_open = filled(8, *((f"10.0.0.{host}", 2) for host in range(4)))
    assert half_open.is_full
    assert half_open.next_to_close() == ("10.0.0.0 0", 100.0)
    assert half_open.remove("10.0.0.0 0")
    assert not half_open.is_full
    assert half_open.next_to_close() == ("10.0.0.0 1", 101.0)


def test_oldest_silent_connection_of_the_largest_group_is_closed_first() -> None:
    half_open = filled(8, ("10.0.0.1", 2), ("10.0.0.2", 3), ("10.0.0.3", 3))
    half_open.add("10.0.0.3 3", "10.0.0.3", 8.0)
    assert half_open.next_to_close() == ("10.0.0.3 0", 0.0)  # The largest of several groups.
    half_open = filled(8, ("10.0.0.1", 2), ("10.0.0.2", 5), silent=False)
    assert half_open.next_to_close() == ("10.0.0.2 0", 12.0)
    half_open.add("late and silent", "10.0.0.2", 7.0)
    assert half_open.next_to_close() == ("late and silent", 0.0)


def test_new_silent_connection_of_an_oversized_group_is_rejected() -> None:
    half_open = filled(8, ("10.0.0.1", 2), ("10.0.0.2", 5))
    assert not half_open.rejects("10.0.0.2")  # A place is free.
    half_open.add("10.0.0.3 0", "10.0.0.3", 7.0)
    assert half_open.rejects("10.0.0.2")
    assert not half_open.rejects("10.0.0.1")
    assert not half_open.rejects("10.0.0.4")


def test_group_that_shrinks_is_no_longer_oversized() -> None:
    half_open = filled(8, ("10.0.0.1", 2), ("10.0.0.2", 3))
    assert half_open.remove("10.0.0.2 1")
    assert not half_open.remove("10.0.0.2 1")
    assert half_open.next_to_close() == ("10.0.0.1 0", 100.0)


def test_flood_never_displaces_connections_of_other_addresses() -> None:
    draw = random.Random(1)
    half_open = filled(64, ("10.0.0.1", 16))
    for number in range(10_000):
        if half_open.is_full:
            half_open.remove(half_open.next_to_close()[0])
        half_open.add(number, f"10.6.6.{draw.randrange(2)}", 16.0, silent=draw.random() < 0.9)
    assert list(half_open.since)[:16] == names("10.0.0.1", 16)


def test_local_user_is_one_address_however_many_addresses_he_uses() -> None:
    half_open = HalfOpen(8)
    half_open.add("honest", "127.0.0.1", 0.0, user=1000)
    for number in range(7):
        half_open.add(number, f"127.0.0.{number}", 1.0, user=2002)
    assert half_open.rejects("127.9.9.9", 2002)
    assert not half_open.rejects("127.0.0.1", 1000)
    assert half_open.next_to_close()[0] == 0


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%lo", "fe80::1%2", True),
        ("", "", True),  # Clients of a socket file.
    ],
)
def test_ipv6_addresses_of_one_64_prefix_count_as_one(one: str, other: str, is_same: bool) -> None:
    assert (network_of(one) == network_of(other)) is is_same
