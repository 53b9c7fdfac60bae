"""Machines of `--ha` without nodes, under faults.

A machine is lost with its data and returns empty, only its etcd exits, or it freezes; links are cut in one
direction or both; messages are lost or late.
"""

from __future__ import annotations

import heapq
import itertools
import random
from typing import TYPE_CHECKING, Any

from simulator.cluster_machines import SimMembers

if TYPE_CHECKING:
    from collections.abc import Callable


class World(SimMembers):
    """All machines, with virtual time."""

    def __init__(self, seed: int, size: int, **broken: Any) -> None:
        self._time = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        names = [f"m{number}" for number in range(size)]
        rng = random.Random(seed)
        super().__init__(names, rng, clock=lambda: self._time, after=self._later, **broken)

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self._time, _, action = heapq.heappop(self._queue)
            action()
        self._time = until

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self._time + delay_s, next(self._order), action))


def run_faults(world: World, until: float) -> None:
    """Start all machines in random order, and inject faults until a time."""
    draw = world.random
    names = [*world.machines]
    for name in names:
        world.after(draw.uniform(0, 5), lambda name=name: world.start(name))  # type: ignore[misc]

    def fault() -> None:
        if world.now > until:
            return
        name, other = draw.choice(names), draw.choice(names)
        match draw.randrange(7):
            case 0 | 1:
                world.lose(name)
                world.after(draw.uniform(0.1, 20), lambda: world.start(name))
            case 2:
                world.end_etcd(name)
            case 3:
                world.freeze(name, draw.uniform(0.1, 30))
            case 4:
                world.cut.add((name, other))
            case 5:
                world.cut |= {(name, one) for one in names} - {(name, name)}
            case 6:
                world.cut.clear()
        world.after(draw.expovariate(1 / 6), fault)

    world.after(draw.uniform(0, 10), fault)
    world.run(until)
