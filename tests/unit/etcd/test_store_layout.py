from __future__ import annotations

from itertools import permutations

import pytest

from holdfast.errors import UsageError
from holdfast.etcd.store_layout import KeyRange, StoreKeys

# "ab?" is one whose base64 has a slash in it.
ODD_KEYS = ["", "a", "a/b", "/", "ab?", "é", "k", "a\x1f", "\x1f", "\x1fa", "a\x1fv", "a\x1f\x1fv",
            "a\x1fq", "a\0", "\n", "\U0001f600"]  # fmt: skip


def is_in(place: bytes, spot: KeyRange) -> bool:
    return spot.key <= place < spot.end if spot.end else place == spot.key


def places_of(key: str, places: StoreKeys) -> list[bytes]:
    """Return all places that a key has something at, in a store."""
    return [
        places.value(key).key,
        places.queue(key).key,
        places.barrier(key).key,
        places.entry(key, 0).key,
        places.entry(key, 10**19).key,
    ]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_a_key_is_known_by_its_place(key: str) -> None:
    places = StoreKeys("/some/")
    value, *others = places_of(key, places)
    assert places.key_of(value) == key
    assert [places.key_of(other) for other in others] == [None] * len(others)


def test_no_two_keys_share_a_place_or_a_range() -> None:
    places = StoreKeys("/some/")
    for one, other in permutations(ODD_KEYS, 2):
        assert not set(places_of(one, places)) & set(places_of(other, places))
        assert not any(is_in(place, places.either(one)) for place in places_of(other, places))


def test_one_range_has_value_and_queue() -> None:
    places = StoreKeys("/some/")
    for key in ODD_KEYS:
        found = [is_in(place, places.either(key)) for place in places_of(key, places)]
        assert found == [True, True, False, False, False]
        assert all(is_in(place, places.all_keys()) for place in places_of(key, places)[:2])


def test_stores_in_each_others_prefixes_have_nothing_in_common() -> None:
    stores = [StoreKeys(prefix) for prefix in ("/", "/a/", "/a/k/", "/ab/", "/a/kb/", "")]
    for one, other in permutations(stores, 2):
        for key in ODD_KEYS:
            assert not any(is_in(place, one.all_keys()) for place in places_of(key, other))


def test_a_prefix_that_could_be_taken_for_a_part_of_a_key_is_refused() -> None:
    with pytest.raises(UsageError, match="control character"):
        StoreKeys("/a/\x1fk")


def test_values_of_a_queue_sort_as_they_came() -> None:
    places = StoreKeys("/some/")
    numbers = [0, 1, 9, 10, 11, 100, 10**19]
    entries = [places.entry("key", number).key for number in numbers]
    assert sorted(entries) == entries
