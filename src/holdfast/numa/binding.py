"""Selects the CPUs near each worker's GPU on this machine, according to `NumaOptions`.

This module binds no worker. The worker's process binds itself before its program starts, so all its threads and
children are bound, and the agent is not. There is no memory policy: the kernel allocates memory near the CPU that
first uses it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import EnvironmentProblem, HoldfastError, UsageError
from holdfast.numa import affinity
from holdfast.numa.topology import NODES, read_gpus, read_machine

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["AffinityMode", "NumaOptions"]

ROOT = "/"
"""The folder in which the kernel's file systems are mounted."""

_logged: set[str] = set()  # Messages that a restart does not log again.


class AffinityMode(str, Enum):  # noqa: UP042 (StrEnum's text differs from PyTorch's)
    """Which CPUs a worker gets, relative to the GPU whose number is its local rank."""

    NODE = "node"
    """All CPUs of the GPU's NUMA node."""
    SOCKET = "socket"
    """All CPUs of the socket of this NUMA node."""
    EXCLUSIVE = "exclusive"
    """Cores of the NUMA node that no other GPU's worker gets."""
    CORE_COMPLEX = "core-complex"
    """Cores of the NUMA node that share one cache; each GPU gets its own cache if there are enough."""


@dataclass(frozen=True)
class NumaOptions:
    """How to bind workers, and whether they start unbound if that is impossible."""

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False


def cpus_of_workers(
    options: object, local_ranks: Iterable[int], *, root: str | None = None
) -> dict[int, list[int]]:
    """Return the CPUs of each worker by local rank; empty without binding.

    `options` are PyTorch's or Holdfast's `NumaOptions`, or None. `root` is the folder in which the file system of the
    machine is mounted.
    """
    if options is None:
        return {}
    mode = mode_of(options)
    try:
        chosen = _decide(mode, local_ranks, ROOT if root is None else root)
        if root is None:
            _try_binding(chosen)
        return chosen
    except (HoldfastError, OSError, ValueError) as problem:
        if isinstance(problem, UsageError):
            raise
        why = getattr(problem, "message", None) or f"unexpected data from the kernel: {problem}"
        if getattr(options, "should_fall_back_if_binding_fails", False):
            _log_once(f"--numa-binding {mode}: {why}; workers are not bound")
            return {}
        raise EnvironmentProblem(
            f"--numa-binding {mode}: {why}",
            hint="remove --numa-binding, or NumaOptions, to start workers unbound",
        ) from problem


def mode_of(options: object) -> str:
    """Return the mode of these options, or raise `UsageError`."""
    chosen = getattr(options, "affinity_mode", options)
    mode = getattr(chosen, "value", chosen)
    if mode not in affinity.MODES:
        raise UsageError(
            f"numa_options: {options!r} has no affinity mode; accepted: NumaOptions with "
            f"an affinity_mode of {', '.join(affinity.MODES)}"
        )
    return str(mode)


def _decide(mode: str, local_ranks: Iterable[int], root: str) -> dict[int, list[int]]:
    gpus = read_gpus(root, os.environ)
    if not gpus.cards:
        raise EnvironmentProblem("no GPU is visible on this machine")
    machine = read_machine(root, [card.address for card in gpus.cards])
    if not machine.nodes:
        raise EnvironmentProblem(f"the kernel reports no NUMA nodes in /{NODES}")
    if gpus.models:
        _log_once(
            f"--numa-binding {mode}: there are GPUs of several models ({', '.join(gpus.models)}); "
            "workers are bound as if GPUs were numbered by PCI address; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID to make CUDA use this order"
        )
    allowed = os.sched_getaffinity(0)
    chosen = {rank: affinity.cpus_of(machine, mode, rank, allowed) for rank in local_ranks}
    for rank, cpus in chosen.items():
        _log_once(
            f"worker {rank} is bound to CPUs {affinity.format_ranges(cpus)}, near GPU "
            f"{gpus.cards[rank].address} on NUMA node {machine.gpus[rank]}",
            console.INFO,
        )
    return chosen


def _try_binding(chosen: dict[int, list[int]]) -> None:
    """Raise if the kernel would refuse this binding; a temporary thread tries it."""
    refusals: list[str] = []

    def bind_to_all() -> None:
        for cpus in chosen.values():
            try:
                os.sched_setaffinity(0, cpus)
            except OSError as error:
                refusals.append(f"CPUs {affinity.format_ranges(cpus)}: {error.strerror}")

    thread = threading.Thread(target=bind_to_all, name="holdfast-numa")
    thread.start()
    thread.join()
    if refusals:
        raise EnvironmentProblem(f"the kernel refuses to bind to {refusals[0]}")


def _log_once(text: str, level: int = console.NOTICE) -> None:
    if text not in _logged:
        _logged.add(text)
        console.log(level, text)


class OnCpus:
    """Bind the processes that this thread starts inside the context to these CPUs, if any.

    Inside the context the thread itself is bound too; other threads of this process are not.
    """

    def __init__(self, cpus: Iterable[int]) -> None:
        self.cpus = list(cpus)
        self.before: set[int] = set()

    def __enter__(self) -> None:
        if self.cpus:
            self.before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self.cpus)

    def __exit__(self, *_why: object) -> None:
        if self.before:
            os.sched_setaffinity(0, self.before)
