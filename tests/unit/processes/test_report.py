from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from holdfast.processes.failures import report
from holdfast.processes.failures.error_file import error_file_content
from holdfast.processes.failures.failure import ChildFailedError, ProcessFailure
from holdfast.processes.failures.report import FailedWorker, FailureReport

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


def test_what_is_written_can_be_read_back(tmp_path: Path, error: ChildFailedError) -> None:
    path = tmp_path / "failure.json"
    made = make(error)
    made.write(str(path))
    assert msgspec.json.decode(path.read_bytes(), type=FailureReport) == made
    assert path.read_text().startswith('{\n  "version": 1,\n  "name": "train.py",\n')
    assert path.read_text().endswith("}\n")
    assert sorted(os.listdir(tmp_path)) == ["error.json", "failure.json"]


def test_the_first_failure_has_everything(error: ChildFailedError) -> None:
    recorded = error.failures[5]
    first = make(error).first
    assert (first.rank, first.local_rank, first.pid, first.host) == (5, 1, 41, "node-1")
    assert (first.exitcode, first.signal, first.ending) == (1, "", "exit code 1")
    assert (first.message, first.stderr_tail) == ("ValueError: boom", "noise\n")
    assert (first.stdout_file, first.stderr_file) == ("/logs/out", "/logs/err")
    assert first.error_file == recorded.error_file
    assert first.traceback == recorded.traceback_text() != ""
    assert first.time_ns == recorded.recorded_ns
    assert not first.consequence


def test_texts_that_are_no_unicode_can_be_written(tmp_path: Path) -> None:
    failure = ProcessFailure(0, 40, 1, "", stderr_tail="caf\udce9", stdout_file="/logs/\udcff")
    path = tmp_path / "failure.json"
    make(ChildFailedError("tr\udce4in.py", {0: failure})).write(str(path))
    data = json.loads(path.read_bytes())
    assert data["name"] == "tr\\udce4in.py"
    assert data["first"]["stderr_tail"] == "caf\\udce9"


def test_the_docstring_tells_of_every_key() -> None:
    told = re.findall(r"`(\w+)`", report.__doc__ or "")
    keys = [*FailureReport.__struct_fields__, *FailedWorker.__struct_fields__]
    assert sorted(key for key in keys if key not in told) == []
