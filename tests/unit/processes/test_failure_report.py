"""Failures that nodes send to each other arrive unchanged, except that long texts are cut."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.processes.failures import failure_report
from holdfast.processes.failures.error_file import error_file_content
from holdfast.processes.failures.failure import ChildFailedError, ProcessFailure, exit_status
from holdfast.processes.failures.failure_report import BadReport, FailureReport, pack, unpack

if TYPE_CHECKING:
    from pathlib import Path


def make(error: ChildFailedError) -> FailureReport:
    return FailureReport.from_error(
        error, run_id="job-1", generation=2, max_restarts=3, log_dir="/logs"
    )


@pytest.fixture
def error(tmp_path: Path) -> ChildFailedError:
    error_file = tmp_path / "error.json"
    error_file.write_bytes(error_file_content(ValueError("boom")))
    recorded = ProcessFailure(
        1,
        41,
        1,
        str(error_file),
        stderr_tail="noise\n",
        stdout_file="/logs/out",
        stderr_file="/logs/err",
        host="node-1",
    )
    stopped = ProcessFailure(
        0, 40, -15, "", consequence=True, order=1, observed_ns=1_700_000_000_123_456_789
    )
    return ChildFailedError("train.py", {4: stopped, 5: recorded})


def test_packed_report_round_trips(tmp_path: Path, error: ChildFailedError) -> None:
    path = tmp_path / "failure.json"
    made = make(error)
    made.write(str(path))
    assert msgspec.json.decode(path.read_bytes(), type=FailureReport) == made
    assert path.read_text().startswith('{\n  "version": 1,\n  "name": "train.py",\n')
    assert path.read_text().endswith("}\n")
    assert sorted(os.listdir(tmp_path)) == ["error.json", "failure.json"]


def failure(local_rank: int = 0, exitcode: int = 1, **more: object) -> ProcessFailure:
    return ProcessFailure(local_rank, 100 + local_rank, exitcode, "", **more)  # type: ignore[arg-type]


def recorded(folder: Path, callstack: str) -> ProcessFailure:
    file = folder / "error.json"
    message = {
        "message": "ValueError: bad batch",
        "extraInfo": {"py_callstack": callstack, "timestamp": "1700000000"},
    }
    file.write_text(json.dumps({"message": message}))
    return ProcessFailure(1, 77, 1, str(file), host="node-b")


def test_report_text_is_the_same_on_all_nodes(tmp_path: Path) -> None:
    failures = {
        5: recorded(tmp_path, "Traceback (most recent call last):\n  line\nValueError: bad batch"),
        4: failure(exitcode=-15, consequence=True, stopped=True, host="node-b", order=1),
    }
    there = unpack(pack(failures))
    assert list(there) == [5, 4]
    text = str(ChildFailedError("train.py", there))
    for line in str(ChildFailedError("train.py", failures)).splitlines():
        assert line in text.splitlines()
    assert there[5].host == "node-b"
    assert there[5].error_file == failures[5].error_file


def test_exit_status_of_a_raising_stopped_worker_is_the_same_on_all_nodes() -> None:
    failures = {0: failure(exitcode=-15, stopped=True, stderr_tail="ValueError: bad batch\n")}
    here, there = (
        exit_status(ChildFailedError("", one)) for one in (failures, unpack(pack(failures)))
    )
    assert (here, there) == (1, 1)


def test_long_texts_are_truncated() -> None:
    many = {
        rank: failure(rank, order=rank, stderr_tail="x" * 100_000, detail="y" * 10_000)
        for rank in range(200)
    }
    packed = pack(many)
    assert len(packed) <= failure_report.PACKED_BYTES_MAX
    there = unpack(packed)
    assert len(there) == failure_report.OTHERS_MAX + 1
    assert len(there[0].stderr_tail) > 1_000
    assert all(not there[rank].stderr_tail for rank in there if rank)


@given(st.binary(max_size=200))
def test_invalid_report_is_a_one_line_error(garbage: bytes) -> None:
    with pytest.raises(BadReport, match=r"\A[^\n]+\Z"):
        unpack(garbage)


def test_report_without_failures_is_empty() -> None:
    with pytest.raises(BadReport, match="contains no failure"):
        unpack(msgspec.msgpack.encode([]))
