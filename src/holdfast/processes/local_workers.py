"""The workers on this host, found in `/proc`.

A worker has a rank and a run id in its environment that its parent does not have; its own children
inherit them. So this finds workers of any launcher that sets TorchElastic's variables. A process with
a run id but no rank belongs to a job but is not a worker: it is a member of the job's etcd.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.processes.procfs import (
    all_pids,
    command_of,
    current_environment,
    initial_environment,
    name_of,
    stat_of,
    user_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

RUN_ID, RANK, LOCAL_RANK = "TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"
GENERATION = "HOLDFAST_GENERATION"
KEEPER, ZYGOTE = "hf-keeper", "hf-zygote"


class LocalWorker:
    """A worker, or another process that the user named by its pid; -1 is an unknown number."""

    def __init__(self, pid: int, env: Mapping[str, str], *, is_worker: bool = True) -> None:
        self.pid = pid
        self.is_worker = is_worker
        self.env = env
        self.run_id = env.get(RUN_ID, "")
        self.rank = _number(env.get(RANK, ""))
        self.local_rank = _number(env.get(LOCAL_RANK, ""))
        self.generation = _number(env.get(GENERATION, ""))

    def described(self) -> str:
        """Return a line that identifies the worker."""
        known = f"rank {self.rank}"
        if self.local_rank >= 0:
            known += f" (local rank {self.local_rank})"
        unknown = "a worker of unknown rank"
        words = [
            (known if self.rank >= 0 else unknown) if self.is_worker else "",
            f"pid {self.pid}",
            f"run id {self.run_id!r}" if self.run_id and self.is_worker else "",
            f"generation {self.generation}" if self.generation >= 0 and self.is_worker else "",
            command_of(self.pid),
        ]
        return ", ".join(word for word in words if word)


class _Process:
    """One process of the list."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        stat = stat_of(pid)
        self.parent, self.group, self.is_ended = stat.parent, stat.group, stat.has_ended
        self.env = initial_environment(pid)

    def identity(self) -> tuple[str, str] | None:
        """Return run id and rank, if it is a worker or belongs to one."""
        if RUN_ID in self.env and RANK in self.env:
            return self.env[RUN_ID], self.env[RANK]
        return None


def local_workers() -> list[LocalWorker]:
    """Return this user's workers on this host, by run id and rank; for root, those of all users."""
    processes = _processes()
    found = []
    for process in processes.values():
        parent = processes.get(process.parent)
        identity = process.identity()
        is_keepers = name_of(process.parent) == KEEPER and name_of(process.pid) != ZYGOTE
        if process.is_ended or process.pid == os.getpid():
            continue
        if identity is not None:
            if parent is None or parent.identity() != identity:
                found.append(LocalWorker(process.pid, process.env))
        elif process.group == process.pid:
            # Each of our workers leads a process group. A forked worker has its variables only in memory.
            env = current_environment(process.pid)
            if RUN_ID in env and RANK in env:
                found.append(LocalWorker(process.pid, env))
            elif is_keepers and RUN_ID not in process.env:
                found.append(LocalWorker(process.pid, {}))
    return sorted(found, key=lambda worker: (worker.run_id, worker.rank, worker.pid))


def _processes() -> dict[int, _Process]:
    user = os.geteuid()
    return {pid: _Process(pid) for pid in all_pids() if user in (0, user_of(pid))}


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else -1
