"""This machine's CPUs, NUMA nodes and GPUs, read from the kernel's file system.

A missing file is not an error: a value that the kernel does not report is None or absent in the result, and only a
selection that needs it raises. No vendor library is used. NVIDIA's driver lists its cards in `/proc`; AMD's lists
them in `/sys/class/kfd`, in HIP's order; otherwise this module reads the PCI bus. CUDA orders cards from fast to slow
by its own rule, and cards of one model by PCI address. So the order of mixed models is unknown, unless
`CUDA_DEVICE_ORDER=PCI_BUS_ID`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.core.values import Value
from holdfast.errors import EnvironmentProblem
from holdfast.numa.affinity import Cpu, NumaNode, NumaTopology, parse_ranges
from holdfast.numa.visible_devices import visible_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


NODES = "sys/devices/system/node"
CPUS = "sys/devices/system/cpu"
PCI_DEVICES = "sys/bus/pci/devices"
# Instruction caches are ignored: they do not show which CPUs share data.
CACHES_OF_DATA = ("Data", "Unified")


def read_machine(root: str, gpu_addresses: Iterable[str]) -> NumaTopology:
    """Return the machine whose file system is mounted at `root`, with the GPUs at these PCI addresses."""
    nodes = tuple(
        NumaNode(number, tuple(_cpus(root, _numbers(root, NODES, f"node{number}", "cpulist"))))
        for number in numbered(os.path.join(root, NODES), "node")
    )
    return NumaTopology(nodes, tuple(node_of(root, address) for address in gpu_addresses))


def node_of(root: str, address: str) -> int:
    """Return the NUMA node of a PCI device: 0 if the kernel does not report it."""
    text = text_of(root, PCI_DEVICES, address, "numa_node")
    return max(0, int(text)) if text else 0


def _cpus(root: str, numbers: Iterable[int]) -> Iterator[Cpu]:
    """Read each CPU; shared properties are read once for all CPUs that share them."""
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
    """Return the CPUs that share this one's last-level cache; none if unknown."""
    folder = os.path.join(root, CPUS, f"cpu{cpu}", "cache")
    highest, sharers = -1, list[int]()
    for index in numbered(folder, "index"):
        place = os.path.join(folder, f"index{index}")
        level = int(text_of(place, "level") or -1)
        if level > highest and text_of(place, "type") in CACHES_OF_DATA:
            highest, sharers = level, _numbers(place, "shared_cpu_list")
    return sharers


def numbered(folder: str, word: str) -> list[int]:
    """Return the numbers of the entries whose names are this word and a number."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    numbers = (name.removeprefix(word) for name in names if name.startswith(word))
    return sorted(int(number) for number in numbers if number.isdecimal())


def text_of(*path: str) -> str:
    """Return the text of a file, empty if it does not exist."""
    try:
        with open(os.path.join(*path), encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _numbers(*path: str) -> list[int]:
    return parse_ranges(text_of(*path))


NVIDIA_PROC = "proc/driver/nvidia/gpus"
KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
NVIDIA, AMD = "0x10de", "0x1002"
# VGA, 3D and other display controllers, and processing accelerators.
GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")


class Gpu(Value):
    """One card. `unique` is its UUID in lists of visible devices, empty if unknown."""

    address: str
    unique: str
    model: str


class Gpus(Value):
    """The cards that workers see, in the order in which workers number them."""

    cards: tuple[Gpu, ...]
    models: tuple[str, ...] = ()
    """The models of all cards, if the order of the cards is unknown."""


def read_gpus(root: str, env: Mapping[str, str]) -> Gpus:
    """Return the GPUs of this machine that are visible in this environment."""
    cards = _nvidia_cards(root) or _pci_cards(root, NVIDIA)
    if cards:
        models = sorted({card.model for card in cards})
        known = len(models) == 1 or env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        shown = _visible(cards, "CUDA_VISIBLE_DEVICES", env)
        return Gpus(tuple(shown), () if known else tuple(models))
    cards = _amd_cards(root) or _pci_cards(root, AMD)
    shown = _visible(cards, "ROCR_VISIBLE_DEVICES", env)
    hip = "HIP_VISIBLE_DEVICES" if env.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    return Gpus(tuple(_visible(shown, hip, env)))


def _visible(cards: list[Gpu], variable: str, env: Mapping[str, str]) -> list[Gpu]:
    visible = env.get(variable)
    if visible is None:
        return cards
    if any(entry.strip().startswith("MIG-") for entry in visible.split(",")):
        raise EnvironmentProblem(
            f"{variable}={visible!r} names MIG devices, and the GPU of a MIG device is unknown"
        )
    if "GPU-" in visible and not all(card.unique for card in cards):
        raise EnvironmentProblem(
            f"{variable}={visible!r} names GPUs by UUID, which the driver does not report here; "
            "use their numbers"
        )
    return [cards[number] for number in visible_numbers(visible, [card.unique for card in cards])]


def _nvidia_cards(root: str) -> list[Gpu]:
    """Return the cards of NVIDIA's driver, without cards whose device is missing in this container."""
    folder = os.path.join(root, NVIDIA_PROC)
    try:
        addresses = sorted(os.listdir(folder), key=_pci_numbers)
    except OSError:
        return []
    devices = set(numbered(os.path.join(root, "dev"), "nvidia"))
    cards = []
    for address in addresses:
        fields = _fields(text_of(folder, address, "information"), ":")
        minor = fields.get("Device Minor", "")
        if not (devices and minor.isdecimal() and int(minor) not in devices):
            cards.append(Gpu(address.lower(), fields.get("GPU UUID", ""), fields.get("Model", "")))
    return cards


def _amd_cards(root: str) -> list[Gpu]:
    """Return the cards of AMD's driver; nodes of its topology without SIMD units are CPUs."""
    folder = os.path.join(root, KFD_NODES)
    cards = []
    for number in numbered(folder, ""):
        fields = _fields(text_of(folder, str(number), "properties"), " ")
        if int(fields.get("simd_count", 0)) > 0:
            place = int(fields.get("location_id", 0))
            unique = int(fields.get("unique_id", 0))
            bus, slot = place >> 8 & 0xFF, place >> 3 & 0x1F
            address = f"{int(fields.get('domain', 0)):04x}:{bus:02x}:{slot:02x}.{place & 7}"
            cards.append(Gpu(address, f"GPU-{unique:016x}" if unique else "", ""))
    return cards


def _pci_cards(root: str, vendor: str) -> list[Gpu]:
    folder = os.path.join(root, PCI_DEVICES)
    try:
        addresses = sorted(os.listdir(folder), key=_pci_numbers)
    except OSError:
        return []
    return [
        Gpu(address, "", text_of(folder, address, "device"))
        for address in addresses
        if text_of(folder, address, "vendor") == vendor
        if text_of(folder, address, "class").startswith(GPU_CLASSES)
    ]


def _pci_numbers(address: str) -> list[int]:
    """Return the numbers of a PCI address: domain, bus, device and function."""
    return [int(part, 16) for part in address.replace(".", ":").split(":")]


def _fields(text: str, separator: str) -> dict[str, str]:
    """Return the `name: value` lines of a driver's file."""
    parts = (line.partition(separator) for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in parts}
