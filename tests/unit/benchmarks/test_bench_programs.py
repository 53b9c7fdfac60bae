"""The programs that benchmark Holdfast's own parts, run with small sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parents[3] / "benchmarks" / "workers"
TIMEOUT_S = 60


def run(program: str, *words: object) -> Any:
    command = [sys.executable, str(PROGRAMS / program), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_fleet_forms_and_learns_of_every_restart() -> None:
    found = run("fleet.py", 20, 30, 0)
    assert found["formed_s"] > 0
    assert [took_s > 0 for took_s in found["restarts_s"]] == [True] * 3


def test_fleet_that_times_out_reports_no_figures() -> None:
    assert run("fleet.py", 20, 0, 0) is None


def test_fleet_can_be_watched() -> None:
    found = run("watching.py", 10, 2, 0.2, 0.1)
    assert found["status_s"] > 0
    assert found["core_watched"] > 0


def test_top_program_shows_a_job() -> None:
    assert run("viewing.py", 2, 2, 0.05, 3)["core"] > 0


def test_many_handlers_join_one_round() -> None:
    found = run("join_handlers.py", "holdfast", 5, 2, 30)
    assert (found["done"], found["of"]) == (5, 5)
    assert found["took_s"] > 0


@pytest.mark.parametrize("kind", ["silent", "byte", "hello"])
def test_agent_joins_while_strangers_hold_connections(kind: str) -> None:
    found = run("connection_flood.py", kind, 300, 2)
    assert None not in found["in_s"]
    assert len(found["in_s"]) == 2


def test_simulator_program_counts_its_steps() -> None:
    found = run("simulating.py", 4, 1, 1, "everything")
    assert found["steps"] > 100
    assert found["cpu_s"] > 0


@pytest.mark.torch
def test_torch_clients_use_the_store() -> None:
    assert run("store_load.py", "holdfast", 2, 0.2)["per_s"] > 0
