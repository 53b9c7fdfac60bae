"""Where this machine has its CPUs and NUMA nodes, as the kernel's file system tells.

The one thing to know: a file that is not there is no failure here. What the kernel does not tell
is None or missing in the answer, and only a decision that needs it complains.
"""

from __future__ import annotations

import os

from holdfast.core.affinity import Cpu, Machine, NumaNode, parse_ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NODES = "sys/devices/system/node"
CPUS = "sys/devices/system/cpu"
PCI_DEVICES = "sys/bus/pci/devices"
# Caches for instructions alone say nothing about what CPUs share.
CACHES_OF_DATA = ("Data", "Unified")


def read_machine(root: str, gpu_addresses: Iterable[str]) -> Machine:
    """Return the machine whose file system begins at `root`, with these GPUs by PCI address."""
    nodes = tuple(
        NumaNode(number, tuple(_cpus(root, _numbers(root, NODES, f"node{number}", "cpulist"))))
        for number in numbered(os.path.join(root, NODES), "node")
    )
    return Machine(nodes, tuple(node_of(root, address) for address in gpu_addresses))


def node_of(root: str, address: str) -> int:
    """Return the NUMA node of a PCI device: 0 where the machine has but one and does not say."""
    text = text_of(root, PCI_DEVICES, address, "numa_node")
    return max(0, int(text)) if text else 0


def _cpus(root: str, numbers: Iterable[int]) -> Iterator[Cpu]:
    """Read about each CPU; what it shares with others is read once for all of them."""
    core: dict[int, int] = {}
    package: dict[int, int | None] = {}
    cache: dict[int, int | None] = {}
    for number in numbers:
        if number not in core:
            siblings = _numbers(root, CPUS, f"cpu{number}", "topology/thread_siblings_list")
            place = text_of(root, CPUS, f"cpu{number}", "topology/physical_package_id")
            for one in siblings or [number]:
                core[one] = min(siblings or [number])
                package[one] = int(place) if place else None
        if number not in cache:
            sharers = _sharing_last_cache(root, number)
            cache.update(dict.fromkeys(sharers or [number], min(sharers, default=None)))
        yield Cpu(number, core[number], package[number], cache[number])


def _sharing_last_cache(root: str, cpu: int) -> list[int]:
    """Return the CPUs that share this one's cache of the highest level; none if it is not told."""
    folder = os.path.join(root, CPUS, f"cpu{cpu}", "cache")
    highest, sharers = -1, list[int]()
    for index in numbered(folder, "index"):
        place = os.path.join(folder, f"index{index}")
        level = int(text_of(place, "level") or -1)
        if level > highest and text_of(place, "type") in CACHES_OF_DATA:
            highest, sharers = level, _numbers(place, "shared_cpu_list")
    return sharers


def numbered(folder: str, word: str) -> list[int]:
    """Return the numbers of the entries called by this word and a number."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    numbers = (name.removeprefix(word) for name in names if name.startswith(word))
    return sorted(int(number) for number in numbers if number.isdecimal())


def text_of(*path: str) -> str:
    """Return what a file says, empty if it is not there."""
    try:
        with open(os.path.join(*path), encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _numbers(*path: str) -> list[int]:
    return parse_ranges(text_of(*path))
