"""Machines as folders, with the files in which a kernel describes CPUs, NUMA nodes and GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.numa.affinity import format_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

GPU_BUSES = (0x07, 0x0A, 0x44, 0x4A, 0x84, 0x8A, 0xC0, 0xC3)


@dataclass
class Shape:
    """A machine with equal NUMA nodes; the numbers of second threads follow those of all first threads."""

    sockets: int = 2
    nodes_per_socket: int = 1
    cores_per_node: int = 32
    threads_per_core: int = 2
    cores_per_complex: int = 8
    gpus: list[int] = field(default_factory=lambda: [0, 0, 0, 0, 1, 1, 1, 1])
    """The NUMA node of each GPU, in order of the PCI addresses."""

    @property
    def nodes(self) -> int:
        return self.sockets * self.nodes_per_socket

    @property
    def cores(self) -> int:
        return self.nodes * self.cores_per_node

    @property
    def cpus(self) -> range:
        return range(self.cores * self.threads_per_core)

    def threads(self, cores: Iterable[int]) -> list[int]:
        """Return the CPUs of these cores, ascending."""
        first = list(cores)
        return sorted(core + self.cores * t for t in range(self.threads_per_core) for core in first)

    def cores_of(self, node: int) -> range:
        return range(node * self.cores_per_node, (node + 1) * self.cores_per_node)

    def complex_of(self, core: int) -> range:
        """Return the cores that share a third-level cache; the last group of a node may be smaller."""
        node = self.cores_of(core // self.cores_per_node)
        begin = core - (core - node.start) % self.cores_per_complex
        return range(begin, min(begin + self.cores_per_complex, node.stop))

    def build(self, root: Path) -> Path:
        """Write the machine's files below `root`; return `root`."""
        for node in range(self.nodes):
            cpulist = format_ranges(self.threads(self.cores_of(node)))
            put(root, f"sys/devices/system/node/node{node}/cpulist", cpulist)
        put(root, "sys/devices/system/node/possible", format_ranges(range(self.nodes)))
        for cpu in self.cpus:
            self._build_cpu(root, cpu)
        return self.build_gpus(root)

    def build_gpus(self, root: Path) -> Path:
        """Write only the files of GPUs."""
        for number, node in enumerate(self.gpus):
            add_nvidia(root, number, node)
        return root

    def _build_cpu(self, root: Path, cpu: int) -> None:
        core = cpu % self.cores
        place = f"sys/devices/system/cpu/cpu{cpu}"
        own = format_ranges(self.threads([core]))
        socket = core // self.cores_per_node // self.nodes_per_socket
        put(root, f"{place}/topology/thread_siblings_list", own)
        put(root, f"{place}/topology/physical_package_id", str(socket))
        shared = format_ranges(self.threads(self.complex_of(core)))
        everyone = format_ranges(self.cpus)
        # The last one is not a data cache, so its level must be ignored.
        caches = [(1, "Data", own), (3, "Unified", shared), (4, "Instruction", everyone)]
        for index, (level, kind, sharers) in enumerate(caches):
            put(root, f"{place}/cache/index{index}/level", str(level))
            put(root, f"{place}/cache/index{index}/type", kind)
            put(root, f"{place}/cache/index{index}/shared_cpu_list", sharers)


def put(root: Path, path: str, text: str) -> None:
    """Write one file as the kernel does, with a newline at the end."""
    file = root / path
    try:
        file.write_text(f"{text}\n")
    except FileNotFoundError:
        file.parent.mkdir(parents=True)
        file.write_text(f"{text}\n")


def address_of(gpu: int) -> str:
    return f"0000:{GPU_BUSES[gpu]:02x}:00.0"


def add_pci(root: Path, address: str, vendor: str, kind: str, node: int | None = 0) -> None:
    """Add a device to the PCI bus; without a node, as a kernel without NUMA does."""
    device = f"sys/bus/pci/devices/{address}"
    put(root, f"{device}/vendor", vendor)
    put(root, f"{device}/class", kind)
    put(root, f"{device}/device", "0x2330")
    if node is not None:
        put(root, f"{device}/numa_node", str(node))


def add_nvidia(root: Path, gpu: int, node: int, model: str = "NVIDIA H100") -> None:
    """Add a card with its driver, as the card of this number."""
    add_pci(root, address_of(gpu), "0x10de", "0x030200", node)
    put(
        root,
        f"proc/driver/nvidia/gpus/{address_of(gpu)}/information",
        f"Model: \t\t {model}\nGPU UUID: \t {uuid_of(gpu)}\nBus Location: \t {address_of(gpu)}\n"
        f"Device Minor: \t {gpu}\nGPU Excluded:\t No",
    )


def uuid_of(gpu: int) -> str:
    return f"GPU-{gpu}a2b3c4d-0000-4000-8000-00000000000{gpu}"


TWO_SOCKETS = Shape()
"""Two sockets with 32 cores, each a NUMA node with four GPUs."""

FOUR_NODES = Shape(nodes_per_socket=2, cores_per_node=16, gpus=[1, 1, 0, 0, 3, 3, 2, 2])
"""Each socket has two NUMA nodes, and the GPUs are not in the order of the nodes."""

ODD = Shape(cores_per_node=21, gpus=[0, 1, 0, 0, 1, 0, 0, 0], nodes_per_socket=1)
"""A number of cores that does not divide evenly, and most GPUs at one node."""

NO_SMT = Shape(threads_per_core=1, cores_per_node=12, gpus=[-1, -1, 1, 1, 1])
"""No second threads, and two GPUs with an unknown node."""

SMALL = Shape(cores_per_node=4, cores_per_complex=2)
"""Like `TWO_SOCKETS`, with fewer CPUs: 0-3 and 8-11 on one socket, 4-7 and 12-15 on the other."""

MACHINES = {"two sockets": TWO_SOCKETS, "four nodes": FOUR_NODES, "odd": ODD, "no SMT": NO_SMT}
