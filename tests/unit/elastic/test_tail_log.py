from __future__ import annotations

import io
import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.elastic._impl.tail_log import TailLog, tail_logfile
from holdfast.errors import EnvironmentProblem

if TYPE_CHECKING:
    from pathlib import Path


class SignalingStream(io.StringIO):
    """A stream without a descriptor that signals when a text has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Condition()

    def flush(self) -> None:
        with self.arrived:
            self.arrived.notify_all()

    def wait_for(self, text: str) -> None:
        with self.arrived:
            self.arrived.wait_for(lambda: text in self.getvalue())


def test_lines_of_all_files_arrive_with_the_header_of_their_rank(tmp_path: Path) -> None:
    files = {rank: str(tmp_path / str(rank)) for rank in range(3)}
    dst = SignalingStream()
    tail = TailLog("writer", files, dst, interval_sec=1000).start()
    assert not tail.stopped()
    for rank, file in files.items():
        with open(file, "w") as out:
            out.writelines(f"{rank}-{number}\n" for number in range(50))
    dst.wait_for("[writer1]:1-49\n")
    tail.stop()
    assert tail.stopped()
    lines = dst.getvalue().splitlines()
    for rank in files:
        header = f"[writer{rank}]:"
        expected = [f"{header}{rank}-{number}" for number in range(50)]
        assert [line for line in lines if line.startswith(header)] == expected
    assert len(lines) == 150


def test_stop_works_repeatedly_and_before_start(tmp_path: Path) -> None:
    tail = TailLog("w", {0: str(tmp_path / "log")}, io.StringIO())
    tail.stop()
    tail.stop()
    tail.start()
    assert not (tmp_path / "log").exists()


def test_failed_start_leaves_nothing_behind(tmp_path: Path) -> None:
    files = {0: str(tmp_path / "log"), 1: str(tmp_path / "missing" / "log")}
    tail = TailLog("w", files, io.StringIO())
    with pytest.raises(EnvironmentProblem, match="missing"):
        tail.start()
    assert tail.stopped()


def test_one_file_can_be_followed_until_an_event(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\n")
    dst, finished = SignalingStream(), threading.Event()
    thread = threading.Thread(
        target=tail_logfile, args=("[h]", str(tmp_path / "log"), dst, finished, 1000)
    )
    thread.start()
    dst.wait_for("[h]one\n")
    with open(tmp_path / "log", "a") as out:
        out.write("two\nno")
    dst.wait_for("[h]two\n")
    finished.set()
    thread.join()
    assert dst.getvalue() == "[h]one\n[h]two\n[h]no\n"
