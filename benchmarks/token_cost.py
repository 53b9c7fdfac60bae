"""The row about the cost of a token: it compares jobs with a token and without. Holdfast only.

Both take turns in one run, and the figure is the ratio of their medians. Jobs of two agents are real and
have workers; the thousand agents are those of `workers/fleet.py`.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from benchmarks.etcd_work import AS_ON_A_NETWORK, form_s, restart_s
from benchmarks.scaling import FEW, fleet

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.launching import Lab, Samples

STARTS, JOBS, FLEETS = 15, 3, 10
TOKEN = "of-a-fleet-0123456789abcdef"
FLEET_PAUSE_S = 0.2


def measure_token_cost(lab: Lab, _: str) -> Samples:
    """A start, a restart, and a round of 1,000 agents: with a token / without."""
    starts = _in_turns(STARTS, lambda sealed: [form_s(lab, 2, _flags(sealed=sealed))])
    restarts = _in_turns(JOBS, lambda sealed: restart_s(lab, 2, _flags(sealed=sealed)))
    rounds: dict[bool, list[float]] = {False: [], True: []}

    def restart_times(sealed: bool) -> list[float]:
        found = fleet(lab, FEW, FLEET_PAUSE_S, *([TOKEN] if sealed else []))
        rounds[sealed].append(found["formed_s"])
        return list(found["restarts_s"])

    all_restart_times = _in_turns(FLEETS, restart_times)
    return {
        "start": [_ratio(starts)],
        "restart": [_ratio(restarts)],
        "round": [_ratio(rounds)],
        "restarted": [_ratio(all_restart_times)],
    }


def _flags(*, sealed: bool) -> tuple[str, ...]:
    return AS_ON_A_NETWORK if sealed else ()


def _in_turns(times: int, measure: Callable[[bool], list[float]]) -> dict[bool, list[float]]:
    samples: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(times):
        for sealed in (turn % 2 == 0, turn % 2 == 1):
            samples[sealed] += measure(sealed)
    return samples


def _ratio(samples: dict[bool, list[float]]) -> float:
    return statistics.median(samples[True]) / statistics.median(samples[False])
