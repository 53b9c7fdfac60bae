from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdfast.scripting.process_states import is_uninterruptible_state, read_proc_state


def test_the_state_of_a_process() -> None:
    assert read_proc_state(os.getpid()) == "R"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    assert read_proc_state(gone.pid) is None


@pytest.mark.parametrize(("state", "is_it"), [("D", True), ("D+", True), ("S", False), ("", False)])
def test_uninterruptible_sleep(state: str, is_it: bool) -> None:
    assert is_uninterruptible_state(state) is is_it


def test_a_process_that_is_gone_does_not_sleep() -> None:
    assert not is_uninterruptible_state(None)
