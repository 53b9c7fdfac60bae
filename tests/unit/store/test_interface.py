"""That our stores have what the interface says, which mypy checks here; torch's: tests/contract."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import holdfast.store
from holdfast.store import FileStore, MemoryStore, PrefixStore, Store, TCPStore

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.store.interface import ComparingStore, RoundStore


def test_every_store_is_one(tmp_path: Path) -> None:
    stores: list[Store] = [MemoryStore(), FileStore(tmp_path), PrefixStore("a", MemoryStore())]
    with TCPStore("127.0.0.1", 0, is_master=True) as served:
        stores.append(served)
        assert all(isinstance(store, Store) for store in stores)
    narrow: list[RoundStore] = [*stores]
    comparing: list[ComparingStore] = [*stores]
    assert len(narrow) == len(comparing) == 4


def test_what_lacks_a_call_is_none() -> None:
    class Small:
        def set(self, key: str, value: str) -> None: ...

    assert not isinstance(Small(), Store)


def test_every_name_is_there() -> None:
    assert set(holdfast.store.__all__) == set(holdfast.store._HOMES)
    for name in holdfast.store.__all__:
        assert getattr(holdfast.store, name).__name__ == name
    assert not hasattr(holdfast.store, "nothing")


def test_a_store_is_loaded_when_it_is_asked_for() -> None:
    program = (
        "import sys, holdfast.store\n"
        "assert [one for one in sys.modules if one.startswith('holdfast.store.')] == []\n"
        "from holdfast.store import MemoryStore\n"
        "found = [one for one in sys.modules if one.startswith('holdfast.store.')]\n"
        "assert found == ['holdfast.store.memory'], found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
