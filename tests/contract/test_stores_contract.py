"""What every store does: ours, and torch's in their place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.store.file_store import FileStore
from holdfast.store.memory import MemoryStore
from holdfast.store.prefix import PrefixStore

if TYPE_CHECKING:
    from pathlib import Path


OURS = ["memory", "file", "part of memory", "part of file"]
TORCHS = ["HashStore", "FileStore", "TCPStore"]


def torch_store(kind: str, folder: Path, tcp_store: Any) -> Any:
    from torch import distributed

    if kind == "HashStore":
        return distributed.HashStore()
    if kind == "FileStore":
        return distributed.FileStore(str(folder / "file"))
    return distributed.PrefixStore(str(folder), tcp_store)


@pytest.fixture(params=[*OURS, *(pytest.param(one, marks=pytest.mark.torch) for one in TORCHS)])
def store(request: pytest.FixtureRequest, tmp_path: Path, tcp_store: Any) -> Any:
    match request.param:
        case "memory":
            return MemoryStore()
        case "file":
            return FileStore(tmp_path)
        case "part of memory":
            return PrefixStore("part", MemoryStore())
        case "part of file":
            return PrefixStore("part/of", FileStore(tmp_path))
        case kind:
            return torch_store(kind, tmp_path, tcp_store)


def test_values_are_bytes_however_they_were_given(store: Any) -> None:
    store.set("text", "é")
    store.set("bytes", b"\x00\xff")
    assert (store.get("text"), store.get("bytes")) == ("é".encode(), b"\x00\xff")


@pytest.mark.parametrize("key", ["", ".", "..", "a/b", "/", "a b", "é", "x" * 400, "%2F"])
def test_any_text_is_a_key(store: Any, key: str) -> None:
    store.set(key, "1")
    store.set(f"{key}+", "2")
    assert store.get(key) == b"1"
    assert store.check([key])


def test_a_missing_key_is_set_if_nothing_is_expected(store: Any) -> None:
    assert store.compare_set("key", "", "one") == b"one"
    assert store.get("key") == b"one"


def test_a_missing_key_is_not_set_if_something_is_expected(store: Any) -> None:
    assert store.compare_set("key", "some", "one") == b"some"
    assert not store.check(["key"])


def test_a_key_is_set_if_it_has_the_expected_value(store: Any) -> None:
    store.set("key", "one")
    assert store.compare_set("key", "one", "two") == b"two"
    assert store.get("key") == b"two"


@pytest.mark.parametrize("expected", ["", "on", "one "])
def test_a_key_is_not_set_if_it_has_another_value(store: Any, expected: str) -> None:
    store.set("key", "one")
    assert store.compare_set("key", expected, "two") == b"one"
    assert store.get("key") == b"one"


def test_of_many_who_compare_and_set_one_wins(store: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: store.compare_set("key", "", str(one)), range(24)))
    assert len(set(answers)) == 1


def test_a_deleted_key_has_no_value(store: Any) -> None:
    store.set("key", "one")
    assert store.delete_key("key")
    assert not store.check(["key"])
    assert store.compare_set("key", "", "two") == b"two"


def test_keys_are_counted(store: Any) -> None:
    before = store.num_keys()
    store.set("a", "1")
    store.set("b", "1")
    store.set("a", "2")
    assert store.num_keys() == before + 2
    store.delete_key("a")
    assert store.num_keys() == before + 1


def test_several_at_once(store: Any) -> None:
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["b", "a", "b"]) == [b"2", b"1", b"2"]


def test_append(store: Any) -> None:
    store.append("key", "one")
    store.append("key", " two")
    assert store.get("key") == b"one two"


def test_add(store: Any) -> None:
    assert (store.add("count", 2), store.add("count", -5)) == (2, -3)
    assert store.get("count") == b"-3"


def test_wait_ends_or_gives_up(store: Any) -> None:
    store.set("a", "")
    store.wait(["a"], timedelta(minutes=1))
    with pytest.raises((OSError, RuntimeError)):
        store.wait(["a", "b"], timedelta(milliseconds=10))
