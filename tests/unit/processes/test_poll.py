"""Waiting for descriptors and deadlines, whichever comes first."""

from __future__ import annotations

import os
import time

import pytest

from holdfast.processes import poll


@pytest.mark.parametrize(
    ("first", "second", "least"), [(None, None, None), (1, None, 1), (None, 2, 2), (3, 2, 2)]
)
def test_the_earlier_deadline(
    first: float | None, second: float | None, least: float | None
) -> None:
    assert poll.min_of(first, second) == least


def test_a_readable_descriptor_ends_the_wait() -> None:
    read, write = os.pipe()
    os.write(write, b"x")
    poll.wait_for(None, read)
    poll.wait_for(time.monotonic() + 1000, read)
    os.close(read)
    os.close(write)


def test_a_deadline_ends_the_wait_and_not_before_it() -> None:
    read, write = os.pipe()
    deadline = time.monotonic() + 0.02
    poll.wait_for(deadline, read)
    assert time.monotonic() >= deadline
    poll.wait_for(0.0, read)  # One that has passed.
    os.close(read)
    os.close(write)
