from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.elastic._impl.redirects import get_libc, redirect, redirect_stderr, redirect_stdout
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def test_all_kinds_of_writes_reach_the_file_in_order(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.log"
    path.write_text("old content that is longer than the new one" * 10)
    libc = get_libc()
    print("before")
    libc.printf(b"c before\n")
    with redirect_stdout(str(path)):
        print("python")
        sys.stdout.flush()
        libc.printf(b"c library\n")
        libc.fflush(None)
        os.write(1, b"descriptor\n")
        subprocess.run([sys.executable, "-c", "print('child')"], check=True)
        print("last")
    print("after")
    libc.printf(b"c after\n")
    libc.fflush(None)
    assert path.read_text().splitlines() == ["python", "c library", "descriptor", "child", "last"]
    shown = capfd.readouterr().out.splitlines()
    assert set(shown) == {"before", "c before", "after", "c after"}


def test_exception_restores_the_streams(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        print("inside", file=sys.stderr)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), redirect_stderr(str(tmp_path / "err")):
        fail()
    print("outside", file=sys.stderr)
    assert (tmp_path / "err").read_text() == "inside\n"
    assert capfd.readouterr().err == "outside\n"


def test_stream_without_descriptor_does_not_prevent_redirection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stdout", stream)
        with redirect_stdout(str(tmp_path / "out")):
            os.write(1, b"descriptor\n")
        assert (tmp_path / "out").read_text() == "descriptor\n"


def test_only_the_two_streams_can_be_redirected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'stdin'"), redirect("stdin", str(tmp_path / "x")):
        pass
    assert not (tmp_path / "x").exists()
