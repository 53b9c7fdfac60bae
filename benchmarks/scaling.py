"""Rows about one coordinator with thousands of agents or hostile connections, and about the simulator;
Holdfast only.

`workers/fleet.py`, `workers/connection_flood.py` and `workers/simulating.py` do the work, each in a process of
its own.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.figures import NEVER
from benchmarks.launching import BenchmarkError

if TYPE_CHECKING:
    from benchmarks.launching import Lab, Samples

FEW, MANY = 1_000, 10_000
FLEET_S_MAX = 120.0
SIMULATED_NODES, SIMULATED_MINUTES, SEEDS = 32, 10, 5
SIMULATION_S_MAX = 120.0
ATTACKERS, ATTEMPTS = 4_500, 5
FLOOD_S_MAX = 120.0
CONNECT_S_MAX = 13.0  # The time limit of an agent's connection and handshake.


def measure_agents(lab: Lab, _: str) -> Samples:
    """A round of 1,000 agents and one of 10,000, and restarts that reach all of them."""
    few, many = fleet(lab, FEW), fleet(lab, MANY)
    restarted_few, restarted_many = (statistics.median(one["restarts_s"]) for one in (few, many))
    times = MANY / FEW
    return {
        "formed": [few["formed_s"]],
        "restarted": [restarted_few],
        "formed_many": [many["formed_s"]],
        "restarted_many": [restarted_many],
        "cpu_many": [many["formed_cpu_s"]],
        "formed_growth": [many["formed_s"] / times / few["formed_s"]],
        "restarted_growth": [restarted_many / times / restarted_few],
    }


def measure_connection_flood(lab: Lab, _: str) -> Samples:
    """Measure how long an agent takes to join while strangers hold connections of three kinds."""
    samples: Samples = {}
    for kind in ("silent", "byte", "hello"):
        found = lab.figures_of("connection_flood.py", (kind, ATTACKERS, ATTEMPTS), FLOOD_S_MAX)
        samples[kind] = [NEVER if took_s is None else took_s for took_s in found["in_s"]]
    return samples


def measure_simulator(lab: Lab, _: str) -> Samples:
    """Steps of the simulator in a second of CPU time, all invariants checked."""
    samples: Samples = {}
    for name, profile in (("steps", "calm"), ("rough", "everything")):
        words = (SIMULATED_NODES, SIMULATED_MINUTES, SEEDS, profile)
        found = lab.figures_of("simulating.py", words, SIMULATION_S_MAX)
        samples[name] = [found["steps"] / found["cpu_s"]]
    return samples


def fleet(lab: Lab, count: int, *more: object) -> dict[str, Any]:
    """Return the figures of a fleet of agents; `more` are further arguments of its program."""
    found = lab.figures_of("fleet.py", (count, int(FLEET_S_MAX), *more), FLEET_S_MAX * 2)
    if found is None:
        raise BenchmarkError(
            f"{count} agents did not complete a round and restarts within {FLEET_S_MAX:g} s"
        )
    result: dict[str, Any] = found
    return result
