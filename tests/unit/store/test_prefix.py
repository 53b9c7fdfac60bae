"""What a part of a store adds; what all stores do is in tests/contract."""

from __future__ import annotations

from datetime import timedelta

from holdfast.store.memory import MemoryStore
from holdfast.store.prefix import PrefixStore


def test_parts_do_not_see_each_others_keys() -> None:
    store = MemoryStore()
    one, other = PrefixStore("one", store), PrefixStore("other", store)
    one.set("key", "1")
    assert not other.check(["key"])
    other.set("key", "2")
    assert (one.get("key"), other.get("key")) == (b"1", b"2")
    assert one.delete_key("key")
    assert other.check(["key"])


def test_names_are_as_with_torch() -> None:
    store = MemoryStore()
    PrefixStore("outer", PrefixStore("inner", store)).set("key", "1")
    assert store.get("inner/outer/key") == b"1"


def test_the_keys_of_the_whole_store_are_counted() -> None:
    store = MemoryStore()
    store.set("key", "1")
    assert PrefixStore("part", store).num_keys() == 1


def test_only_the_keys_of_a_part_are_listed() -> None:
    store = MemoryStore()
    part, other = PrefixStore("part", store), PrefixStore("part2", store)
    part.set("a/part/b", "1")
    other.set("c", "1")
    store.set("part", "1")
    assert part.list_keys() == ["a/part/b"]
    assert other.list_keys() == ["c"]
    assert sorted(store.list_keys()) == ["part", "part/a/part/b", "part2/c"]


def test_a_store_is_asked_only_what_the_part_is_asked() -> None:
    """So it may be one that has a few of the calls only."""

    class Small:
        def __init__(self) -> None:
            self.asked: list[object] = []

        def wait(self, *arguments: object) -> None:
            self.asked.append(arguments)

    small = Small()
    part = PrefixStore("part", small)
    part.wait(["a"])
    part.wait(["a", "b"], 1.5)
    part.wait(["a"], timedelta(minutes=1))
    assert small.asked == [
        (["part/a"],),
        (["part/a", "part/b"], timedelta(seconds=1.5)),
        (["part/a"], timedelta(minutes=1)),
    ]


def test_the_timeout_is_that_of_the_whole_store() -> None:
    store = MemoryStore()
    part = PrefixStore("part", store)
    part.set_timeout(2)
    assert store.timeout == part.timeout == timedelta(seconds=2)
    part.clone().set_timeout(timedelta(seconds=3))
    assert store.timeout == timedelta(seconds=2)
