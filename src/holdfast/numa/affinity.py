"""Selects the CPUs that a worker is bound to, given the CPUs and the GPUs of the machine.

A worker uses the GPU whose number is its local rank, and is bound to CPUs near that GPU. CPUs that the agent
may not use are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.values import Value
from holdfast.errors import EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


MODES = ("node", "socket", "exclusive", "core-complex")


class Cpu(Value):
    """One logical CPU. `core`, `package` and `complex` are named by the lowest CPU in them.

    `package` and `complex` are None if the kernel does not report them.
    """

    number: int
    core: int
    package: int | None
    complex: int | None


class NumaNode(Value):
    """A part of the machine: memory, and the CPUs near it, if any."""

    number: int
    cpus: tuple[Cpu, ...]


class NumaTopology(Value):
    """The input of the selection. `gpus` has the NUMA node of each GPU, by its number."""

    nodes: tuple[NumaNode, ...]
    gpus: tuple[int, ...]


def cpus_of(machine: NumaTopology, mode: str, gpu: int, allowed: Iterable[int]) -> list[int]:
    """Return the CPUs for the worker that uses this GPU, in ascending order; at least one."""
    if gpu >= len(machine.gpus):
        raise EnvironmentProblem(
            f"worker {gpu} has no GPU: {counted(len(machine.gpus), 'GPU')} visible on this machine"
        )
    known = _allowed_part(machine, frozenset(allowed))
    at = machine.gpus[gpu]
    near = known.get(at, ())
    if not near:
        raise EnvironmentProblem(f"NUMA node {at} of GPU {gpu} has no CPU that this agent may use")
    if mode == "node":
        chosen = near
    elif mode == "socket":
        chosen = _on_socket(known, near[0].package, at)
    else:
        sharers = [one for one, place in enumerate(machine.gpus) if place == at]
        position = sharers.index(gpu)
        if mode == "exclusive":
            chosen = _own_cores(near, at, position, len(sharers))
        else:
            chosen = _core_complex(near, position)
    return sorted(cpu.number for cpu in chosen)


def _allowed_part(machine: NumaTopology, allowed: frozenset[int]) -> dict[int, tuple[Cpu, ...]]:
    """Return the usable CPUs of each node, the lowest first; nodes without usable CPUs are omitted."""
    usable = {
        node.number: tuple(
            sorted((cpu for cpu in node.cpus if cpu.number in allowed), key=lambda cpu: cpu.number)
        )
        for node in machine.nodes
    }
    return {number: cpus for number, cpus in usable.items() if cpus}


def _on_socket(
    known: dict[int, tuple[Cpu, ...]], package: int | None, node: int
) -> tuple[Cpu, ...]:
    """Return the CPUs of all nodes on one socket; a node belongs to the socket of its lowest CPU."""
    if package is None:
        raise EnvironmentProblem(f"the kernel does not report the socket of NUMA node {node}")
    return tuple(cpu for cpus in known.values() if cpus[0].package == package for cpu in cpus)


def _own_cores(near: tuple[Cpu, ...], node: int, position: int, sharers: int) -> tuple[Cpu, ...]:
    """Divide the node's cores among its GPUs, in order; the first GPUs get the remainder."""
    cores = _grouped(near, lambda cpu: cpu.core)
    each, over = divmod(len(cores), sharers)
    if each == 0:
        raise EnvironmentProblem(
            f"NUMA node {node} has {counted(sharers, 'GPU')} but only "
            f"{counted(len(cores), 'core')} that this agent may use"
        )
    begin = position * each + min(position, over)
    end = begin + each + (position < over)
    return tuple(cpu for core in sorted(cores)[begin:end] for cpu in cores[core])


def _core_complex(near: tuple[Cpu, ...], position: int) -> tuple[Cpu, ...]:
    """Return a group of CPUs that share a cache. Larger groups come first, then lower numbers."""
    if any(cpu.complex is None for cpu in near):
        raise EnvironmentProblem("the kernel does not report which CPUs share a cache")
    groups = _grouped(near, lambda cpu: cpu.complex or 0)
    order = sorted(groups, key=lambda lowest: (-len(groups[lowest]), lowest))
    return tuple(groups[order[position % len(order)]])


def _grouped(cpus: Iterable[Cpu], key: Callable[[Cpu], int]) -> dict[int, list[Cpu]]:
    groups: dict[int, list[Cpu]] = {}
    for cpu in cpus:
        groups.setdefault(key(cpu), []).append(cpu)
    return groups


def parse_ranges(text: str) -> list[int]:
    """Parse the kernel's format, such as `0-3,8,10-11`; an empty text has no numbers."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if first:
            numbers.extend(range(int(first), int(last if dash else first) + 1))
    return numbers


def format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers in the kernel's format, such as `0-3,8,10-11`."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def counted(count: int, what: str) -> str:
    """Return `no GPU`, `1 GPU`, `2 GPUs`."""
    return f"{count or 'no'} {what}" if count < 2 else f"{count} {what}s"
