"""The default name of a job on one node."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest

from holdfast.launcher import job_name
from holdfast.launcher.job_name import label_of, reserved_job_name


@pytest.mark.parametrize(
    ("program", "label"),
    [
        ("train.py", "train"),
        ("/home/ann/src/train.v2.py", "train-v2"),
        ("package.sub.train", "train"),
        ("./bench.sh", "bench"),
        ("python3.11", "python3-11"),
        ("<lambda>", "lambda"),
        ("caf\u00e9 ; rm.py", "caf----rm"),
        ("", "job"),
        ("x" * 100, "x" * job_name.LABEL_CHARS_MAX),
    ],
)
def test_label_names_the_program(program: str, label: str) -> None:
    assert label_of(program) == label


def test_running_jobs_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "1142")
    with ExitStack() as jobs:

        def begin() -> str:
            return jobs.enter_context(reserved_job_name("test_job_name.py"))

        assert [begin(), begin()] == ["test_job_name-1142", "test_job_name-1142-2"]
        monkeypatch.setattr(job_name, "TRIES_MAX", 3)
        assert re.fullmatch(r"test_job_name-1142-[0-9a-f]{6}", begin())
    with reserved_job_name("test_job_name.py") as again:
        assert again == "test_job_name-1142"
