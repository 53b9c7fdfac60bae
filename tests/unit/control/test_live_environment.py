"""The environment of another process, also what it set itself after its start."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.control import process_facts
from holdfast.control.process_facts import current_environment, initial_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

CHANGING = """
import os, sys
os.environ["LATER"] = "\\u00e9 = 1"
os.environ["LONG"] = "x" * 100_000
del os.environ["FIRST"]
for number in range(300):
    os.environ[f"MORE_{number}"] = str(number)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def changed() -> Iterator[int]:
    env = {**os.environ, "FIRST": "1", "STAYS": "2"}
    with subprocess.Popen(
        [sys.executable, "-c", CHANGING], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid


def test_what_it_was_started_with(changed: int) -> None:
    env = initial_environment(changed)
    assert (env["FIRST"], env["STAYS"]) == ("1", "2")
    assert "LATER" not in env


def test_what_it_has_now(changed: int) -> None:
    env = current_environment(changed)
    assert "FIRST" not in env
    assert (env["STAYS"], env["LATER"], env["MORE_299"]) == ("2", "é = 1", "299")
    assert len(env["LONG"]) == process_facts.VALUE_BYTES_MAX - len("LONG=")


def test_another_program_or_none_has_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert initial_environment(ended.pid) == {}
    assert current_environment(ended.pid) == {}
    monkeypatch.setattr(process_facts, "_place_of_environ", lambda: (("00:00", "12345"), 0))
    assert current_environment(os.getpid()) == {}
    monkeypatch.setattr(process_facts, "_place_of_environ", lambda: None)
    assert current_environment(os.getpid()) == {}


def test_a_wrong_place_is_no_trouble(monkeypatch: pytest.MonkeyPatch, changed: int) -> None:
    here = process_facts._place_of_environ()
    assert here is not None
    for offset in (0, 8, 1 << 46, -(1 << 62)):
        monkeypatch.setattr(process_facts, "_place_of_environ", lambda at=offset: (here[0], at))
        assert "STAYS" not in current_environment(changed)
