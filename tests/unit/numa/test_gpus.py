from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.numa.topology import read_gpus
from synthetic_machines import TWO_SOCKETS, add_nvidia, add_pci, address_of, put, uuid_of

if TYPE_CHECKING:
    from pathlib import Path

ALL = [address_of(gpu) for gpu in range(8)]


def addresses(root: Path, **env: str) -> list[str]:
    return [card.address for card in read_gpus(str(root), env).cards]


def test_without_the_driver_gpus_are_found_on_the_pci_bus(tmp_path: Path) -> None:
    TWO_SOCKETS.build_gpus(tmp_path)
    shutil.rmtree(tmp_path / "proc")
    add_pci(tmp_path, "0000:01:00.0", "0x1a03", "0x030000")  # The screen of the server itself.
    add_pci(tmp_path, "0000:06:00.0", "0x10de", "0x068000")  # A switch of the same vendor.
    assert addresses(tmp_path) == ALL
    assert addresses(tmp_path, CUDA_VISIBLE_DEVICES="7,0") == [ALL[7], ALL[0]]


def test_gpus_are_ordered_by_numeric_pci_address(tmp_path: Path) -> None:
    for address in ("10000:01:00.0", "2000:01:00.0", "0000:c1:00.0", "0000:0a:00.0"):
        add_pci(tmp_path, address, "0x10de", "0x030200")
    expected = ["0000:0a:00.0", "0000:c1:00.0", "2000:01:00.0", "10000:01:00.0"]
    assert addresses(tmp_path) == expected


def test_gpus_without_a_device_file_in_the_container_are_not_counted(tmp_path: Path) -> None:
    TWO_SOCKETS.build_gpus(tmp_path)
    for name in ("nvidia2", "nvidia5", "nvidiactl", "nvidia-uvm"):
        put(tmp_path, f"dev/{name}", "")
    assert addresses(tmp_path) == [ALL[2], ALL[5]]
    assert addresses(tmp_path, CUDA_VISIBLE_DEVICES="1") == [ALL[5]]


@pytest.mark.parametrize(
    ("visible", "numbers"), [("3,1", [3, 1]), (f"{uuid_of(6)},0", [6, 0]), ("", []), ("2,9,3", [2])]
)
def test_visible_devices_are_counted_as_cuda_does(
    tmp_path: Path, visible: str, numbers: list[int]
) -> None:
    TWO_SOCKETS.build_gpus(tmp_path)
    found = addresses(tmp_path, CUDA_VISIBLE_DEVICES=visible, HIP_VISIBLE_DEVICES="0")
    assert found == [ALL[number] for number in numbers]


def test_unresolvable_gpu_names_are_refused(tmp_path: Path) -> None:
    TWO_SOCKETS.build_gpus(tmp_path)
    with pytest.raises(EnvironmentProblem, match="MIG-1a2b"):
        addresses(tmp_path, CUDA_VISIBLE_DEVICES="MIG-1a2b")
    shutil.rmtree(tmp_path / "proc")
    with pytest.raises(EnvironmentProblem, match=uuid_of(1)):
        addresses(tmp_path, CUDA_VISIBLE_DEVICES=uuid_of(1))


def test_with_several_models_the_gpu_order_is_unknown(tmp_path: Path) -> None:
    add_nvidia(tmp_path, 0, 0, "NVIDIA T4")
    add_nvidia(tmp_path, 1, 0, "NVIDIA A100")
    assert read_gpus(str(tmp_path), {}).models == ("NVIDIA A100", "NVIDIA T4")
    assert read_gpus(str(tmp_path), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).models == ()


def add_amd(root: Path, node: int, bus: int, simds: int = 304, domain: int = 0) -> None:
    put(
        root,
        f"sys/class/kfd/kfd/topology/nodes/{node}/properties",
        f"cpu_cores_count 0\nsimd_count {simds}\nlocation_id {bus << 8}\ndomain {domain}\n"
        f"unique_id {bus}",
    )


def test_amd_gpus_are_in_the_order_of_hip(tmp_path: Path) -> None:
    add_amd(tmp_path, 0, 0, simds=0)  # The CPUs.
    add_amd(tmp_path, 1, 0xC1)
    add_amd(tmp_path, 2, 0x05)
    add_amd(tmp_path, 10, 0x26, domain=1)
    expected = ["0000:c1:00.0", "0000:05:00.0", "0001:26:00.0"]
    assert addresses(tmp_path) == expected
    assert addresses(tmp_path, CUDA_VISIBLE_DEVICES="1") == expected[1:2]
    assert addresses(tmp_path, HIP_VISIBLE_DEVICES="2", CUDA_VISIBLE_DEVICES="1") == expected[2:]
    # HIP counts within what ROCr shows.
    named = "GPU-00000000000000c1"
    shown = addresses(tmp_path, ROCR_VISIBLE_DEVICES=f"2,{named}", HIP_VISIBLE_DEVICES="1,0")
    assert shown == [expected[0], expected[2]]
