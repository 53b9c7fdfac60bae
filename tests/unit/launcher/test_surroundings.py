from __future__ import annotations

import errno
import os

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.launcher.surroundings import REMEDIES, refusal


@pytest.mark.parametrize("number", REMEDIES)
def test_a_limit_that_was_reached_is_named_with_what_to_do(number: int) -> None:
    told = refusal(OSError(number, os.strerror(number)))
    assert isinstance(told, EnvironmentProblem)
    assert str(told).startswith(f"the workers could not be run: {os.strerror(number)} (")
    assert told.hint == REMEDIES[number]


def test_a_file_is_named_if_there_is_one() -> None:
    told = refusal(OSError(errno.ENOSPC, "No space left on device", "/logs/x"))
    assert told is not None
    assert told.message.endswith(": /logs/x: No space left on device")


@pytest.mark.parametrize("problem", [OSError(errno.ENOENT, "?"), OSError(), OSError("words")])
def test_other_errors_are_not_the_machines(problem: OSError) -> None:
    assert refusal(problem) is None
