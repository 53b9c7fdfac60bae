"""The GPUs that workers will see, in the order in which they are numbered there.

The one thing to know: no library of a vendor is asked. NVIDIA's driver shows its cards in `/proc`,
AMD's in `/sys/class/kfd` in the very order of HIP; where neither does, the PCI bus is looked at.
CUDA numbers cards from fast to slow by a rule of its own, and those of one model by PCI address.
Of a mix only CUDA knows the order, but for `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
"""

from __future__ import annotations

import os

from holdfast.core.facts import Fact
from holdfast.core.visible_devices import visible_numbers
from holdfast.errors import EnvironmentProblem
from holdfast.numa.topology import PCI_DEVICES, numbered, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

NVIDIA_PROC = "proc/driver/nvidia/gpus"
KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
NVIDIA, AMD = "0x10de", "0x1002"
# VGA, 3D and other display controllers, and processing accelerators.
GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")


class Gpu(Fact):
    """One card. `unique` is the name that lists of visible devices may use, empty if not known."""

    address: str
    unique: str
    model: str


class Gpus(Fact):
    """The cards that workers see, by their numbers there."""

    cards: tuple[Gpu, ...]
    models: tuple[str, ...] = ()
    """The models of all cards, if it is not known which of them is counted first."""


def read_gpus(root: str, env: Mapping[str, str]) -> Gpus:
    """Return the GPUs of this machine that this environment shows."""
    cards = _of_nvidias_driver(root) or _on_pci(root, NVIDIA)
    if cards:
        models = sorted({card.model for card in cards})
        known = len(models) == 1 or env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        shown = _shown(cards, "CUDA_VISIBLE_DEVICES", env)
        return Gpus(tuple(shown), () if known else tuple(models))
    cards = _of_amds_driver(root) or _on_pci(root, AMD)
    shown = _shown(cards, "ROCR_VISIBLE_DEVICES", env)
    hip = "HIP_VISIBLE_DEVICES" if env.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    return Gpus(tuple(_shown(shown, hip, env)))


def _shown(cards: list[Gpu], variable: str, env: Mapping[str, str]) -> list[Gpu]:
    visible = env.get(variable)
    if visible is None:
        return cards
    if any(entry.strip().startswith("MIG-") for entry in visible.split(",")):
        raise EnvironmentProblem(
            f"{variable}={visible!r} names parts of GPUs, and which GPU each is a part of cannot "
            "be told"
        )
    if "GPU-" in visible and not all(card.unique for card in cards):
        raise EnvironmentProblem(
            f"{variable}={visible!r} names GPUs by their UUIDs, which the driver does not show "
            "here; name them by numbers"
        )
    return [cards[number] for number in visible_numbers(visible, [card.unique for card in cards])]


def _of_nvidias_driver(root: str) -> list[Gpu]:
    """Return the cards that the driver shows, less those that a container has no device of."""
    folder = os.path.join(root, NVIDIA_PROC)
    try:
        addresses = sorted(os.listdir(folder), key=_place)
    except OSError:
        return []
    devices = set(numbered(os.path.join(root, "dev"), "nvidia"))
    cards = []
    for address in addresses:
        said = _fields(text_of(folder, address, "information"), ":")
        minor = said.get("Device Minor", "")
        if not (devices and minor.isdecimal() and int(minor) not in devices):
            cards.append(Gpu(address.lower(), said.get("GPU UUID", ""), said.get("Model", "")))
    return cards


def _of_amds_driver(root: str) -> list[Gpu]:
    """Return the cards of the driver's topology; its nodes without SIMD units are CPUs."""
    folder = os.path.join(root, KFD_NODES)
    cards = []
    for number in numbered(folder, ""):
        said = _fields(text_of(folder, str(number), "properties"), " ")
        if int(said.get("simd_count", 0)) > 0:
            place = int(said.get("location_id", 0))
            unique = int(said.get("unique_id", 0))
            bus, slot = place >> 8 & 0xFF, place >> 3 & 0x1F
            address = f"{int(said.get('domain', 0)):04x}:{bus:02x}:{slot:02x}.{place & 7}"
            cards.append(Gpu(address, f"GPU-{unique:016x}" if unique else "", ""))
    return cards


def _on_pci(root: str, vendor: str) -> list[Gpu]:
    folder = os.path.join(root, PCI_DEVICES)
    try:
        addresses = sorted(os.listdir(folder), key=_place)
    except OSError:
        return []
    return [
        Gpu(address, "", text_of(folder, address, "device"))
        for address in addresses
        if text_of(folder, address, "vendor") == vendor
        if text_of(folder, address, "class").startswith(GPU_CLASSES)
    ]


def _place(address: str) -> list[int]:
    """Return the numbers of a PCI address: domain, bus, device and function."""
    return [int(part, 16) for part in address.replace(".", ":").split(":")]


def _fields(text: str, separator: str) -> dict[str, str]:
    """Return the `name: value` lines of a driver's file."""
    parts = (line.partition(separator) for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in parts}
