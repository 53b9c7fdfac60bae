"""What an agent says to the person about its own workers: starts, restarts, signals passed on."""

from __future__ import annotations

import signal

from holdfast import console
from holdfast.core.supervision import State, StopReason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.agent.spec import WorkerGroup
    from holdfast.core.supervision import Supervision
    from holdfast.processes.failures.failure import ProcessFailure

# An exception may have a message of any length; the report has more of it.
NOTICE_CHARS_MAX = 500


def of_signal(machine: Supervision, one: signal.Signals, grace_s: float) -> str:
    """Return what a signal leads to, before it does."""
    interrupt = one == signal.SIGINT
    if interrupt and machine.interrupted:
        return f"{one.name} again: killing the workers now"
    again = "; again to kill them at once" if interrupt else ""
    if machine.state is State.RUNNING:
        count = len(machine.running)
        whom = "1 worker" if count == 1 else f"{count} workers"
        limit = f"waiting up to {grace_s:g} s for the end"
        return f"{one.name}: passing it on to {whom} and {limit}{again}"
    if machine.state is State.STOPPING:
        return f"{one.name}: the workers are being stopped already{again}"
    return f"{one.name}: stopping"


def tell_restart(machine: Supervision, failures: dict[int, ProcessFailure]) -> None:
    """Say why the workers are started again, before they are."""
    if machine.reason is StopReason.REGROUP:
        console.info("nodes are waiting to join: regrouping")
        return
    budget = machine.budget
    causes = {rank: failure for rank, failure in failures.items() if not failure.consequence}
    what = "the workers are not healthy"
    if causes:
        from holdfast.processes.failures.failure import ChildFailedError

        rank, failure = ChildFailedError("", causes).get_first_failure()
        lines = failure.traceback_text().strip().splitlines()
        what = f"rank {rank} (pid {failure.pid}) failed: {failure.detail or failure.ending()}"
        what += f": {lines[-1]}" if lines else ""
        if len(what) > NOTICE_CHARS_MAX:
            what = what[:NOTICE_CHARS_MAX] + " ..."
    console.warning(
        f"{what}; restarting all workers (restart {budget.used} of {budget.max_restarts})"
    )


def tell_start(group: WorkerGroup, generation: int) -> None:
    """Say which workers a generation has here."""
    started = ", ".join(f"{worker.global_rank} (pid {worker.id})" for worker in group.workers)
    console.info(
        f"generation {generation} on node {group.group_rank} of {group.group_world_size}: started "
        f"ranks {started}; MASTER_ADDR={group.master_addr}, MASTER_PORT={group.master_port}"
    )
