from __future__ import annotations

import json
import os
import pickle
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.core.blame import KILLED_NOTICE_NS_MAX
from holdfast.processes.failures.failure import (
    ChildFailedError,
    ProcessFailure,
    exit_status,
    failure_of,
)
from holdfast.processes.workers.group import WorkerExit

if TYPE_CHECKING:
    from pathlib import Path

S = 1_000_000_000


def failure(path: Path | str = "", exitcode: int = 1, **known: Any) -> ProcessFailure:
    return ProcessFailure(0, 42, exitcode, str(path), tolerant=True, **known)


def recorded(folder: Path, extra: dict[str, Any], **known: Any) -> ProcessFailure:
    """Return a failure whose error file has `extra` as its extraInfo."""
    path = folder / f"error_{len(os.listdir(folder))}.json"
    inner = {"message": "ValueError: boom", "extraInfo": extra}
    path.write_text(json.dumps({"message": inner}))
    return failure(path, **known)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def some_of(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return JSON_VALUES | st.fixed_dictionaries({}, optional=values)


EXTRA = some_of(py_callstack=JSON_VALUES, timestamp=JSON_VALUES, timestamp_ns=JSON_VALUES)
MESSAGE = some_of(message=JSON_VALUES, extraInfo=EXTRA)
ODD_FILES = some_of(timestamp=JSON_VALUES, message=MESSAGE).map(lambda v: json.dumps(v).encode())


@given(content=st.binary() | ODD_FILES, stderr=st.text(), exitcode=st.integers(-70, 300))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
def test_no_error_file_and_no_stderr_can_break_the_report(
    tmp_path: Path, content: bytes, stderr: str, exitcode: int
) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)
    known = ChildFailedError("x", {0: failure(path, exitcode, stderr_tail=stderr), 1: failure()})
    assert "Root Cause (first observed failure):" in str(known)
    assert 1 <= exit_status(known) <= 255


def first_of(*failures: ProcessFailure) -> int:
    return ChildFailedError("x", dict(enumerate(failures))).get_first_failure()[0]


def test_precise_times_in_error_files_outweigh_the_order_of_exits(tmp_path: Path) -> None:
    now = time.time_ns()
    late = recorded(tmp_path, {"timestamp_ns": str(now - 5)}, order=0)
    early = recorded(tmp_path, {"timestamp_ns": str(now - 6)}, order=1)
    assert first_of(late, early) == 1


def test_consequence_is_first_only_among_consequences(tmp_path: Path) -> None:
    victim = failure(exitcode=-15, consequence=True, order=0, observed_ns=1)
    assert first_of(victim, failure(order=1, observed_ns=2)) == 1
    assert first_of(failure(consequence=True, order=1), victim) == 1


@pytest.mark.parametrize(
    ("lag_ns", "exitcode", "first"),
    [
        (KILLED_NOTICE_NS_MAX, -signal.SIGKILL, "killed"),
        (KILLED_NOTICE_NS_MAX, -signal.SIGABRT, "killed"),
        (KILLED_NOTICE_NS_MAX, -signal.SIGTERM, "peer"),
        (KILLED_NOTICE_NS_MAX + 1, -signal.SIGKILL, "peer"),
    ],
)
def test_killed_worker_is_blamed_before_peers_that_record_first(
    tmp_path: Path, lag_ns: int, exitcode: int, first: str
) -> None:
    now = time.time_ns()
    peer = recorded(tmp_path, {"timestamp_ns": str(now - lag_ns)}, order=1)
    killed = failure(exitcode=exitcode, order=0, observed_ns=now)
    assert first_of(peer, killed) == ["peer", "killed"].index(first)


@pytest.mark.parametrize(
    ("lag_ns", "exitcode", "first"),
    [
        (KILLED_NOTICE_NS_MAX, -signal.SIGSEGV, 2),
        (KILLED_NOTICE_NS_MAX, -signal.SIGTERM, 0),
        (KILLED_NOTICE_NS_MAX, 3, 0),
        (KILLED_NOTICE_NS_MAX + 1, -signal.SIGSEGV, 0),
    ],
)
def test_crash_is_blamed_before_peers_that_exit_first(
    lag_ns: int, exitcode: int, first: int
) -> None:
    """Native code notices the closed connection at once, but a core dump takes time."""
    now = time.time_ns()
    peers = [failure(exitcode=4, order=order, observed_ns=now - lag_ns) for order in (0, 1)]
    assert first_of(*peers, failure(exitcode=exitcode, order=2, observed_ns=now)) == first


def test_worker_killed_after_another_exit_is_not_first(tmp_path: Path) -> None:
    now = time.time_ns()
    peer = recorded(tmp_path, {"timestamp_ns": str(now - 5)}, order=0)
    assert first_of(peer, failure(exitcode=-9, order=1, observed_ns=now)) == 0


def test_failure_before_the_stop_is_not_a_consequence(tmp_path: Path) -> None:
    stop_ns = time.time_ns()
    extra = {"timestamp_ns": str(stop_ns - S)}
    assert not recorded(tmp_path, extra, observed_ns=stop_ns + S).failed_after(stop_ns)
    assert failure(observed_ns=stop_ns + S).failed_after(stop_ns)


@pytest.mark.parametrize(
    ("exitcode", "status"), [(7, 7), (-9, 137), (-15, 143), (0, 1), (256, 1), (255, 255)]
)
def test_exit_status_is_that_of_the_first_failure_and_never_0(exitcode: int, status: int) -> None:
    error = ChildFailedError("x", {0: failure(exitcode=3, order=1), 1: failure(exitcode=exitcode)})
    assert exit_status(error) == status


def test_child_failed_error_survives_pickling(tmp_path: Path) -> None:
    error = ChildFailedError("train.py", {3: recorded(tmp_path, {}, stderr_tail="noise")})
    error.log_dir = "/logs"
    again = pickle.loads(pickle.dumps(error))
    assert (again.name, again.failures, str(again)) == (error.name, error.failures, str(error))


@pytest.mark.parametrize(
    ("content", "problem"), [("{", ValueError), ("[]", ValueError), ('{"other": 1}', KeyError)]
)
def test_users_process_failure_raises_on_a_bad_error_file(
    tmp_path: Path, content: str, problem: type[Exception]
) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    with pytest.raises(problem):
        ProcessFailure(0, 42, 1, str(path))
    assert "could not be read" in failure(path).detail


@pytest.mark.parametrize(
    ("after_stop", "stray_signal", "consequence"),
    [(False, False, False), (True, False, True), (True, True, False)],
)
def test_only_the_signal_of_the_stop_makes_a_consequence(
    after_stop: bool, stray_signal: bool, consequence: bool
) -> None:
    ended = WorkerExit(0, 42, -11, "", 0, 2, after_stop, True, stray_signal)  # noqa: FBT003
    failure = failure_of(ended, stop_began_ns=1, error_file="")
    assert (failure.consequence, failure.stopped) == (consequence, consequence)
