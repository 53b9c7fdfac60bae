"""Processes whose keeper was killed: an agent adopts them, kills them and reaps them.

Only the command itself adopts (`adopt_orphans`): a program around an agent may have children of
its own, and what a killed keeper left besides the workers then goes to the init process.
"""

from __future__ import annotations

import os
import select

from holdfast.processes.keeper import (
    PR_SET_CHILD_SUBREAPER,
    descendants_of,
    load_prctl,
    send_signal,
)

SIGKILL = 9
# How long a killed process may take to go before it is passed over.
REAP_MS_MAX = 10_000
# Each round kills one more layer of what was forked while the round before it ran.
SWEEP_ROUNDS_MAX = 100

_adopts = False
_is_subreaper = False


def adopt_orphans() -> None:
    """Have this process adopt, once workers run, what a killed keeper would leave.

    Only for a process that is nothing but an agent: a program around us may have children of
    its own that must not be touched.
    """
    global _adopts  # noqa: PLW0603 (a property of the process)
    _adopts = True


def become_subreaper_if_wanted() -> None:
    """Do what `adopt_orphans` asked for; once a worker is asked for, since it would delay that."""
    global _is_subreaper  # noqa: PLW0603 (a property of the process)
    if _adopts and not _is_subreaper:
        load_prctl()(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _is_subreaper = True


def sweep_after_loss() -> None:
    """Kill what a lost keeper left to us, if this process adopts such things at all."""
    if _is_subreaper:
        sweep_adopted(spared=set())


def sweep_adopted(spared: set[int]) -> None:
    """SIGKILL and reap every process below this one, but for those spared and their own."""
    stuck: set[int] = set()  # SIGKILL does not end these.
    for _ in range(SWEEP_ROUNDS_MAX):
        kept = spared.union(stuck, *(descendants_of(pid) for pid in spared))
        pids = [pid for pid in descendants_of(os.getpid()) if pid not in kept]
        if not pids:
            return
        for pid in pids:
            send_signal(pid, SIGKILL)
        for pid in pids:
            if not reap_soon(pid, 0 if stuck else REAP_MS_MAX):
                stuck.add(pid)


def ended_soon(pid: int, ms_max: int = REAP_MS_MAX) -> bool:
    """Whether a process is gone or ends in time; it is not reaped."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(ms_max))
    finally:
        os.close(pidfd)


def reap_soon(pid: int, ms_max: int = REAP_MS_MAX) -> bool:
    """Reap a child once it has ended; False if that takes longer than it should."""
    if not ended_soon(pid, ms_max):
        return False
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        pass  # Not ours, or reaped before: the next round finds it as ours, or gone.
    return True
