from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.numa.affinity import Cpu, NumaNode, NumaTopology
from holdfast.numa.topology import node_of, read_machine
from synthetic_machines import add_pci, put

if TYPE_CHECKING:
    from pathlib import Path


def test_missing_topology_is_none(tmp_path: Path) -> None:
    put(tmp_path, "sys/devices/system/node/node0/cpulist", "0-1")
    cpus = (Cpu(0, 0, None, None), Cpu(1, 1, None, None))
    assert read_machine(str(tmp_path), []) == NumaTopology((NumaNode(0, cpus),), ())


@pytest.mark.parametrize(("content", "node"), [(1, 1), (-1, 0), (None, 0)])
def test_device_of_an_unknown_numa_node_is_at_the_first_node(
    tmp_path: Path, content: int | None, node: int
) -> None:
    add_pci(tmp_path, "0000:07:00.0", "0x10de", "0x030200", content)
    assert node_of(str(tmp_path), "0000:07:00.0") == node
