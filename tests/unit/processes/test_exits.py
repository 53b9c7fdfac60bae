"""How workers ended, in words and as results."""

from __future__ import annotations

import errno
import os

import pytest

from holdfast.processes.failures import exits


def test_trouble_in_words() -> None:
    assert exits.start_error(None) == ""
    assert exits.start_error((2, "x")) == f"could not be started: x: {os.strerror(2)}"
    assert exits.start_error((0, "x: y")) == "could not be started: x: y"


def test_a_new_start_may_mend_a_shortage_and_nothing_else() -> None:
    assert exits.is_retryable(None)
    assert all(exits.is_retryable((number, "x")) for number in (errno.EAGAIN, errno.ETXTBSY))
    assert not any(exits.is_retryable((number, "x")) for number in (0, errno.ENOENT, errno.EACCES))


@pytest.mark.parametrize(
    ("after_stop", "stray_signal", "consequence"),
    [(False, False, False), (True, False, True), (True, True, False)],
)
def test_a_consequence_is_what_the_stop_has_done(
    after_stop: bool, stray_signal: bool, consequence: bool
) -> None:
    ended = exits.WorkerExit(0, 42, -11, "", 0, 2, after_stop, True, stray_signal)  # noqa: FBT003
    assert exits.failure_of(ended, stop_began_ns=1, error_file="").consequence == consequence
