"""The same arguments give the same run, step by step, for every hash seed of Python."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from simulator import DRIVERS, PROFILES, simulate

PROGRAM = """
import hashlib, sys
from simulator import DRIVERS, simulate
for profile in sys.argv[1:]:
    for driver in DRIVERS:
        run = simulate(5, nodes=6, minutes=1, profile=profile, driver=driver, complete_story=True)
        story = hashlib.sha256("\\n".join(run.story).encode()).hexdigest()
        print(profile, run.steps, run.digest, story)
"""


def traces(hash_seed: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *PROFILES],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_hash_seed_does_not_change_a_run() -> None:
    first = traces("1")
    assert first == traces("4242")
    assert len(set(first.splitlines())) == len(DRIVERS) * len(PROFILES)


@pytest.mark.parametrize("profile", PROFILES)
def test_different_seeds_give_different_runs(profile: str) -> None:
    one, same, other = (simulate(seed, nodes=4, profile=profile) for seed in (3, 3, 4))
    assert (one.digest, one.steps) == (same.digest, same.steps)
    assert one.digest != other.digest
