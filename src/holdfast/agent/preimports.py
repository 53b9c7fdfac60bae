"""Imports what a failure or a restart needs, in small steps, while the workers run.

To start fast, the agent imports little. It imports the rest later, because the installation may be upgraded or
its file system may become unavailable while the job runs. Functions in new interpreters (`spawn`,
`forkserver`) need the files in any case.

At that time the workers often import their own modules and use every CPU. An agent that gets little CPU must
spend it on its heartbeats and its supervision. So it imports one module at a time, and pauses while it has to
wait for a CPU.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.processes.keeper.keeper_client import Keeper

if TYPE_CHECKING:
    from collections.abc import Callable

PREIMPORTED = (
    "traceback",
    "holdfast.core.stopping",
    "holdfast.processes.stacks",
    "holdfast.numa.visible_devices",
    "holdfast.observe.events.event_handlers",
    "holdfast.observe.events.event_recorder",
    "holdfast.observe.safe_handler",
    "holdfast.observe.timeline",
    "holdfast.processes.failures.failure",
    "holdfast.processes.failures.failure_report",
    "holdfast.processes.failures.report_text",
    "holdfast.processes.failures.tracebacks",
    "holdfast.processes.logs.follower",
    "holdfast.store.collectives",
    "holdfast.store.store_errors",
    "holdfast.store.tcp.embedded",
    "holdfast.store.tcp.store_server",
    "holdfast.timers.reaper",
)
# If the module on the left is loaded, the agent also imports those on the right.
PREIMPORTED_WITH = {
    "holdfast.rendezvous.membership_handler": (
        "holdfast.store.tcp.forwarding",
        "holdfast.store.tcp.attestation",
    ),
}
BUSY_PAUSE_S = 1.0
"""The pause after a step that had to wait for a CPU."""
WAIT_S_MAX = 0.01
"""The time that a step may wait, in addition to the time that it computes."""


class Preimports:
    """The imports of one agent. Call `poll` at `due`."""

    def __init__(self) -> None:
        self.due: float | None = None
        """When the next step is due; None before `begin` and after the last step."""
        self._steps: list[Callable[[], object]] | None = None

    def begin(self, now: float) -> None:
        if self._steps is not None:
            return  # An earlier run of this agent began.
        used = [names for first, names in PREIMPORTED_WITH.items() if first in sys.modules]
        modules = [*PREIMPORTED, *(name for names in used for name in names)]
        # Free memory of the start first, so that the imports reuse it.
        self._steps = [
            gc.collect,
            *(lambda name=name: load(name) for name in modules),
            Keeper.remember_program,
        ]
        self._steps.reverse()
        self.due = now

    def poll(self, now: float) -> None:
        """Perform the next step if it is due."""
        if self.due is None or not self._steps or now < self.due:
            return
        began, used = time.monotonic(), time.thread_time()
        try:
            self._steps.pop()()
        except Exception as problem:  # noqa: BLE001 (the workers can run without it)
            console.warning(
                f"failure handling is impaired: {console.describe(problem)} "
                "(was Holdfast reinstalled while running?)"
            )
        ended, used = time.monotonic(), time.thread_time() - used
        self.due = next_due(ended, ended - began, used)
        if not self._steps:
            self.due = None
            console.debug("ready for failures")


def next_due(now: float, took_s: float, computed_s: float) -> float:
    """Return when the next step is due, after one that took `took_s` and computed for `computed_s`."""
    return now + BUSY_PAUSE_S if took_s - computed_s > WAIT_S_MAX else now


def load(name: str) -> None:
    """Import a module, and execute it even if its execution is postponed."""
    __import__(name)
    getattr(sys.modules[name], "__all__", None)
