"""Simulated jobs of many nodes: real decisions, virtual time, one seed.

`simulate(seed)` runs the machines of `holdfast.core`, those of the coordinator and of every agent, in a
world that loses messages, cuts links, stops and kills processes and lets clocks drift. After each step it
checks every invariant. The same arguments give the same run, so a seed suffices to repeat a failure:
`python -m simulator --seed N --story`.

It uses no processes, sockets or threads; workers are simulated, too.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from holdfast.core.machine import Story
from holdfast.core.values import Value
from simulator.checkers import Checker, Violation
from simulator.faults import PROFILES, Profile
from simulator.world import CHECKERS, DRIVERS, LOG_LINES_MAX, Machines, RunLog, World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "CHECKERS",
    "DRIVERS",
    "PROFILES",
    "Checker",
    "Machines",
    "Profile",
    "Result",
    "Violation",
    "World",
    "mixed",
    "simulate",
]

NODES = 8
MINUTES = 2.0
MANY_NODES = (32, 64)
FEW_IN_A_ROW = 20  # One in this many runs of each profile has many nodes.
SLICE_S = 10.0  # Virtual seconds between two calls of `progress`.


class Result(Value):
    """The result of a run."""

    seed: int
    profile: str
    nodes: int
    minutes: float
    driver: str
    violation: str
    """The violation; empty if there is none."""
    invariant: str
    """The checker that detected it, or the location of the error that a machine raised."""
    seconds: float
    """The virtual time at the end."""
    steps: int
    """The number of events that processes handled: messages, timers, events of workers and links."""
    digest: int
    agents: int
    coordinators: int
    rounds: int
    story: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that repeats this run."""
        driver = "" if self.driver == "coordinator" else f" --driver {self.driver}"
        return (
            f"python -m simulator --seed {self.seed} --profile {self.profile} --nodes {self.nodes} "
            f"--minutes {self.minutes:g}{driver} --story"
        )


def simulate(
    seed: int,
    *,
    nodes: int = NODES,
    minutes: float = MINUTES,
    profile: str = "everything",
    driver: str = "coordinator",
    machines: Machines | None = None,
    checkers: Sequence[type[Checker]] = CHECKERS,
    complete_story: bool = False,
    progress: Callable[[World], None] | None = None,
) -> Result:
    """Run one job, or several one after another, and return the result, with the story of a failure.

    `minutes` is virtual time, including the quiet time at the end. `driver` is one of `DRIVERS`. `machines`
    are the machines under test, and `checkers` the invariants to check.
    """
    log = RunLog(lines_max=None if complete_story else LOG_LINES_MAX)
    world = World(
        seed,
        nodes=nodes,
        seconds=minutes * 60.0,
        profile=PROFILES[profile],
        machines=machines or Machines(),
        log=log,
        checkers=checkers,
        driver=driver,
    )
    violation = invariant = ""
    collects = gc.isenabled()
    gc.disable()  # A world has hundreds of thousands of small objects that live until its end.
    Story.sink = world.record
    try:
        world.begin()
        while world.run(world.now + SLICE_S):
            if progress is not None:
                progress(world)
    except Violation as error:
        violation, invariant = error.what, error.invariant
        log.note(world.now, "VIOLATION", f"{invariant}: {violation}".replace("{", "{{"))
    except Exception as error:  # noqa: BLE001 (any error of a machine is a finding)
        violation, invariant = f"{type(error).__name__}: {error}", _where(error)
        log.note(world.now, "ERROR", f"{invariant}: {violation}".replace("{", "{{"))
    Story.sink = None
    if collects:
        gc.enable()
    return Result(
        seed=seed,
        profile=profile,
        nodes=nodes,
        minutes=minutes,
        driver=driver,
        violation=violation,
        invariant=invariant,
        seconds=world.now,
        steps=world.steps,
        digest=world.digest,
        agents=world.agents_started,
        coordinators=world.coordinators_started,
        rounds=len(world.ledger.rounds),
        story=tuple(log.lines()) if complete_story or violation else (),
    )


def mixed(seed: int) -> tuple[str, int]:
    """Return a profile and a number of nodes for a seed, so that consecutive seeds cover all profiles."""
    profiles = list(PROFILES)
    turn = seed // len(profiles)
    nodes = MANY_NODES[turn // FEW_IN_A_ROW % len(MANY_NODES)]
    if turn % FEW_IN_A_ROW:
        nodes = 3 + turn % 10
    return profiles[seed % len(profiles)], nodes


def _where(error: Exception) -> str:
    """Return the location in the code at which an error was raised."""
    trace = error.__traceback__
    where = type(error).__name__
    while trace is not None:
        code = trace.tb_frame.f_code
        where = f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return where
