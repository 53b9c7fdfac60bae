"""The variables that restrict a process to some of the machine's accelerators.

A list is parsed as CUDA parses it: up to the first entry that names no device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


CUDA = "CUDA_VISIBLE_DEVICES"
"""Selects a worker's one device for CUDA, and for HIP, which reads it too."""

HIP = "HIP_VISIBLE_DEVICES"
"""AMD's variable; HIP prefers it to CUDA's. If it is set, both select the same entry of it."""

IF_SET = (
    "ZE_AFFINITY_MASK",  # Intel
    "ASCEND_RT_VISIBLE_DEVICES",  # Huawei
    "MLU_VISIBLE_DEVICES",  # Cambricon
    "MUSA_VISIBLE_DEVICES",  # Moore Threads
    "HABANA_VISIBLE_MODULES",  # Intel Gaudi
)
"""The variables of other vendors: each is narrowed if it is set, and never created."""


def device_variables(inherited: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Return the variables that give a worker one of the devices that its agent sees.

    `ROCR_VISIBLE_DEVICES` is unchanged: HIP numbers only the devices in that list.
    """
    source = HIP if inherited.get(HIP) else CUDA
    device = _own_entry(source, inherited.get(source), local_rank)
    shown = {CUDA: device, source: device}
    for name in IF_SET:
        if inherited.get(name):
            shown[name] = _own_entry(name, inherited[name], local_rank)
    return shown


def _own_entry(name: str, visible: str | None, local_rank: int) -> str:
    if visible is None:
        return str(local_rank)
    devices = [device.strip() for device in visible.split(",")]
    if local_rank >= len(devices):
        raise UsageError(
            f"--virtual-local-rank: worker {local_rank} has no device: "
            f"{name}={visible!r} names only {len(devices)}"
        )
    return devices[local_rank]


def visible_numbers(visible: str, names: Sequence[str]) -> list[int]:
    """Return the numbers of the devices in a list, in the order of the list.

    `names` has the unique name of each device, empty if it is unknown. An entry may be a unique prefix of a name.
    """
    shown: list[int] = []
    for entry in visible.split(","):
        wanted = entry.strip()
        if wanted.isdecimal():
            found = [int(wanted)] if int(wanted) < len(names) else []
        else:
            found = [
                number for number, name in enumerate(names) if wanted and name.startswith(wanted)
            ]
        if len(found) != 1:
            break
        shown += found
    return shown
