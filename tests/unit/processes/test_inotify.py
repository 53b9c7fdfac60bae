from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.logs.follower import Inotify

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def inotify() -> Iterator[Inotify]:
    instance = Inotify()
    yield instance
    instance.close()
    instance.close()
    assert instance.fd == -1


def test_a_written_file_is_named_by_its_watch(inotify: Inotify, tmp_path: Path) -> None:
    watches = []
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"")
        watches.append(inotify.watch(str(tmp_path / name)))
    assert inotify.changed() == set()
    for name in ("a", "c"):
        with open(tmp_path / name, "ab", buffering=0) as file:
            file.writelines([b"x"] * 10)
    assert select.select([inotify.fd], [], [], 0)[0] == [inotify.fd]
    assert inotify.changed() == {watches[0], watches[2]}
    assert inotify.changed() == set()


def test_reading_is_no_change_but_truncating_is(inotify: Inotify, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    watch = inotify.watch(str(path))
    path.read_bytes()
    assert inotify.changed() == set()
    os.truncate(path, 0)
    assert inotify.changed() == {watch}


def test_one_file_has_one_watch(inotify: Inotify, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    assert inotify.watch(str(path)) == inotify.watch(str(path))


def test_an_unwatched_file_is_silent(inotify: Inotify, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    watch = inotify.watch(str(path))
    inotify.unwatch(watch)
    inotify.unwatch(watch)
    inotify.changed()
    path.write_bytes(b"more")
    assert inotify.changed() == set()


def test_a_missing_file_is_an_error_that_names_it(inotify: Inotify, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        inotify.watch(str(tmp_path / "missing"))


def test_the_descriptor_is_not_inherited(inotify: Inotify) -> None:
    assert not os.get_inheritable(inotify.fd)
