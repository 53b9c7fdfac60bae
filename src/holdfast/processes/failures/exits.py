"""The exits of workers: what is recorded of each, and what is known of the cause.

The kernel counts the kills of its out-of-memory killer, for each memory control group and for the
whole machine, but not the victims. So the report of a worker that died of SIGKILL says that the
killer was active, in this job's group or on this machine; each kill explains one such death at
most. Two small files are read when workers start and one when a worker was killed.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.values import Value
from holdfast.errors import shortage_hint
from holdfast.lazy_dataclass import factory_field, lazy_dataclass
from holdfast.processes.procfs import state_of

if TYPE_CHECKING:
    from typing import Any

    from holdfast.processes.failures.failure import ProcessFailure


class OomKills:
    """The out-of-memory kills since this was made."""

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self._group = self._group_file()
        self._explained = self._count()

    def explain(self) -> str:
        """Say of a worker's SIGKILL that the killer was at work since; empty if it was not."""
        if self._count() <= self._explained:
            return ""
        self._explained += 1
        where = "in this job's memory group" if self._group else "on this machine"
        return f"SIGKILL: the kernel's out-of-memory killer was at work {where}"

    def _count(self) -> int:
        path = self._group or os.path.join(self._root, "proc/vmstat")
        for line in self._read(path).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdigit():
                return int(value)
        return 0

    def _group_file(self) -> str:
        """Return the file in which this process's memory control group counts, if there is one."""
        for line in self._read(os.path.join(self._root, "proc/self/cgroup")).splitlines():
            _number, _, rest = line.partition(":")
            controllers, _, group = rest.partition(":")
            if controllers == "":
                mounts, name = ["unified", ""], "memory.events"
            elif "memory" in controllers.split(","):
                mounts, name = ["memory"], "memory.oom_control"
            else:
                continue
            for mount in mounts:
                folder = os.path.join(self._root, "sys/fs/cgroup", mount, group.strip("/"))
                path = os.path.join(folder, name)
                if "oom_kill " in self._read(path):
                    return path
        return ""

    @staticmethod
    def _read(path: str) -> str:
        try:
            with open(path, encoding="utf-8", errors="replace") as stream:
                return stream.read()
        except OSError:
            return ""


# More than the workers of any node: a worker that SIGKILL does not end counts last.
ORDER_OF_GIVEN_UP = 1 << 20
# Temporary errors of an exec.
SHORTAGES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ETXTBSY)


@lazy_dataclass
class RunProcsResult:
    """How a group of workers ended, by local rank."""

    return_values: dict[int, Any] = factory_field(default_factory=dict)
    failures: dict[int, ProcessFailure] = factory_field(default_factory=dict)
    stdouts: dict[int, str] = factory_field(default_factory=dict)
    stderrs: dict[int, str] = factory_field(default_factory=dict)

    def is_failed(self) -> bool:
        return len(self.failures) > 0


class WorkerExit(Value):
    """How one worker exited, as first seen."""

    rank: int
    pid: int
    exitcode: int
    detail: str
    order: int
    when_ns: int  # On the wall clock, as in error files.
    after_stop: bool  # A stop had begun before.
    retryable: bool = True  # False if a restart would fail in the same way.
    stray_signal: bool = False  # It died of a signal that the stop, if any, had not sent to it.

    @property
    def failed(self) -> bool:
        """Whether this ending is a failure; an unusual exit with code 0 has a detail."""
        return self.exitcode != 0 or bool(self.detail)


def is_retryable(error: tuple[int, str] | None) -> bool:
    """Whether a new start may succeed: the system only lacked resources."""
    return error is None or error[0] in SHORTAGES


def start_error(error: tuple[int, str] | None) -> str:
    """Say why a forked child could not become the worker."""
    if error is None:
        return ""
    number, step = error
    hint = shortage_hint(number)
    why = f": {os.strerror(number)}" if number else ""
    return f"could not be started: {step}{why}" + (f" ({hint})" if hint else "")


def unkillable(pid: int, reap_s: float) -> str:
    """Say of a process that SIGKILL does not end what state it is in."""
    state = state_of(pid)
    where = "in uninterruptible sleep" if state == "D" else f"in state {state}"
    return f"does not end even by SIGKILL: {where}, given up after {reap_s:g} s"


def report_left_behind(workers: dict[int, int], leftovers: list[int], reap_s: float) -> None:
    """Report workers, by local rank, and their leftovers that SIGKILL did not end."""
    for rank, pid in workers.items():
        console.error(f"worker {rank} (pid {pid}) is left behind: it {unkillable(pid, reap_s)}")
    for pid in leftovers:
        what = f"process {pid}, which a worker had started,"
        console.error(f"{what} is left behind: it {unkillable(pid, reap_s)}")


def exit_of_unkillable(rank: int, pid: int, reap_s: float) -> WorkerExit:
    """Return the exit of a worker that SIGKILL does not end: after all others, by SIGKILL."""
    return WorkerExit(
        rank,
        pid,
        -signal.SIGKILL,
        unkillable(pid, reap_s),
        order=ORDER_OF_GIVEN_UP + rank,
        when_ns=time.time_ns(),
        after_stop=True,
    )


def failure_of(
    exited: WorkerExit, *, stop_began_ns: int, spoke_before_stop: bool = False, **known: Any
) -> ProcessFailure:
    """Return the failure of a worker that exited so; `known` are values of further fields.

    `spoke_before_stop`: whether its standard error had a traceback when the stop began.
    """
    from holdfast.processes.failures.failure import ProcessFailure

    failure = ProcessFailure(
        local_rank=exited.rank,
        pid=exited.pid,
        exitcode=exited.exitcode,
        detail=exited.detail,
        order=exited.order,
        observed_ns=exited.when_ns,
        tolerant=True,
        **known,
    )
    failure.stopped = exited.after_stop and exited.exitcode < 0 and not exited.stray_signal
    # Who recorded or printed an exception before the stop began is no consequence, however late it
    # ended, nor is who died of something that the stop has not done.
    failure.consequence = (
        exited.after_stop
        and not exited.stray_signal
        and not spoke_before_stop
        and failure.came_after(stop_began_ns)
    )
    return failure
