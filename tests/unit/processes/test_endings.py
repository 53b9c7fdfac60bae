"""How workers ended, in words and as results."""

from __future__ import annotations

import os

from holdfast.core import stopping
from holdfast.processes import endings
from holdfast.processes.endings import RunProcsResult


def test_trouble_in_words() -> None:
    assert endings.start_trouble(None) == ""
    assert endings.start_trouble((2, "x")) == f"could not be started: x: {os.strerror(2)}"
    assert endings.start_trouble((0, "x: y")) == "could not be started: x: y"


def test_the_state_of_a_process() -> None:
    assert endings.process_state(os.getpid()) == "R"
    assert endings.process_state(1 << 30) == ""
    assert "uninterruptible" not in endings.unkillable(os.getpid(), stopping.REAP_S)


def test_results_are_failed_by_any_failure() -> None:
    assert not RunProcsResult().is_failed()
    assert RunProcsResult(failures={0: None}).is_failed()  # type: ignore[dict-item]
    assert RunProcsResult().failures is not RunProcsResult().failures
