"""What a part of a store adds; what all stores do is in tests/contract."""

from __future__ import annotations

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
