from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import EnvironmentProblem
from holdfast.store import shared_folder
from holdfast.store.shared_folder import SharedFolder, file_name

if TYPE_CHECKING:
    from pathlib import Path


def test_files_are_written_read_and_removed(tmp_path: Path) -> None:
    folder = SharedFolder(str(tmp_path / "new"))
    assert folder.read("a") is None
    folder.write("a", b"1")
    assert (folder.read("a"), folder.exists("a"), folder.names()) == (b"1", True, ["a"])
    assert folder.remove("a")
    assert not folder.remove("a")
    assert folder.read_pair("pair") == (0, 0)
    folder.write_pair("pair", -1, 2)
    assert folder.read_pair("pair") == (-1, 2)


def test_the_last_look_is_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    folder = SharedFolder(str(tmp_path))
    looks = [(clock[0], is_last) for is_last in folder.looks(0.01)]
    assert [is_last for _, is_last in looks] == [*[False] * (len(looks) - 1), True]
    assert looks[0] == (0, False)
    assert looks[-1][0] == pytest.approx(0.01)
    assert list(folder.looks(0)) == [True]


def test_a_folder_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        EnvironmentProblem, match=r"shared folder .* cannot be used: Not a directory"
    ):
        SharedFolder(str(tmp_path / "file" / "store"))


def test_a_stale_file_is_read_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SharedFolder(str(tmp_path))
    folder.write("key", b"value")
    times = [3]

    def stale_at_first(path: str, mode: str) -> object:
        times[0] -= 1
        if times[0] >= 0:
            raise OSError(errno.ESTALE, "stale")
        return open(path, mode)

    monkeypatch.setattr(shared_folder, "open", stale_at_first, raising=False)
    assert folder.read("key") == b"value"
    times[0] = 10**6
    with pytest.raises(OSError, match="stale"):
        folder.read("key")


@given(st.text(max_size=300), st.text(max_size=300))
def test_every_key_has_a_file_name_of_its_own(one: str, other: str) -> None:
    for key in (one, other):
        name = file_name(key)
        assert "/" not in name
        assert not name.startswith(".")
        assert len(name.encode()) <= 255
    assert (file_name(one) == file_name(other)) == (one == other)
